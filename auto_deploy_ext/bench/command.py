"""``auto-deploy-ext bench``: its arguments, and the session that they ask for."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from ..commands.command_line import finite, one_of, one_thread, options_besides, positive, why_not_writable
from ..spelling import unknown_name_message
from .cells import POLICIES, BenchError

if TYPE_CHECKING:
    from .cells import Backend, Group, Variant
    from .session import Findings, Session

DEFAULT_CONFIG = "bench_llama8b_eagle3"
PARTS = ("cells", "launches", "scale")
#: what these parts may take of the time that cells would take otherwise.
_SHARE_OF_TIME = {"launches": 0.06, "scale": 0.2}

DESCRIPTION = """\
Measures whole Eagle steps (verify, accept, draft K tokens) under each mirror policy, all in one process. Each
repetition runs a short block of steps of every policy, in an order that rotates, and medians count; so a policy cannot
win because the clock was higher in its minute. Each cell is compared with `none`, which brings no mirror up to date:
what it computes is useless, and nothing can be faster. A ratio is the median of the repetitions' own ratios.

A step is `nest_sequences` of a prepared extend-only batch and the wrapper's forward; no token is read back. Batches
take turns: each moves every row on by half of its drafts, over pages in random order, and keys and values are noise.
"""

EPILOG = """\
policies:
{policies}

examples:
  auto-deploy-ext bench --quick                             a minute that touches every kind of cell: try this first
  auto-deploy-ext bench --json all.json --plot all.png      the whole matrix, most important cells first
  auto-deploy-ext bench --attn flashinfer --compile torch-cudagraph --k 6 --batch 8
  auto-deploy-ext bench --parts scale --attn flashinfer --compile torch-cudagraph --k 6 --json scale.json
  auto-deploy-ext bench --merge all.json scale.json --json both.json --plot both.png
  auto-deploy-ext bench --quick --config bench_tiny         without a GPU: not a measurement, but every part of it runs

What does not fit --budget-seconds is left out, and the output says so; a cell that is there has been repeated three
times at least. Whatever cannot be built (a backend that is not installed) is left out with its reason.
Exit codes: 0 measured, 1 the GPU failed and what came before is reported, 2 wrong usage, or nothing could be measured.
"""


def add_parser(commands: Any) -> None:
    """Add the command to the parsers of all commands."""
    parser = commands.add_parser(
        "bench",
        help="measure whole draft steps under every mirror policy, interleaved",
        description=DESCRIPTION,
        epilog=EPILOG.format(policies="\n".join(f"  {name:8}{text}" for name, text in POLICIES.items())),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        default=DEFAULT_CONFIG,
        metavar="NAME_OR_PATH",
        help="shapes of target and drafter, limits and device (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result, after every group of cells")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the result as a PNG; needs matplotlib")
    parser.add_argument(
        "--merge", type=Path, nargs="+", metavar="FILE", help="measure nothing; merge JSON files of partial runs"
    )
    what = parser.add_argument_group("what to measure")
    what.add_argument(
        "--parts",
        nargs="+",
        type=one_of("part", PARTS),
        metavar="PART",
        default=["cells", "launches"],
        help="cells: the matrix; launches: kernels between the models, with and without fusion; scale: step time over "
        "batch and sequence length (default: cells launches)",
    )
    what.add_argument("--attn", nargs="+", metavar="NAME", help="attention backends (on a GPU: flashinfer triton)")
    what.add_argument(
        "--compile", nargs="+", metavar="NAME", help="compile backends (on a GPU: torch-cudagraph torch-simple)"
    )
    what.add_argument(
        "--capture",
        choices=("consumers", "segments"),
        default="segments",
        help="what torch-cudagraph makes a device graph: each consumer, or all between two calls of the host (default)",
    )
    what.add_argument("--k", nargs="+", type=positive, metavar="N", help="drafted tokens per step (on a GPU: 3 6)")
    what.add_argument("--batch", nargs="+", type=positive, metavar="N", help="rows of a batch (on a GPU: 1 8 64)")
    what.add_argument("--context", type=positive, metavar="N", help="cached tokens of a row (on a GPU: 1024)")
    what.add_argument(
        "--policies",
        nargs="+",
        type=one_of("policy", POLICIES),
        default=list(POLICIES),
        metavar="POLICY",
        help="see below; default: all",
    )
    what.add_argument(
        "--fusion", choices=("both", "on", "off"), default="both", help="with fuse_metadata_mutations, without, or both"
    )
    what.add_argument(
        "--scale-batch", nargs="+", type=positive, metavar="N", help="batches of the sweep (on a GPU: 1 4 16 64 256)"
    )
    what.add_argument(
        "--scale-context",
        nargs="+",
        type=positive,
        metavar="N",
        help="cached tokens in the sweep (on a GPU: 128 512 2048 8192 32768)",
    )
    what.add_argument(
        "--scale-most-tokens",
        type=positive,
        default=2_200_000,
        metavar="N",
        help="points of the sweep with more cached tokens over all rows are left out (default: %(default)s)",
    )
    what.add_argument(
        "--traces",
        type=Path,
        metavar="DIR",
        help="also write Chrome traces of some steps of the first group, under each policy, into a folder",
    )
    effort = parser.add_argument_group("how long")
    effort.add_argument(
        "--quick",
        action="store_true",
        help="about a minute: one K, one batch, three short repetitions, two sweep sizes",
    )
    effort.add_argument(
        "--budget-seconds", type=_positive_number, metavar="S", help="for everything (default: 480; quick: 150)"
    )
    effort.add_argument(
        "--repetitions", type=positive, metavar="N", help="of every cell at most (default: 41; quick: 3)"
    )
    effort.add_argument(
        "--precision",
        type=_positive_number,
        default=0.002,
        metavar="E",
        help="a group whose ratios have all this standard error is not repeated further (default: %(default)s)",
    )
    effort.add_argument(
        "--block-ms", type=_positive_number, metavar="MS", help="length of a timed block (default: 40; quick: 15)"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="log the transforms, and tracebacks of what fails")
    parser.set_defaults(function=bench_command)


def _positive_number(text: str) -> float:
    value = finite(text)
    if value is None or value <= 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _check_writable(option: str, path: Path, is_folder: bool = False) -> None:
    """Raise BenchError where an option's file, or files in its folder, could not be written in the end."""
    reason = why_not_writable(path, is_folder)
    if reason is not None:
        raise BenchError(f"{option} {path} cannot be written: {reason}; name another place")


