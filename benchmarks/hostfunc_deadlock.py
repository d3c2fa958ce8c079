"""The deadlock of a GIL-holding encoder behind a captured host function, and its absence with drain_hostfuncs.

A child process replays a graph that contains a host function and then calls an encoder that waits for the device while
it holds the GIL, as a vision tower may that builds a cuDNN plan for a new image shape. Without the transform it hangs
every time and is killed at a bound; with it, all runs complete.

    python benchmarks/hostfunc_deadlock.py                      # on a GPU
    python benchmarks/hostfunc_deadlock.py --layer threads      # the same with a worker thread as the stream, no GPU
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from watchdog import watch_child

from auto_deploy_ext import SharedConfig, TransformRegistry
from auto_deploy_ext.commands.command_line import check_gpu
from auto_deploy_ext.embedded.graph_runner import GraphRunner
from auto_deploy_ext.hostfuncs import HostFuncOwner, ThreadStreams, hostfunc, use_owner
from auto_deploy_ext.hostfuncs.launch import LaunchLayer

HOST_WORK = 2000  # iterations of Python in the host function: enough to be outstanding when the encoder comes


def wait_for_cuda() -> Callable[[], None]:
    """A wait for the device that keeps the GIL: `cudaDeviceSynchronize` called as Python's own C functions are."""
    from auto_deploy_ext.hostfuncs.cuda import _cudart_path

    library = ctypes.PyDLL(_cudart_path())

    def wait() -> None:
        library.cudaDeviceSynchronize()

    return wait


class ThreadWait:
    """The same for a worker thread: a semaphore that every replay posts at its end."""

    def __init__(self) -> None:
        self._libc = ctypes.PyDLL(None)
        self._semaphore = ctypes.create_string_buffer(64)
        self._libc.sem_init(self._semaphore, 0, 0)

    def post(self) -> None:
        """The replay has come to its end."""
        self._libc.sem_post(self._semaphore)

    def __call__(self) -> None:
        """Wait for the end of one replay, keeping the GIL."""
        self._libc.sem_wait(self._semaphore)


class GilHoldingEncoder(nn.Module):
    """A convolution behind a wait that keeps the GIL."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.wait = wait

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """`[n, 3, h, w]` to `[n, 4, h - 2, w - 2]`."""
        self.wait()
        return self.conv(pixels)


class Model(nn.Module):
    """Replays the decode graph, then encodes the next image."""

    def __init__(self, runner: GraphRunner, encoder: GilHoldingEncoder) -> None:
        super().__init__()
        self.runner = runner
        self.vision_encoder = encoder

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """One step."""
        self.runner.replay("decode")
        return self.vision_encoder(pixels)


def child(layer_name: str, with_transform: bool, runs: int) -> None:
    """Run the steps and print how many came through, line by line."""
    faulthandler.dump_traceback_later(500, exit=True)  # its thread needs no GIL: nobody is left behind
    if layer_name == "threads":
        # Between a replay and the encoder's wait the main thread must not lose the GIL, or the host function might run
        # there, and nothing would hang: on a busy machine this happens. CUDA's is kept back by the device's sleep.
        sys.setswitchinterval(1000)
    layer: LaunchLayer
    wait: Callable[[], None]
    if layer_name == "cuda":
        from auto_deploy_ext.hostfuncs.cuda import CudaLayer

        layer, device = CudaLayer(), "cuda"
        wait = wait_for_cuda()
    else:
        layer, device = ThreadStreams(), "cpu"
        wait = ThreadWait()
    owner = HostFuncOwner("engine", layer)
    runner = GraphRunner(owner)
    ran = []

    @hostfunc
    def fill_mask() -> None:
        ran.append(sum(i * i for i in range(HOST_WORK)))

    static = torch.zeros(64, device=device)

    def decode() -> torch.Tensor:
        if device == "cuda":
            torch.cuda._sleep(1_000_000)  # the host function comes when the encoder waits already
        static.add_(1)
        fill_mask()
        if isinstance(wait, ThreadWait):
            wait.post()
        return static * 2

    with use_owner(owner), torch.no_grad():
        static.add_(1)
        model = Model(runner, GilHoldingEncoder(wait).to(device))
        model.vision_encoder.conv(torch.zeros(1, 3, 8, 8, device=device))
        owner.synchronize()
        runner.capture("decode", decode)
        if isinstance(wait, ThreadWait):
            wait()  # the capture has called it once
        if with_transform:
            transform = TransformRegistry.get("drain_hostfuncs").from_kwargs(
                stage="cache_init", encoders=["vision_encoder"]
            )
            transform(model, None, None, SharedConfig(), 0)
        print("ready", flush=True)
        for run in range(runs):
            owner.batch = run
            model(torch.zeros(1, 3, 8 + run % 40, 8 + run % 40, device=device))
            print(f"run {run}", flush=True)
        owner.drain()
    stats = {"ran": len(ran), "drains": owner.stats.drains, "drained_seconds": owner.stats.drained_seconds}
    print(json.dumps(stats), flush=True)


def watch(layer: str, with_transform: bool, runs: int, bound: float, total_bound: float = 400.0) -> dict[str, object]:
    """Start a child and kill it when it makes no progress for `bound` seconds."""
    command = [sys.executable, __file__, "--child", "--layer", layer, "--runs", str(runs)]
    if with_transform:
        command.append("--with-transform")
    # Importing torch and starting CUDA take their time on a busy machine.
    watched = watch_child(command, bound=bound, start_bound=min(240.0, total_bound), total_bound=total_bound)
    result: dict[str, object] = {
        "completed": sum(line.startswith("run ") for line in watched.lines),
        "hung": watched.hung,
        "started": "ready" in watched.lines,
        "killed": watched.killed,
        "exit_code": watched.exit_code,
        "start_seconds": round(watched.start_seconds, 2),
        "seconds": round(watched.seconds, 2),
    }
    if watched.lines and watched.lines[-1].startswith("{"):
        result |= json.loads(watched.lines[-1])
    return result


def main() -> int:
    """Show both sides; 0 when the first hangs every time and the second never."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", choices=["cuda", "threads"], default="cuda")
    parser.add_argument("--runs", type=int, default=200, help="runs with the transform (default: %(default)s)")
    parser.add_argument("--children", type=int, default=3, help="children without it (default: %(default)s)")
    parser.add_argument("--bound", type=float, default=15.0, help="seconds without progress that count as a hang")
    parser.add_argument("--json", type=Path, help="also write the result as JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--with-transform", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.layer == "cuda":
        check_gpu(parser, "--layer cuda", "--layer threads")
    if arguments.child:
        child(arguments.layer, arguments.with_transform, arguments.runs)
        return 0
    without = [watch(arguments.layer, False, 5, arguments.bound) for _ in range(arguments.children)]
    hangs = sum(bool(result["hung"]) for result in without)
    print(f"without drain_hostfuncs: {hangs} of {len(without)} children hung; steps completed before: ", end="")
    print(", ".join(str(result["completed"]) for result in without))
    with_it = watch(arguments.layer, True, arguments.runs, arguments.bound)
    print(f"with drain_hostfuncs: {with_it['completed']} of {arguments.runs} runs completed, hung: {with_it['hung']}")
    if "drained_seconds" in with_it:
        per_run = float(str(with_it["drained_seconds"])) / arguments.runs * 1e6
        print(f"drains: {with_it['drains']}, {per_run:.0f} us each; host functions run: {with_it['ran']}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"without": without, "with": with_it}, indent=2) + "\n")
    return 0 if hangs == len(without) and with_it["completed"] == arguments.runs else 1


if __name__ == "__main__":
    sys.exit(main())
