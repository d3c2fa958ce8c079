"""Kernel launches and host time of a draft step, with its metadata mutations one by one and fused.

Two measurements per batch size. One iteration's mutations alone (`switch_to_generate_`, `copy_`,
`offset_pos_and_cache_`): their launches and what they cost the host, beside a bare launch of the fused kernel. And
whole steps of an Eagle3 model: what is launched between two calls of the drafter, models apart, and how long a step
takes. Repetitions are interleaved; medians count.

    python benchmarks/fusion_launches.py --json benchmarks/results/fusion_launches.json

On a machine without a GPU it counts PyTorch's outermost operators instead of kernels, and its times say nothing. Exits
with 1 if, on a GPU, fusion saves less than two thirds of the launches between drafter calls, or makes the smallest
batch slower.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function

from auto_deploy_ext import SequenceInfo, orchestrator_graphs
from auto_deploy_ext.commands.command_line import check_gpu
from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.pipeline import Pipeline, build_pipeline
from auto_deploy_ext.rewriting.fusion import fuse_graphs
from auto_deploy_ext.rewriting.scoping import ScopeOptions, scope_module
from auto_deploy_ext.runtime import fused_mutations
from auto_deploy_ext.runtime.fused_mutations import Part

BATCHES = (1, 8, 64)
DRAFT_LENGTH = 6
#: of the launches between two drafter calls, how many times fewer there have to be.
GOAL = 3.0
PAGE = 32

ITERATION = (
    Part("switch_to_generate_", active_args=()),
    Part("copy_", "input_ids"),
    Part("offset_pos_and_cache_", active_args=()),
)


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


# -- one iteration's mutations -----------------------------------------------------------------------------------------


def extend_batch(info: SequenceInfo, rows: int) -> None:
    """Rows of a few tokens with a page or three behind them."""
    tokens = 1 + DRAFT_LENGTH
    cached = [40 + 3 * row % 20 for row in range(rows)]
    info.set_example_sequence(
        [[1] * tokens for _ in range(rows)],
        input_pos=cached,
        batch_info=[0, 0, rows, rows * tokens, 0, 0],
        extra_page_per_seq_per_pool=[list(range(rows))],
    )


class Mutations:
    """One iteration's mutations of a batch, over and over: the offset is 0, so that pages last.

    Args:
        rows: sequences.
        device: where their metadata lies.
    """

    def __init__(self, rows: int, device: str) -> None:
        self.device = device
        self.info = SequenceInfo(256, rows, rows * (1 + DRAFT_LENGTH), tokens_per_block=PAGE).to(device)
        self.info.update_cache_information(rows * 10)
        self.info.activate_arg("cache_loc")
        self.rows = rows
        self.operands = (
            torch.ones(rows, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
        )
        self._parts = tuple(map(tuple, ITERATION))

    def restart(self) -> None:
        """Put the extend batch back that an iteration begins with."""
        extend_batch(self.info, self.rows)

    def apart(self) -> None:
        """Call them one by one."""
        self.info.switch_to_generate_(active_args_override=set())
        self.info.copy_("input_ids", self.operands[0])
        self.info.offset_pos_and_cache_(self.operands[1], active_args_override=set())

    def fused(self) -> None:
        """Call them as one."""
        fused_mutations.mutate_all(self.info, self._parts, self.operands)

    def bare(self) -> Callable[[], None] | None:
        """A launch of the kernel that `fused` launches for a generate-only batch, and nothing else."""
        if self.device != "cuda":
            return None
        memory = fused_mutations.memory_of(self.info)
        launcher = list(memory._launchers.values())[-1]
        tokens, offset = (operand.data_ptr() for operand in self.operands)
        copied = (tokens, memory.targets["input_ids"][0], self.rows)
        arguments = (memory._address, self.rows, 1, *copied, offset, 0, self.rows, *[0] * 6)
        return lambda: launcher(*arguments)


def microseconds(body: Callable[[], None], device: str, repeat: int) -> float:
    """The host's time for a call, while the device's queue does not fill."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeat):
        body()
    elapsed = time.perf_counter() - start
    synchronize(device)
    return elapsed / repeat * 1e6