def _check_backends(attention: Iterable[str], compiled: Iterable[str]) -> None:
    """Raise BenchError for a name that no backend has."""
    from ..embedded.custom_ops.attention_interface import AttentionRegistry
    from ..embedded.transform.library.compile_model import COMPILE_BACKENDS

    for name in attention:
        try:
            AttentionRegistry.get(name)
        except ValueError as error:
            raise BenchError(f"--attn: {error}") from error
    for name in compiled:
        if name not in COMPILE_BACKENDS:
            raise BenchError(f"--compile: {unknown_name_message('compile backend', name, COMPILE_BACKENDS)}")


def bench_command(arguments: argparse.Namespace) -> int:
    """``auto-deploy-ext bench``.

    Raises:
        BenchError: see `_measure`; or a file that is asked for cannot be written.
        MergeError: files that cannot be merged.
    """
    from ..commands.report import make_console
    from .plot import PlotError, check_available, write_plot
    from .results import load_result, merge_results
    from .show import summary

    if arguments.plot:
        try:
            check_available()
        except PlotError as error:
            raise BenchError(str(error)) from error
        _check_writable("--plot", arguments.plot)
        if arguments.plot.suffix.lower() not in ("", ".png"):
            raise BenchError(f"--plot {arguments.plot}: a PNG is drawn; name a file that ends in .png")
        if arguments.json and os.path.realpath(arguments.json) == os.path.realpath(arguments.plot):
            raise BenchError(f"--json and --plot both name {arguments.json}; name two files")
    if arguments.traces and not arguments.merge:
        _check_writable("--traces", arguments.traces, is_folder=True)
    lost = False
    if arguments.merge:
        _check_only_merging(arguments)
        result = merge_results([load_result(path) for path in arguments.merge])
    else:
        result, lost = _measure(arguments)
    make_console().print(summary(result))
    if arguments.json:
        write_json(arguments.json, result)
    if arguments.plot:
        write_plot(result, arguments.plot)
    return 1 if lost else 0


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result with one line per cell; a file is there completely or not at all."""
    from ..commands.report import write_text

    parts = []
    for key, value in result.items():
        if isinstance(value, list) and value:
            lines = ",\n".join(f"    {json.dumps(entry, allow_nan=False)}" for entry in value)
            parts.append(f"  {json.dumps(key)}: [\n{lines}\n  ]")
        else:
            parts.append(f"  {json.dumps(key)}: {json.dumps(value, allow_nan=False)}")
    write_text(path, "{\n" + ",\n".join(parts) + "\n}\n")


def _check_only_merging(arguments: argparse.Namespace) -> None:
    """Raise BenchError where an option says what to measure, or how, although nothing is measured."""
    others = argparse.ArgumentParser()
    add_parser(others.add_subparsers())
    unsaid = others.parse_args(["bench"])
    said = options_besides({"merge", "json", "plot", "verbose", "function"}, arguments, unsaid)
    if said:
        raise BenchError(f"--merge measures nothing, so it takes no {said}; leave one or the other out")


# ---------------------------------------------------------------- measuring


def _measure(arguments: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """Measure what the arguments ask for; gives the result, and whether the GPU was lost on the way.

    Raises:
        BenchError: there is no GPU, a batch does not fit, or nothing could be measured.
    """
    import torch

    from ..embedded.pipeline import use_device
    from ..reports.versions import versions
    from .pipelines import ModelSource
    from .results import describe_device, make_result, sources
    from .session import DeviceLostError, Effort, LeftOut, Session

    source = ModelSource(arguments.config, capture=arguments.capture)
    device = source.config.torch_device
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BenchError(
            f"config {arguments.config!r} runs on {device}, and PyTorch finds no GPU here; "
            "--config bench_tiny runs on the CPU"
        )
    use_device(source.config)
    plan = Plan.of(arguments, source.config)
    about = {
        "config": str(arguments.config),
        "device": describe_device(device),
        "versions": versions(),
        "settings": {**plan.settings(source.config), "capture": source.capture, "sources": sources()},
    }

    def save(findings: Findings) -> None:
        if arguments.json:
            write_json(arguments.json, make_result(findings, about))

    effort = Effort(plan.seconds, plan.repetitions, plan.block_ms / 1e3, plan.precision)
    with one_thread(device.type == "cpu"), _progress() as progress:  # on a CPU the models are small
        session = Session(source, effort, save, progress)
        session.findings.left_out += [LeftOut(what, why) for what, why in plan.left_out]
        lost = False
        try:
            plan.run(session)
        except DeviceLostError as error:
            session.findings.left_out.append(LeftOut("everything after that", f"the GPU's context is lost: {error}"))
            lost = True
    findings = session.findings
    if not (findings.cells or findings.scale or findings.launches):
        reasons = "; ".join(f"{entry.what}: {entry.why}" for entry in findings.left_out)
        raise BenchError(f"nothing could be measured: {reasons}")
    return make_result(findings, about), lost


@dataclass(frozen=True)
class Plan:
    """What the arguments, and their defaults for the config's device, come to.

    Attributes:
        parts: of PARTS, what is measured.
        groups: the matrix, most important first.
        variants: of each group.
        scale_groups: the sweep over batch and sequence length.
        scale_variants: of each group of the sweep.
        scale_most_tokens: groups of the sweep with more cached tokens are left out.
        launch_backends: whose launches are counted.
        launch_variants: likewise.
        context: cached tokens of a row in the matrix.
        traces: the folder of traces; None: none are written.
        seconds: for everything.
        repetitions: of each cell at most.
        precision: of ratios, see `Effort`.
        block_ms: what a timed block should take.
        left_out: what is left out from the start, and why.
    """

    parts: tuple[str, ...]
    groups: list[Group]
    variants: list[Variant]
    scale_groups: list[Group]
    scale_variants: list[Variant]
    scale_most_tokens: int
    launch_backends: list[Backend]
    launch_variants: list[Variant]
    context: int
    traces: Path | None
    seconds: float
    repetitions: int
    precision: float
    block_ms: float
    left_out: list[tuple[str, str]]

    @classmethod
    def of(cls, arguments: argparse.Namespace, config: Any) -> Plan:
        """Read the arguments.

        Raises:
            BenchError: fewer repetitions than a median needs, or sizes that the config cannot have.
        """
        from ..rewriting.fusion import reason_without_triton
        from .cells import Backend, Variant, groups_of, variants_of
        from .session import FEWEST_REPETITIONS

        gpu, quick = config.torch_device.type == "cuda", arguments.quick
        drafts = config.max_draft_len
        if not drafts:
            raise BenchError(f"config {arguments.config!r} has no draft loop: set speculative_config.max_draft_len")
        if any(k >= config.kv_cache_config.tokens_per_block for k in arguments.k or ()):
            size = config.kv_cache_config.tokens_per_block
            raise BenchError(f"--k: a page of {size} tokens (kv_cache_config.tokens_per_block) must hold K + 1 tokens")
        attention = arguments.attn or (["flashinfer", "triton"] if gpu else [config.attn_backend])
        compiled = arguments.compile or (["torch-cudagraph", "torch-simple"] if gpu else ["torch-simple"])
        _check_backends(attention, compiled)
        ks = arguments.k or ([3, 6] if gpu and not quick else [6 if gpu else drafts])
        batches = arguments.batch or (([8] if quick else [8, 1, 64]) if gpu else [1, config.max_batch_size])
        context = arguments.context or (1024 if gpu else config.max_seq_len // 2)
        repetitions = arguments.repetitions or (3 if quick else 41)
        if repetitions < FEWEST_REPETITIONS:
            raise BenchError(f"--repetitions: a median needs at least {FEWEST_REPETITIONS}, got {repetitions}")
        fusions = {"both": [True, False], "on": [True], "off": [False]}[arguments.fusion]
        left_out = []
        reason = reason_without_triton(config.torch_device) if True in fusions else None
        if reason is not None:
            left_out.append(("fused cells", reason))
            fusions = [False]
        sweep_batches = arguments.scale_batch or (([1, 16] if quick else [1, 4, 16, 64, 256]) if gpu else batches)
        sweep_contexts = arguments.scale_context or (
            ([128, 4096] if quick else [128, 512, 2048, 8192, 32768]) if gpu else [8, context]
        )
        first = [Backend(attention[0], compiled[0], max(ks))]
        parts = PARTS if quick else tuple(arguments.parts)
        return cls(
            parts=parts,
            groups=groups_of(attention, compiled, ks, batches, context),
            variants=variants_of(arguments.policies, fusions),
            scale_groups=[
                group
                for backend in first
                for size in sweep_contexts
                for group in groups_of([backend.attention], [backend.compiled], [backend.k], sweep_batches, size)
            ],
            scale_variants=variants_of(["auto", "scoped"], fusions[:1]),
            scale_most_tokens=arguments.scale_most_tokens,
            launch_backends=[Backend(name, "torch-simple", max(ks)) for name in attention],
            launch_variants=[Variant("auto", fused) for fused in fusions],
            context=context,
            traces=arguments.traces,
            seconds=arguments.budget_seconds or (150.0 if quick else 480.0),
            repetitions=repetitions,
            precision=arguments.precision,
            block_ms=arguments.block_ms or (15.0 if quick else 40.0),
            left_out=left_out,
        )

    def run(self, session: Session) -> None:
        """Measure all parts; the profiler, which may slow down what comes after it, comes last."""
        if "cells" in self.parts:
            reserve = sum(_SHARE_OF_TIME.get(part, 0.0) for part in self.parts) * self.seconds
            session.measure_cells(self.groups, self.variants, reserve)
        if "scale" in self.parts:
            session.measure_scale(self.scale_groups, self.scale_variants, self.scale_most_tokens)
        if "launches" in self.parts:
            batch = min(group.batch for group in self.groups)
            session.count_launches(self.launch_backends, batch, self.context, self.launch_variants)
        if self.traces is not None:
            session.write_traces(self.groups[0], self.variants, self.traces)

    def settings(self, config: Any) -> dict[str, Any]:
        """What else decides the numbers, for the JSON."""
        from .batches import RING

        return {
            "parts": list(self.parts),
            "step": "nest_sequences of a prepared extend-only batch and the wrapper's forward; no token is read back",
            "clock": "events on the device's stream around a block of steps; host_us: until the last is issued",
            "context": self.context,
            "batches_in_turn": RING,
            "run_ahead": "of three passes, the one in the middle by its share",
            "ratio": "the median over repetitions of a cell's step over the limit's in the same repetition",
            "repetitions": self.repetitions,
            "precision": self.precision,
            "block_ms": self.block_ms,
            "budget_seconds": self.seconds,
            "dtype": config.dtype,
            "max_num_tokens": config.max_num_tokens,
            "tokens_per_block": config.kv_cache_config.tokens_per_block,
            "model_kwargs": config.model_kwargs,
            "speculative_model_kwargs": config.speculative_model_kwargs,
        }


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """A progress bar on stderr; yields what moves it."""
    columns: Sequence[Any] = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("starting", total=1.0)
        yield lambda what, share: progress.update(task, description=what, completed=share)
