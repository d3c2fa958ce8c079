"""Overlap scheduling under random load: every request must get the tokens that it gets without it, decoding greedily.

Requests arrive in bursts and lulls, with random prompts, lengths and end tokens, so rows join, end in flight and run
once for nothing all the time. The sanitizer is on: a consumer that reads a stale mirror ends the run. What a request
must get is the target's own greedy continuation. Where tokens differ, the target's two best logits at the first
difference are looked at: closer than `--tie` is a tie, which rounding decides (it is counted); all else is an error.
At the end every page and slot must have come back. The exit code is 1 if anything was wrong, 2 for a wrong command.

Under the sanitizer each mutation is followed one by one. The short way that the mirrors of a fused run take otherwise
(`auto_deploy_ext.runtime.replay.PreparedReplay`) is exercised by the fused cases with `--no-sanitizer`.

    python benchmarks/overlap_stress.py                                   # all cases that this machine has, 2,000 steps
    python benchmarks/overlap_stress.py --steps 150 --cases torch_paged   # short
    python benchmarks/overlap_stress.py --no-sanitizer --cases torch_paged_fused
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 99 \\
        python benchmarks/overlap_stress.py --device cuda --memcheck
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch

from auto_deploy_ext import record_mirrors, sanitize
from auto_deploy_ext.commands.command_line import finite, one_of, positive, writable
from auto_deploy_ext.commands.report import write_text
from auto_deploy_ext.embedded.config import ConfigError, EmbeddedConfig, load_config
from auto_deploy_ext.embedded.generation import Engine, generate
from auto_deploy_ext.embedded.models.custom.modeling_eagle import EagleWrapper
from auto_deploy_ext.embedded.pipeline import Pipeline, build_pipeline
from auto_deploy_ext.embedded.requests import Request, RequestTooLargeError
from auto_deploy_ext.rewriting.fusion import reason_without_triton

FUSED = {"transforms.fuse_metadata_mutations.stage": "cache_init"}
#: by name: the config, what is changed in it, and whether it needs a GPU.
CASES: dict[str, tuple[str, dict[str, Any], bool]] = {
    "torch": ("eagle3_llama", {}, False),
    "torch_paged": ("eagle3_llama_paged", {}, False),
    "torch_paged_fused": ("eagle3_llama_paged", FUSED, False),
    "hybrid": ("mtp_hybrid", {}, False),
    "torch_graphs": ("eagle3_llama", {"compile_backend": "torch-cudagraph"}, False),
    "torch_one_graph": (
        "eagle3_llama",
        {"compile_backend": "torch-cudagraph", "transforms.compile_model.capture": "full"},
        False,
    ),
    "triton": ("eagle3_llama_paged", {"attn_backend": "triton", "draft_attn_backend": "triton"}, True),
    "flashinfer": ("eagle3_llama_paged", {"attn_backend": "flashinfer", "draft_attn_backend": "flashinfer"}, True),
    "flashinfer_triton": (
        "eagle3_llama_paged",
        {"attn_backend": "flashinfer", "draft_attn_backend": "triton"},
        True,
    ),
    "triton_graphs": (
        "eagle3_llama_paged",
        {"attn_backend": "triton", "draft_attn_backend": "triton", "compile_backend": "torch-cudagraph"},
        True,
    ),
    "triton_one_graph": (
        "eagle3_llama_paged",
        {
            "attn_backend": "triton",
            "draft_attn_backend": "triton",
            "compile_backend": "torch-cudagraph",
            "transforms.compile_model.capture": "full",
        },
        True,
    ),
    "flashinfer_graphs": (
        "eagle3_llama_paged",
        {"attn_backend": "flashinfer", "draft_attn_backend": "flashinfer", "compile_backend": "torch-cudagraph"},
        True,
    ),
    "flashinfer_fused": (
        "eagle3_llama_paged",
        {
            "attn_backend": "flashinfer",
            "draft_attn_backend": "flashinfer",
            "compile_backend": "torch-cudagraph",
            "transforms.compile_model.capture": "segments",
            **FUSED,
        },
        True,
    ),
}
#: cases short enough, and without graphs, whose memory comes from a pool that hides a write outside of a tensor.
MEMCHECK_CASES = ("torch_paged", "triton")
#: the FlashInfer kernels are compiled for heads of 64 and more.
FLASHINFER_SHAPE = {"model_kwargs.head_dim": 64, "dtype": "bfloat16"}
RATES = (0.0, 0.15, 0.4, 1.0)
#: what the command line does not say.
LOAD = {"steps": 2000, "prompts": 40, "tokens": 40}
MEMCHECK_LOAD = {"steps": 12, "prompts": 3, "tokens": 8}
#: outputs of 1, 2, 3 and some more tokens.
FEWEST_TOKENS = 4


class UsageError(ValueError):
    """Something about the command that the user has to change."""


@dataclass
class Report:
    """What a case did and found.

    Attributes:
        case: its name.
        steps: launched forwards.
        requests: requests answered.
        tokens: tokens in their outputs.
        for_nothing: rows that were launched after their request had ended.
        mixed: batches of prompts and running rows.
        filled: batches that were filled up to a captured size.
        checked: reads of mirrors that the sanitizer checked.
        transfers: copies to the host for the sake of mirrors.
        ties: requests that go another way where two logits are as good as equal.
        errors: what was wrong.
        seconds: of the run.
    """

    case: str
    steps: int = 0
    requests: int = 0
    tokens: int = 0
    for_nothing: int = 0
    mixed: int = 0
    filled: int = 0
    checked: int = 0
    transfers: int = 0
    ties: int = 0
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Prompt:
    """A prompt and its greedy continuation."""

    tokens: tuple[int, ...]
    continuation: tuple[int, ...]


class CountingEngine(Engine):
    """Counts rows that are launched for nothing, and batches that are filled up."""

    for_nothing = 0
    filled = 0

    def _nest(self, rows: Any) -> None:
        super()._nest(rows)
        self.filled += self.cm.info.num_sequences > len(rows)

    def _retire(self, step: Any) -> int:
        self.for_nothing += sum(seq.has_ended for seq in step.rows)
        return super()._retire(step)


def config_of(case: str, device: str, draft_len: int, batch_size: int) -> EmbeddedConfig:
    """The config of a case: small pages, so that rows cross them often.

    Raises:
        ConfigError: a draft does not fit a page.
    """
    name, changes, _ = CASES[case]
    overrides = {
        "device": device,
        "speculative_config.max_draft_len": draft_len,
        "kv_cache_config.tokens_per_block": 16 if "flashinfer" in case else max(draft_len + 1, 4),
        "max_batch_size": batch_size,
        "max_num_tokens": 48 * batch_size,
        "max_seq_len": 160,
        **(FLASHINFER_SHAPE if "flashinfer" in case else {}),
        **changes,
    }
    return load_config(name, overrides=overrides)


def build(case: str, device: str, draft_len: int, batch_size: int) -> Pipeline:
    """The pipeline of a case.

    Raises:
        ValueError: it cannot be built with these sizes.
    """
    return build_pipeline(config_of(case, device, draft_len, batch_size))


def make_prompts(pipeline: Pipeline, count: int, longest: int, tokens: int, rng: random.Random) -> list[Prompt]:
    """Random prompts and what the target alone, without overlap, makes of them.

    Raises:
        RequestTooLargeError: that many tokens do not fit.
    """
    vocab = pipeline.config.model_kwargs["vocab_size"]
    prompts = [tuple(rng.randrange(vocab) for _ in range(rng.randint(1, longest))) for _ in range(count)]
    result = generate(cast(EagleWrapper, pipeline.model), pipeline.cm, prompts, tokens, speculative=False)
    return [Prompt(output.prompt, output.tokens) for output in result.outputs]


def arrivals(rng: random.Random) -> Iterator[int]:
    """How many requests arrive before each step: bursts and lulls."""
    while True:
        rate = rng.choice(RATES)
        for _ in range(rng.randint(5, 40)):
            yield sum(rng.random() < rate for _ in range(2))


def random_request(prompt: Prompt, rng: random.Random) -> tuple[Request, tuple[int, ...]]:
    """A request and what it must give: some of the continuation, ended by its length or by an end token."""
    longest = len(prompt.continuation)
    limit = min(longest, rng.choice([1, 2, 3, rng.randint(min(FEWEST_TOKENS, longest), longest)]))
    ends = frozenset(rng.sample(prompt.continuation, 1)) if rng.random() < 0.5 else frozenset()
    expected = prompt.continuation[:limit]
    stop = next((i for i, token in enumerate(expected) if token in ends), limit)
    return Request(prompt.tokens, limit, ends), expected[: stop + 1]


def is_tie(pipeline: Pipeline, prompt: tuple[int, ...], tokens: tuple[int, ...], tie: float) -> bool:
    """Whether the two best tokens after a prompt and more tokens are as good as equal."""
    info = pipeline.cm.info
    info.set_example_sequence([[*prompt, *tokens]], gather_context_logits=True)
    with torch.no_grad():
        best = cast(EagleWrapper, pipeline.model).forward_target(pipeline.cm)[-1].float().topk(2).values
    return float(best[0] - best[1]) < tie


def compare(pipeline: Pipeline, outputs: Any, expected: list[tuple[int, ...]], tie: float, report: Report) -> None:
    """Compare outputs with what they must be; none at all are an error, too."""
    if not outputs:
        report.errors.append("no request was answered")
    for number, (output, tokens) in enumerate(zip(outputs, expected, strict=True)):
        if output.tokens == tokens:
            continue
        shorter = min(len(output.tokens), len(tokens))
        first = next((i for i in range(shorter) if output.tokens[i] != tokens[i]), shorter)
        if first < shorter and is_tie(pipeline, output.prompt, tokens[:first], tie):
            report.ties += 1
        elif len(report.errors) < 5:
            report.errors.append(f"request {number} differs at token {first}: {output.tokens} instead of {tokens}")


def serve(engine: Engine, prompts: list[Prompt], steps: int, rng: random.Random) -> list[tuple[int, ...]]:
    """Put load on an engine for so many steps, and finish what it has then; gives what each request must get.

    Raises:
        RequestTooLargeError: a request that could never run.
    """
    expected: list[tuple[int, ...]] = []
    coming = arrivals(rng)
    while engine.steps < steps or engine.has_work:
        if engine.steps < steps:
            for _ in range(max(next(coming), not engine.has_work) if len(engine._waiting) < 8 else 0):
                request, tokens = random_request(rng.choice(prompts), rng)
                engine.submit(request)
                expected.append(tokens)
        engine.step()
    return expected


def check_given_back(engine: Engine, report: Report) -> None:
    """Every page and slot must have come back."""
    kept = 1 if engine._batch_sizes else 0
    if engine.page_allocator.num_free != engine.page_allocator.num_pages - kept:
        report.errors.append("pages were not given back")
    if engine.slot_allocator.num_free != engine.cm.info.max_batch_size:
        report.errors.append("slots were not given back")


def run_case(case: str, options: argparse.Namespace) -> Report:
    """Build a case's pipeline, put load on it and compare.

    Raises:
        UsageError: the pipeline cannot be built with the sizes asked for, or the requests do not fit it.
    """
    rng = random.Random(options.seed)
    report = Report(case)
    try:
        pipeline = build(case, options.device, options.draft_len, options.batch_size)
        print(f"{case}: built; decoding the prompts without overlap", file=sys.stderr, flush=True)
        prompts = make_prompts(pipeline, options.prompts, 40, options.tokens, rng)
    except ValueError as error:
        raise UsageError(f"{case}: {error}") from error
    print(f"{case}: {options.steps} steps with overlap", file=sys.stderr, flush=True)
    engine = CountingEngine(cast(EagleWrapper, pipeline.model), pipeline.cm, overlap=True)
    tie = options.tie if options.tie is not None else 0.1 if "flashinfer" in case else 1e-4
    watched = contextlib.nullcontext() if options.no_sanitizer else sanitize(pipeline.cm, pipeline.model)
    start = time.perf_counter()
    try:
        with record_mirrors(pipeline.cm) as transfers, watched as sanitizer:
            expected = serve(engine, prompts, options.steps, rng)
        if options.device == "cuda":
            torch.cuda.synchronize()
        report.seconds = time.perf_counter() - start
        report.checked = sanitizer.checked if sanitizer is not None else 0
        report.transfers = len(transfers)
        result = engine.result()
        compare(pipeline, result.outputs, expected, tie, report)
        report.steps, report.requests, report.tokens = result.steps, len(expected), result.generated_tokens
        report.mixed = result.batches.get("mixed", 0)
    except RequestTooLargeError as error:
        raise UsageError(f"{case}: {error}") from error
    except Exception as error:  # reported like any other finding; the cases after it run
        report.errors.append(f"{type(error).__name__}: {error}")
        report.steps = engine.steps
        return report
    report.for_nothing, report.filled = engine.for_nothing, engine.filled
    check_given_back(engine, report)
    return report


def why_not(case: str, device: str) -> str | None:
    """Why this machine cannot run a case on a device; None: it can."""
    if device == "cuda" and not torch.cuda.is_available():
        return "PyTorch finds no GPU here"
    if CASES[case][2] and device != "cuda":
        return "it needs a GPU"
    if "flashinfer" in case and importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed (pip install 'auto_deploy_ext[gpu]')"
    return reason_without_triton(torch.device(device)) if "triton" in case or "fused" in case else None


def table(reports: list[Report]) -> str:
    """One line per case."""
    columns = ("case", "steps", "requests", "tokens", "for_nothing", "mixed", "filled", "checked", "transfers", "ties")
    rows = [[str(getattr(report, column)) for column in columns] for report in reports]
    rows = [[*row, f"{r.seconds:.1f}", str(len(r.errors))] for row, r in zip(rows, reports, strict=True)]
    lines = [[*columns, "seconds", "errors"], *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def closeness(text: str) -> float:
    """A finite number of at least 0, as a type for argparse.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    value = finite(text)
    if value is None or value < 0:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return value


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line; `--memcheck` changes the defaults. `left_out` says which cases cannot run, and why."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases",
        nargs="+",
        type=one_of("case", CASES),
        metavar="CASE",
        help=f"of {', '.join(CASES)} (default: all that this machine can run)",
    )
    parser.add_argument("--steps", type=positive, help="launched forwards per case (default 2000)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--draft-len", type=positive, default=3)
    parser.add_argument("--batch-size", type=positive, default=5)
    parser.add_argument("--prompts", type=positive, help="different prompts (default 40)")
    parser.add_argument("--tokens", type=positive, help=f"longest output, at least {FEWEST_TOKENS} (default 40)")
    parser.add_argument(
        "--tie", type=closeness, help="two logits closer than this are equal (default 1e-4, bfloat16 0.1)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-sanitizer", action="store_true", help="let the host run ahead as it would in production")
    parser.add_argument("--memcheck", action="store_true", help="a short run for compute-sanitizer; see above")
    parser.add_argument("--json", type=writable, metavar="FILE", help="write the reports to a file")
    options = parser.parse_args(arguments)
    options.no_sanitizer |= options.memcheck
    for name, default in (MEMCHECK_LOAD if options.memcheck else LOAD).items():
        if getattr(options, name) is None:
            setattr(options, name, default)
    if options.tokens < FEWEST_TOKENS:
        parser.error(
            f"argument --tokens: outputs of {options.tokens} are too short to end in different places; "
            f"take {FEWEST_TOKENS} or more"
        )
    wanted = options.cases or (MEMCHECK_CASES if options.memcheck else CASES)
    reasons = {case: why_not(case, options.device) for case in wanted}
    options.cases = [case for case, reason in reasons.items() if reason is None]
    options.left_out = [f"{case} is left out: {reason}" for case, reason in reasons.items() if reason is not None]
    if not options.cases:
        parser.error(f"there is no case to run; {'; '.join(options.left_out)}")
    return options


