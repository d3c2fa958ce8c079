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
import pstats
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from auto_deploy_ext.bench.batches import make_ring
from auto_deploy_ext.bench.cells import POLICIES, Backend, BenchError, Variant, rotated
from auto_deploy_ext.bench.measure import Steps
from auto_deploy_ext.bench.pipelines import Limits, ModelSource
from auto_deploy_ext.bench.policies import make_forwards
from auto_deploy_ext.bench.session import without_collection
from auto_deploy_ext.commands.command_line import one_of, positive
from auto_deploy_ext.embedded.config import ConfigError
from auto_deploy_ext.embedded.custom_ops.attention_interface import AttentionRegistry
from auto_deploy_ext.embedded.pipeline import use_device
from auto_deploy_ext.embedded.transform.library.compile_model import COMPILE_BACKENDS
from auto_deploy_ext.rewriting.fusion import reason_without_triton

STEPS = 64
LINES = 30

#: by function, its calls in a step and the microseconds that it takes itself.
Profile = dict[str, tuple[float, float]]


class Row(NamedTuple):
    """A function that two variants do not call equally often in a step: the difference, and the first one's calls."""

    microseconds: float
    calls: float
    all_calls: float
    name: str


def source_of(options: argparse.Namespace) -> ModelSource:
    """The config, once it is known that what is asked for can be had here; nothing is built.

    Raises:
        ConfigError: no such config, a mistake in it, or no such GPU.
        BenchError: no GPU at all, no draft loop, no such attention backend, or nothing that could fuse.
    """
    source = ModelSource(options.config, capture="segments")
    device = source.config.torch_device
    if not source.config.max_draft_len:
        raise BenchError(f"config {options.config!r} has no draft loop: set speculative_config.max_draft_len")
    try:
        AttentionRegistry.get(options.attn)
    except ValueError as error:
        raise BenchError(f"--attn: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BenchError(
            f"config {options.config!r} runs on {device}, and PyTorch finds no GPU here; "
            "--config bench_tiny runs on the CPU"
        )
    use_device(source.config)
    reason = None if options.unfused else reason_without_triton(device)
    if reason is not None:
        raise BenchError(f"{reason}; --unfused does without")
    return source


def build(source: ModelSource, variants: Sequence[Variant], options: argparse.Namespace) -> Steps:
    """What runs the steps of all variants, warmed up.

    Raises:
        BenchError: it cannot be built as it is asked for.
    """
    backend = Backend(options.attn, options.compile, options.k)
    length = options.context + 8 * (options.k + 1)
    limits = Limits(max(source.config.max_batch_size, options.batch), max(source.config.max_seq_len, length))
    try:
        pipeline = source.build(backend, limits, [options.batch])
        forwards = make_forwards(pipeline, variants)
        pipeline.compile()
        steps = Steps(pipeline, forwards, make_ring(pipeline.cm, options.batch, options.k, options.context))
        for variant in variants:
            steps.warm_up(variant)
    except (ValueError, ImportError, RuntimeError) as error:  # also what capture and the device's memory raise
        raise BenchError(f"{backend} cannot be built: {error}") from error
    return steps


def step_times(steps: Steps, variants: Sequence[Variant], repetitions: int) -> dict[Variant, list[float]]:
    """Microseconds of a step of each variant, by repetition; they run in turn."""
    blocks: dict[Variant, list[float]] = {variant: [] for variant in variants}
    for repetition in range(repetitions):
        for variant in rotated(variants, repetition):
            blocks[variant].append(steps.time_block(variant, 4).step_us)
    return blocks


