"""What the host does more in a step under one mirror policy than under another, by function.

Both policies' steps run in turn in one process, timed first, then under a profiler, whose own cost makes small
functions look dearer than they are: the counts are exact, the microseconds are not. Functions that both call equally
often are added up, because where these differ it is the machine. Where the host is the limit (`torch-simple`), this
says what a ratio of `auto-deploy-ext bench` comes from.

    python benchmarks/step_profile.py --attn flashinfer --compile torch-simple --k 6 --batch 64    # on a GPU
    python benchmarks/step_profile.py --config bench_tiny --attn torch_paged --k 3 --batch 2 --context 30
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from auto_deploy_ext.bench.batches import make_ring
from auto_deploy_ext.bench.cells import POLICIES, Backend, Variant, rotated
from auto_deploy_ext.bench.measure import Steps
from auto_deploy_ext.bench.pipelines import Limits, ModelSource
from auto_deploy_ext.bench.policies import make_forwards
from auto_deploy_ext.embedded.pipeline import use_device

STEPS = 64
LINES = 30


def profile(steps: Steps, variant: Variant) -> dict[str, tuple[float, float]]:
    """By function, its calls in a step and the microseconds that it takes itself."""
    with steps.using(variant):
        steps.run(8)
        steps.synchronize()
        profiler = cProfile.Profile()
        profiler.enable()
        steps.run(STEPS)
        profiler.disable()
        steps.synchronize()
    known: dict[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    found: dict[str, tuple[float, float]] = {}
    for function, (_, calls, own, *_) in known.items():
        before = found.get(named(function), (0.0, 0.0))
        found[named(function)] = before[0] + calls / STEPS, before[1] + own * 1e6 / STEPS
    return found


def named(function: tuple[str, int, str]) -> str:
    """A function's name and place, without what differs from machine to machine or from policy to policy."""
    path, line, name = function
    if path in ("~", ""):
        return name
    if path.startswith("<eval_with_key>"):
        return f"generated code: {name}"
    return f"{'/'.join(Path(path).parts[-2:])}:{line} {name}"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="bench_llama8b_eagle3")
    parser.add_argument("--attn", default="flashinfer", help="attention backend of target and drafter")
    parser.add_argument("--compile", default="torch-simple", choices=["torch-simple", "torch-cudagraph"])
    parser.add_argument("--k", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--policies", nargs=2, choices=POLICIES, default=["auto", "none"], help="this one, less that")
    parser.add_argument("--unfused", action="store_true", help="without fuse_metadata_mutations")
    parser.add_argument("--repetitions", type=int, default=15)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Time both policies, profile both, and print the difference."""
    options = parse(arguments)
    source = ModelSource(options.config, capture="segments")
    config = source.config
    use_device(config)
    backend = Backend(options.attn, options.compile, options.k)
    length = options.context + 8 * (options.k + 1)
    limits = Limits(max(config.max_batch_size, options.batch), max(config.max_seq_len, length))
    pipeline = source.build(backend, limits, [options.batch])
    variants = [Variant(policy, not options.unfused) for policy in options.policies]
    forwards = make_forwards(pipeline, variants)
    pipeline.compile()
    steps = Steps(pipeline, forwards, make_ring(pipeline.cm, options.batch, options.k, options.context))
    for variant in variants:
        steps.warm_up(variant)
    gc.collect()
    gc.disable()
    blocks: dict[Variant, list[float]] = {variant: [] for variant in variants}
    for repetition in range(options.repetitions):
        for variant in rotated(variants, repetition):
            blocks[variant].append(steps.time_block(variant, 4).step_us)
    own, other = (blocks[variant] for variant in variants)
    ratio = statistics.median(a / b for a, b in zip(own, other, strict=True))
    first, second = (str(variant) for variant in variants)
    gpu = torch.cuda.get_device_name() if config.torch_device.type == "cuda" else "no GPU"
    print(f"{backend} batch={options.batch} context={options.context}, torch {torch.__version__}, {gpu}")
    print(
        f"step: {first} {statistics.median(own):.0f} us, {second} {statistics.median(other):.0f} us, ratio {ratio:.3f}"
    )
    mine, its = (profile(steps, variant) for variant in variants)
    nothing = (0.0, 0.0)
    rows, alike = [], 0.0
    for name in {*mine, *its}:
        (calls, microseconds), (fewer, less) = mine.get(name, nothing), its.get(name, nothing)
        if calls == fewer:
            alike += microseconds - less
        else:
            rows.append((microseconds - less, calls - fewer, calls, name))
    rows.sort(key=lambda row: (-abs(row[0]), row[3]))
    total = sum(row[0] for row in rows)
    print(
        f"\nper step, {first} less {second}: {total:.0f} us under the profiler where calls differ; else {alike:.0f} us"
    )
    print(f"{'us':>8} {'calls':>7} {'of calls':>8}  function")
    for microseconds, calls, all_calls, name in rows[:LINES]:
        print(f"{microseconds:8.1f} {calls:7.2f} {all_calls:8.2f}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