def run_cases(options: argparse.Namespace) -> list[Report]:
    """Run the cases, and say on stderr what was wrong; all configs are read before the first is built.

    What has been found so far is written after each case.

    Raises:
        ConfigError: a draft does not fit a page.
        UsageError: see `run_case`.
    """
    for case in options.cases:
        config_of(case, options.device, options.draft_len, options.batch_size)
    reports = []
    for case in options.cases:
        reports.append(run_case(case, options))
        for error in reports[-1].errors:
            print(f"{case}: {error}", file=sys.stderr)
        write(options, reports)
    return reports


def write(options: argparse.Namespace, reports: list[Report]) -> None:
    """Write reports, if a file is asked for."""
    if options.json is None:
        return
    versions = {"torch": torch.__version__, "device": options.device}
    if options.device == "cuda":
        versions["gpu"] = torch.cuda.get_device_name()
    content = {**versions, "seed": options.seed, "cases": [asdict(report) for report in reports]}
    write_text(options.json, json.dumps(content, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the cases; 0 if every request of every case got its tokens, 2 if they cannot run as they are asked for."""
    options = parse(arguments)
    for line in options.left_out:
        print(line, file=sys.stderr)
    try:
        reports = run_cases(options)
    except (ConfigError, UsageError) as error:
        print(f"overlap_stress: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(table(reports))
    return 1 if any(report.errors for report in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