def measure_mutations(rows: int, device: str, rounds: int) -> dict[str, Any]:
    """Launches and host times of one iteration's mutations."""
    mutations = Mutations(rows, device)
    found: dict[str, Any] = {"batch": rows}
    for name, body in (("apart", mutations.apart), ("fused", mutations.fused)):
        for _ in range(2):
            mutations.restart()
            body()
        mutations.restart()
        synchronize(device)
        with traced(device) as trace:
            body()
            synchronize(device)
        on_device = sum(event.device_type == _ON_DEVICE for event in trace.events())
        found[f"launches_{name}"] = on_device if device == "cuda" else len(launches_in(trace.events(), device))
    bodies = {"apart": mutations.apart, "fused": mutations.fused}
    bare = mutations.bare()
    if bare is not None:
        bodies["bare_launch"] = bare
    times: dict[str, list[float]] = {name: [] for name in bodies}
    for _ in range(rounds):
        for name, body in bodies.items():
            times[name].append(microseconds(body, device, 20 if name == "apart" else 100))
    found |= {f"host_us_{name}": round(statistics.median(values), 2) for name, values in times.items()}
    return found


# -- traces ------------------------------------------------------------------------------------------------------------


def traced(device: str) -> profile:
    """A trace of what is called, and of what it launches."""
    return profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])])


def launches_in(events: Sequence[Any], device: str) -> list[float]:
    """When kernels, copies and fills are launched; without a GPU, when operators begin that no other has called."""
    if device == "cuda":
        words = ("LaunchKernel", "GraphLaunch", "Memcpy", "Memset")
        return [e.time_range.start for e in events if e.name.startswith("cu") and any(w in e.name for w in words)]
    return [e.time_range.start for e in events if e.name.startswith("aten::") and _outermost(e)]


def _outermost(event: Any) -> bool:
    parent = event.cpu_parent
    return parent is None or not parent.name.startswith("aten::")


_MODEL = "model:"
_ON_DEVICE = torch.autograd.DeviceType.CUDA


