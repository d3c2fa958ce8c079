"""Whether all backends, compile backends and ways of scheduling decode the same tokens, and how often rounding decides.

In float32 every way must give, token for token, what attention backend `torch` decodes greedily without drafts. In
bfloat16 every way must give what its own attention backend decodes greedily, up to the first position whose two best
logits lie no farther apart than the measured rounding noise; such positions are counted (`embedded.equality`).
FlashInfer has no float32. A way that fails is left out with its reason; the others go on.

    python benchmarks/decoding_equality.py --json benchmarks/results/decoding_equality.json   # a few minutes on a GPU
    python benchmarks/decoding_equality.py --device cpu --attn torch_paged:torch_paged        # short
    python benchmarks/decoding_equality.py --merge first.json second.json --json both.json    # measures nothing

The exit code is 1 if any of them differs or fails, 2 for a wrong command.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from auto_deploy_ext.commands.command_line import one_of, options_besides, positive, writable
from auto_deploy_ext.commands.report import write_text
from auto_deploy_ext.embedded.config import ConfigError, load_config
from auto_deploy_ext.embedded.equality import Reference
from auto_deploy_ext.embedded.generation import generate
from auto_deploy_ext.embedded.models.custom.modeling_eagle import EagleWrapper
from auto_deploy_ext.embedded.pipeline import Pipeline, build_pipeline
from auto_deploy_ext.embedded.requests import RequestTooLargeError
from auto_deploy_ext.embedded.tokenizer import ByteTokenizer
from auto_deploy_ext.kernels import has_triton
from auto_deploy_ext.rewriting.fusion import reason_without_triton

#: attention of target and drafter, and in which ways a device can compile it, by what captured graphs contain.
ATTENTION: dict[str, tuple[str, ...]] = {
    "torch:torch": ("simple", "consumers", "segments", "full"),
    "torch_paged:torch_paged": ("simple",),
    "triton:triton": ("simple", "consumers", "segments", "full"),
    "torch:triton": ("simple", "segments"),
    "triton:torch_paged": ("simple",),
    "flashinfer:flashinfer": ("simple", "consumers", "segments"),
    "flashinfer:triton": ("simple", "segments"),
    "triton:flashinfer": ("simple", "segments"),
}
#: of these also with metadata fusion, in these ways.
FUSED = ("torch:torch", "triton:triton", "flashinfer:flashinfer")
FUSED_CAPTURES = ("simple", "segments")
DTYPES = ("float32", "bfloat16")
OVERLAP = (False, True)
#: what all parts of a result share.
SHARED = ("torch", "device", "gpu", "tokens")
FAILED = "it failed: "
#: what a file of results says of each way.
FIELDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("attention", "dtype", "capture"), str),
    **dict.fromkeys(("fused", "overlap", "equal", "identical"), bool),
    **dict.fromkeys(("num_tokens", "num_close", "parted", "num_prompts"), int),
    "noise": (int, float),
}
Tokens = list[list[int]]
Entries = list[dict[str, Any]]


class UsageError(ValueError):
    """Something about the command that the user has to change."""


class Way(NamedTuple):
    """One way of decoding: attention of target and drafter, dtype, what is captured, whether mutations are fused."""

    attention: str
    dtype: str
    capture: str
    fused: bool = False

    def __str__(self) -> str:
        return f"{self.attention} {self.dtype} {self.capture}{' fused' * self.fused}"


def ways_of(attention: str, dtype: str) -> list[Way]:
    """All ways of a pair of attention backends and a dtype."""
    fused = FUSED_CAPTURES if attention in FUSED else ()
    return [Way(attention, dtype, c, f) for c in ATTENTION[attention] for f in (False, True) if not f or c in fused]


#: all ways, in the order in which results are merged.
MATRIX = [way for pair in product(ATTENTION, DTYPES) for way in ways_of(*pair)]


def why_not(way: Way, device: str) -> str | None:
    """Why this machine cannot decode in a way on a device; None: it can."""
    backends = way.attention.split(":")
    if "flashinfer" in backends and way.dtype == "float32":
        return "FlashInfer has no float32"
    if device == "cuda" and not torch.cuda.is_available():
        return "PyTorch finds no GPU here"
    if device == "cpu" and {"flashinfer", "triton"}.intersection(backends):
        return "it needs a GPU"
    if "flashinfer" in backends and importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed"
    if way.fused and (reason := reason_without_triton(torch.device(device))) is not None:
        return reason
    return "Triton is not installed" if "triton" in backends and not has_triton() else None


def ways(options: argparse.Namespace) -> tuple[list[Way], list[dict[str, str]]]:
    """What is asked for and can be had on this machine, and what cannot: each way and why.

    Raises:
        UsageError: nothing can be had.
    """
    asked = product(dict.fromkeys(options.attn), dict.fromkeys(options.dtype))
    reasons = {way: why_not(way, options.device) for pair in asked for way in ways_of(*pair)}
    left_out = [{"way": str(way), "why": reason} for way, reason in reasons.items() if reason is not None]
    chosen = [way for way, reason in reasons.items() if reason is None]
    if not chosen:
        raise UsageError(f"there is nothing to measure: {'; '.join(left_out_lines(left_out))}")
    return chosen, left_out


def build(way: Way, options: argparse.Namespace) -> Pipeline:
    """The pipeline of a way.

    Raises:
        ConfigError: the device is not there.
    """
    target, draft = way.attention.split(":")
    values: dict[str, Any] = {
        "device": options.device,
        "dtype": way.dtype,
        "attn_backend": target,
        "draft_attn_backend": draft,
        "model_kwargs.head_dim": 64,
        "speculative_model_kwargs.head_dim": 64,
    }
    if way.capture != "simple":
        values |= {"compile_backend": "torch-cudagraph", "transforms.compile_model.capture": way.capture}
    if way.fused:
        values["transforms.fuse_metadata_mutations.stage"] = "cache_init"
    return build_pipeline(load_config("eagle3_llama_paged", overrides=values))


def prompts_of(pipeline: Pipeline) -> Tokens:
    """The config's prompts as token ids."""
    return [ByteTokenizer().encode(str(prompt)) for prompt in pipeline.config.prompts]