def profile(steps: Steps, variant: Variant) -> Profile:
    """What a variant's steps call."""
    with steps.using(variant):
        steps.run(8)
        steps.synchronize()
        profiler = cProfile.Profile()
        profiler.enable()
        steps.run(STEPS)
        profiler.disable()
        steps.synchronize()
    known: dict[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    found: Profile = {}
    for function, (_, calls, own, *_) in known.items():
        before = found.get(named(function), (0.0, 0.0))
        found[named(function)] = before[0] + calls / STEPS, before[1] + own * 1e6 / STEPS
    return found


def named(function: tuple[str, int, str]) -> str:
    """A function's name and place, without what differs from machine to machine or from policy to policy."""
    path, line, name = function
    if path in ("~", ""):
        return re.sub(r" at 0x[0-9a-f]+", "", name)
    if path.startswith("<eval_with_key>"):
        return f"generated code: {name}"
    return f"{'/'.join(Path(path).parts[-2:])}:{line} {name}"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="bench_llama8b_eagle3")
    parser.add_argument("--attn", default="flashinfer", help="attention backend of target and drafter")
    parser.add_argument(
        "--compile",
        default="torch-simple",
        type=one_of("compile backend", COMPILE_BACKENDS),
        metavar="BACKEND",
        help=f"of {', '.join(COMPILE_BACKENDS)} (default: %(default)s)",
    )
    parser.add_argument("--k", type=positive, default=6)
    parser.add_argument("--batch", type=positive, default=64)
    parser.add_argument("--context", type=positive, default=1024)
    parser.add_argument(
        "--policies",
        nargs=2,
        type=one_of("policy", POLICIES),
        default=["auto", "none"],
        metavar="POLICY",
        help=f"this one, less that; of {', '.join(POLICIES)} (default: auto none)",
    )
    parser.add_argument("--unfused", action="store_true", help="without fuse_metadata_mutations")
    parser.add_argument("--repetitions", type=positive, default=15)
    options = parser.parse_args(arguments)
    if len(set(options.policies)) == 1:
        parser.error(f"argument --policies: {options.policies[0]} is compared with itself; name two")
    return options


def difference(mine: Profile, its: Profile) -> tuple[list[Row], float]:
    """Functions that are not called equally often, largest difference first; and what the others differ by in all."""
    nothing = (0.0, 0.0)
    rows, alike = [], 0.0
    for name in sorted({*mine, *its}):
        (calls, microseconds), (fewer, less) = mine.get(name, nothing), its.get(name, nothing)
        if calls == fewer:
            alike += microseconds - less
        else:
            rows.append(Row(microseconds - less, calls - fewer, calls, name))
    return sorted(rows, key=lambda row: (-abs(row.microseconds), row.name)), alike


def print_times(blocks: dict[Variant, list[float]], variants: Sequence[Variant]) -> None:
    """Medians, and the median of the repetitions' own ratios."""
    own, other = (blocks[variant] for variant in variants)
    ratio = statistics.median(a / b for a, b in zip(own, other, strict=True))
    first, second = variants
    print(
        f"step: {first} {statistics.median(own):.0f} us, {second} {statistics.median(other):.0f} us, ratio {ratio:.3f}"
    )


def print_difference(rows: Sequence[Row], alike: float, variants: Sequence[Variant]) -> None:
    """The functions that differ most."""
    first, second = variants
    total = sum(row.microseconds for row in rows)
    print(
        f"\nper step, {first} less {second}: {total:.0f} us under the profiler where calls differ; else {alike:.0f} us"
    )
    print(f"{'us':>8} {'calls':>7} {'of calls':>8}  function")
    for row in rows[:LINES]:
        print(f"{row.microseconds:8.1f} {row.calls:7.2f} {row.all_calls:8.2f}  {row.name}")


def compare(options: argparse.Namespace) -> None:
    """Time both policies, profile both, and print the difference.

    Raises:
        ConfigError: see `source_of`.
        BenchError: see `source_of` and `build`.
    """
    source = source_of(options)
    variants = [Variant(policy, not options.unfused) for policy in options.policies]
    steps = build(source, variants, options)
    with without_collection():
        blocks = step_times(steps, variants, options.repetitions)
        gpu = torch.cuda.get_device_name() if source.config.torch_device.type == "cuda" else "no GPU"
        backend = Backend(options.attn, options.compile, options.k)
        print(f"{backend} batch={options.batch} context={options.context}, torch {torch.__version__}, {gpu}")
        print_times(blocks, variants)
        mine, its = (profile(steps, variant) for variant in variants)
    print_difference(*difference(mine, its), variants)


def main(arguments: list[str] | None = None) -> int:
    """Compare two policies; 2 if that cannot be done as it is asked for."""
    options = parse(arguments)
    try:
        compare(options)
    except (ConfigError, BenchError) as error:
        print(f"step_profile: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