@contextmanager
def marked(wrapper: Any) -> Iterator[None]:
    """Mark the calls of both models, and of the modules of theirs that the wrapper calls itself, in a trace."""
    open_marks: list[Any] = []

    def before(name: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            open_marks.append(record_function(_MODEL + name))
            open_marks[-1].__enter__()

        return enter

    def after(*_: Any) -> None:
        open_marks.pop().__exit__(None, None, None)

    handles = []
    for name, module in models_of(wrapper).items():
        handles.append(module.register_forward_pre_hook(before(name)))
        handles.append(module.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def models_of(wrapper: Any) -> dict[str, torch.nn.Module]:
    """Both models, their embeddings and heads, by name."""
    found: dict[str, torch.nn.Module] = {}
    for name in ("target_model", "draft_model"):
        model = getattr(wrapper, name)
        parts = {"": model, ".embed": model.get_input_embeddings(), ".head": model.get_output_embeddings()}
        parts[".fc"] = getattr(model, "fc", None)
        found |= {name + suffix: part for suffix, part in parts.items() if isinstance(part, torch.nn.Module)}
    return found


def between_drafts(events: Sequence[Any], device: str) -> float:
    """Launches between one call of the drafter and the next, models apart, on average."""
    marks = [e for e in events if e.name.startswith(_MODEL) and e.device_type != _ON_DEVICE]
    spans = [(e.name, e.time_range.start, e.time_range.end) for e in marks]
    drafts = sorted((start, end) for name, start, end in spans if name == f"{_MODEL}draft_model")
    launched = launches_in(events, device)
    outside = [t for t in launched if not any(start <= t < end for _, start, end in spans)]
    gaps = list(pairwise(drafts))
    return sum(first[1] <= t < second[0] for t in outside for first, second in gaps) / max(1, len(gaps))


# -- whole steps -------------------------------------------------------------------------------------------------------


def make_pipeline(device: str, rows: int) -> Pipeline:
    """A small Eagle3 model whose drafter reads host mirrors."""
    overrides = {
        "device": device,
        "max_batch_size": rows,
        "max_num_tokens": max(64, rows * (1 + DRAFT_LENGTH)),
        "kv_cache_config.tokens_per_block": PAGE,
        "speculative_config.max_draft_len": DRAFT_LENGTH,
        "attn_backend": "torch",
        "draft_attn_backend": "torch",
    }
    return build_pipeline(load_config("eagle3_llama", overrides=overrides))


def measure_steps(rows: int, device: str, rounds: int) -> dict[str, Any]:
    """Launches between drafter calls, and the time of a step."""
    pipeline = make_pipeline(device, rows)
    wrapper, cm = pipeline.model, pipeline.cm

    def prepare(fusing: bool) -> Any:
        scope_module(wrapper, cm, ScopeOptions(strategy="auto"))
        if fusing:
            fuse_graphs(orchestrator_graphs(wrapper).values(), cm)
        return wrapper.forward

    forwards = {"apart": prepare(False), "fused": prepare(True)}
    found: dict[str, Any] = {}

    def step(forward: Any) -> None:
        with torch.inference_mode():
            forward(cm)

    times: dict[str, list[float]] = {name: [] for name in forwards}
    for name, forward in forwards.items():
        for _ in range(3):
            cm.info.set_capture_batch(DRAFT_LENGTH, rows)
            step(forward)
        cm.info.set_capture_batch(DRAFT_LENGTH, rows)
        synchronize(device)
        with marked(wrapper), traced(device) as trace:
            step(forward)
            synchronize(device)
        found[f"between_drafts_{name}"] = round(between_drafts(trace.events(), device), 2)
    for _ in range(rounds):
        for name, forward in forwards.items():
            cm.info.set_capture_batch(DRAFT_LENGTH, rows)
            synchronize(device)
            start = time.perf_counter()
            step(forward)
            synchronize(device)
            times[name].append((time.perf_counter() - start) * 1e6)
    found |= {f"step_us_{name}": round(statistics.median(values), 1) for name, values in times.items()}
    found["fewer_launches"] = round(found["between_drafts_apart"] / max(found["between_drafts_fused"], 1e-9), 2)
    found["faster"] = round(found["step_us_apart"] / found["step_us_fused"], 3)
    return found


# -- results -----------------------------------------------------------------------------------------------------------


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Print one line per batch size."""
    table = Table("batch", "launches", "host us", "bare us", "between drafts", "step us", "fewer", "faster")
    for row in rows:
        table.add_row(
            str(row["batch"]),
            f"{row['launches_apart']} -> {row['launches_fused']}",
            f"{row['host_us_apart']:.0f} -> {row['host_us_fused']:.1f}",
            f"{row['host_us_bare_launch']:.1f}" if "host_us_bare_launch" in row else "-",
            f"{row['between_drafts_apart']:.1f} -> {row['between_drafts_fused']:.1f}",
            f"{row['step_us_apart']:.0f} -> {row['step_us_fused']:.0f}",
            f"{row['fewer_launches']:.1f} x",
            f"{row['faster']:.2f} x",
        )
    console.print(table)


def environment(device: str) -> dict[str, Any]:
    """What this ran on."""
    versions: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "device": device}
    if device == "cuda":
        import triton

        versions |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "triton": triton.__version__}
    return versions


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; the exit status says whether the goals are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="batch sizes")
    parser.add_argument("--rounds", type=int, default=20, help="interleaved repetitions")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args(arguments)
    if options.device == "cuda":
        check_gpu(parser, "--device cuda", "--device cpu")
    console = Console()
    rows = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("batch sizes", total=len(options.batches))
        for batch in options.batches:
            row = measure_mutations(batch, options.device, options.rounds)
            rows.append(row | measure_steps(batch, options.device, options.rounds))
            progress.advance(task)
    show(rows, console)
    result = {"environment": environment(options.device), "draft_length": DRAFT_LENGTH, "rows": rows}
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    smallest = min(rows, key=lambda row: row["batch"])
    met = all(row["fewer_launches"] >= GOAL for row in rows) and smallest["faster"] > 1
    return 0 if met or options.device == "cpu" else 1


if __name__ == "__main__":
    sys.exit(main())