def decode(pipeline: Pipeline, tokens: int, **options: Any) -> Tokens:
    """Tokens of every prompt.

    Raises:
        RequestTooLargeError: that many do not fit.
    """
    result = generate(cast(EagleWrapper, pipeline.model), pipeline.cm, prompts_of(pipeline), tokens, **options)
    return [list(output.tokens) for output in result.outputs]


class References:
    """Greedy tokens without drafts, by attention of the target and dtype."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._known: dict[tuple[str, str], Reference] = {}

    def of(self, target: str, dtype: str) -> Reference:
        """What the target decodes, from a pipeline that is dropped again."""
        key = target, dtype
        if key not in self._known:
            pipeline = build(Way(f"{target}:{target}", dtype, "simple"), self._options)
            tokens = decode(pipeline, self._options.tokens, speculative=False)
            self._known[key] = Reference.measure(pipeline.model, pipeline.cm, prompts_of(pipeline), tokens)
        return self._known[key]


def judge(way: Way, references: References, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Decode in a way, with and without overlap scheduling, twice each (captured graphs are replays by then)."""
    exact = way.dtype == "float32"
    reference = references.of("torch" if exact else way.attention.split(":")[0], way.dtype)
    pipeline = build(way, options)
    for overlap in OVERLAP:
        reports = [reference.report(decode(pipeline, options.tokens, overlap=overlap)) for _ in range(2)]
        found = [report.to_json() for report in reports]
        identical = all(report["identical"] for report in found)
        yield {
            **way._asdict(),
            "overlap": overlap,
            **found[-1],
            "equal": identical if exact else all(report["equal"] for report in found),
            "identical": identical,
            "parted": max(report["parted"] for report in found),
        }


def table(entries: Sequence[dict[str, Any]]) -> Table:
    """One line per way."""
    shown = Table(title="Tokens of speculative decoding against greedy decoding")
    for column in ("attention", "dtype", "compiled", "fused", "overlap", "tokens", "close", "noise", "parted", "equal"):
        shown.add_column(column)
    for e in entries:
        numbers = (str(e["num_tokens"]), str(e["num_close"]), f"{e['noise']:.2g}", f"{e['parted']}/{e['num_prompts']}")
        equal = "identical" if e["identical"] else "equal" if e["equal"] else "NO"
        how = ("yes" if e[field] else "no" for field in ("fused", "overlap"))
        shown.add_row(e["attention"], e["dtype"], e["capture"], *how, *numbers, equal)
    return shown


def left_out_lines(left_out: Sequence[dict[str, str]]) -> list[str]:
    """One line per reason, with the ways that it is the reason of."""
    reasons = dict.fromkeys(entry["why"] for entry in left_out)
    return [f"{why}: {', '.join(entry['way'] for entry in left_out if entry['why'] == why)}" for why in reasons]


# ---------------------------------------------------------------- results


def about(options: argparse.Namespace) -> dict[str, Any]:
    """What all parts of a result share."""
    gpu = {"gpu": torch.cuda.get_device_name()} if options.device == "cuda" else {}
    return {"torch": torch.__version__, "device": options.device, **gpu, "tokens": options.tokens}


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Write a result, if a file is asked for."""
    if path is not None:
        write_text(path, json.dumps(result, indent=1) + "\n")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Judge every way that is asked for; what has been found so far is written after each.

    Raises:
        UsageError: this machine can run none of them.
        ConfigError: the device is not there.
        RequestTooLargeError: more tokens than the config has room for.
    """
    chosen, left_out = ways(options)
    references, entries = References(options), Entries()
    result = {**about(options), "ways": entries, "left_out": left_out}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(chosen))
        for way in chosen:
            progress.update(task, description=str(way))
            try:
                entries += list(judge(way, references, options))
            except (ConfigError, RequestTooLargeError):
                raise
            except Exception as error:  # of one way, which says nothing about the others
                reason = next(iter(str(error).splitlines()), "")
                left_out.append({"way": str(way), "why": f"{FAILED}{type(error).__name__}: {reason}"})
            write(options.json, result)
            progress.advance(task)
            gc.collect()
    return result


def load_result(path: Path) -> dict[str, Any]:
    """Read a file that this script has written.

    Raises:
        UsageError: it is none.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # also of a text that is no UTF-8
        raise UsageError(f"{path} is no JSON file: {error}") from error
    if not isinstance(result, dict) or not isinstance(result.get("ways"), list):
        raise UsageError(f"{path} was not written by decoding_equality.py")
    for place, entry in enumerate(result.setdefault("left_out", [])):
        if not isinstance(entry, dict) or not all(isinstance(entry.get(field), str) for field in ("way", "why")):
            raise UsageError(f"{path}: left_out[{place}] has no way and why; measure that part again")
    for place, entry in enumerate(result["ways"]):
        flaws = [f for f, kind in FIELDS.items() if not isinstance(entry, dict) or not isinstance(entry.get(f), kind)]
        flaws += ["noise"] * (not flaws and not 0 <= entry["noise"] <= sys.float_info.max)
        if flaws:
            raise UsageError(f"{path}: ways[{place}] has no {', '.join(flaws)}; measure that part again")
        way = way_of(entry)
        if way not in MATRIX:
            raise UsageError(f"{path}: ways[{place}] is {way}, which is none of this script's; measure that part again")
    return result


def merge(paths: Sequence[Path]) -> dict[str, Any]:
    """One result out of partial ones, in the order of `MATRIX`; of a way that several have, the last one's counts.

    Raises:
        UsageError: a file is no result, or they were not measured alike.
    """
    results = [load_result(path) for path in paths]
    first = results[0]
    for path, result in zip(paths, results, strict=True):
        for what in SHARED:
            if result.get(what) != first.get(what):
                raise UsageError(
                    f"the files differ in {what}: {paths[0]} has {first.get(what)}, {path} has {result.get(what)}; "
                    "measure all parts alike"
                )
    found = {(way_of(entry), entry["overlap"]): entry for result in results for entry in result["ways"]}
    reasons = {entry["way"]: entry["why"] for result in results for entry in result["left_out"]}
    return {
        **{what: first[what] for what in SHARED if what in first},
        "ways": [found[key] for key in product(MATRIX, OVERLAP) if key in found],
        "left_out": [entry for way in MATRIX for entry in not_measured(way, found, reasons)],
    }


def merged(options: argparse.Namespace) -> dict[str, Any]:
    """What `--merge` gives.

    Raises:
        UsageError: see `merge`; or an option that says what to measure.
    """
    said = options_besides({"merge", "json"}, options, parse([]))
    if said:
        raise UsageError(f"--merge measures nothing, so it takes no {said}; leave one or the other out")
    return merge(options.merge)


def way_of(entry: dict[str, Any]) -> Way:
    """The way that an entry is about."""
    return Way(*(entry[field] for field in Way._fields))


def not_measured(way: Way, found: Container[tuple[Way, bool]], reasons: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """What is missing of a way (nothing, one way of scheduling, or all of it), and why, as far as files have said."""
    missing = [overlap for overlap in OVERLAP if (way, overlap) not in found]
    if missing:
        which = "" if len(missing) > 1 else " with overlap" if missing[0] else " without overlap"
        name = f"{way}{which}"
        yield {"way": name, "why": reasons.get(name, "not measured")}


# ---------------------------------------------------------------- command line


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--attn",
        nargs="+",
        type=one_of("pair of attention backends", ATTENTION),
        default=list(ATTENTION),
        metavar="TARGET:DRAFT",
        help=f"of {', '.join(ATTENTION)} (default: all)",
    )
    parser.add_argument(
        "--dtype",
        nargs="+",
        type=one_of("dtype", DTYPES),
        default=list(DTYPES),
        metavar="DTYPE",
        help=f"of {', '.join(DTYPES)} (default: both)",
    )
    parser.add_argument("--tokens", type=positive, default=32, help="new tokens of each prompt (default 32)")
    parser.add_argument("--json", type=writable, metavar="FILE", help="write the findings to a file")
    parser.add_argument(
        "--merge", nargs="+", type=Path, metavar="FILE", help="measure nothing; merge JSON files of partial runs"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Judge every way, or merge what has been found; 0 if all are equal, 2 if it cannot be done as it is asked for."""
    options = parse(arguments)
    try:
        result = merged(options) if options.merge else measure(options)
    except (UsageError, ConfigError, RequestTooLargeError) as error:
        print(f"decoding_equality: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    write(options.json, result)
    console = Console(width=120)
    console.print(table(result["ways"]))
    for line in left_out_lines(result["left_out"]):
        console.print(f"left out, {line}", markup=False, highlight=False)
    failed = any(entry["why"].startswith(FAILED) for entry in result["left_out"])
    return 0 if result["ways"] and all(entry["equal"] for entry in result["ways"]) and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
