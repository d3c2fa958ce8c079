"""Whether all backends, compile backends and ways of scheduling decode the same tokens, and how often rounding decides.

In float32 every way must give, token for token, what attention backend `torch` decodes greedily without drafts. In
bfloat16 every way must give what its own attention backend decodes greedily, up to the first position whose two best
logits lie no farther apart than the measured rounding noise; such positions are counted (`embedded.equality`).
FlashInfer has no float32.

    python benchmarks/decoding_equality.py --json benchmarks/results/decoding_equality.json   # a few minutes on a GPU
    python benchmarks/decoding_equality.py --device cpu --attn torch:torch --dtype float32    # short

The exit code is 1 if any of them differs.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.equality import Reference
from auto_deploy_ext.embedded.generation import generate
from auto_deploy_ext.embedded.models.custom.modeling_eagle import EagleWrapper
from auto_deploy_ext.embedded.pipeline import Pipeline, build_pipeline
from auto_deploy_ext.embedded.tokenizer import ByteTokenizer

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
DTYPES = ("float32", "bfloat16")
Tokens = list[list[int]]


class Way(NamedTuple):
    """One way of decoding: attention of target and drafter, dtype, and what is captured."""

    attention: str
    dtype: str
    capture: str


def ways(options: argparse.Namespace) -> list[Way]:
    """What is asked for and can be had on this machine."""
    found = []
    for attention in options.attn:
        for dtype in options.dtype:
            if "flashinfer" in attention and dtype == "float32":
                continue
            if "flashinfer" in attention and importlib.util.find_spec("flashinfer") is None:
                continue
            if options.device == "cpu" and ("flashinfer" in attention or "triton" in attention):
                continue
            found += [Way(attention, dtype, capture) for capture in ATTENTION[attention]]
    return found


def build(way: Way, options: argparse.Namespace) -> Pipeline:
    """The pipeline of a way."""
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
    return build_pipeline(load_config("eagle3_llama_paged", overrides=values))


def prompts_of(pipeline: Pipeline) -> Tokens:
    """The config's prompts as token ids."""
    return [ByteTokenizer().encode(str(prompt)) for prompt in pipeline.config.prompts]


def decode(pipeline: Pipeline, tokens: int, **options: Any) -> Tokens:
    """Tokens of every prompt."""
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
    for overlap in (False, True):
        reports = [reference.report(decode(pipeline, options.tokens, overlap=overlap)) for _ in range(2)]
        equal = all(report.identical if exact else report.equal for report in reports)
        yield {**way._asdict(), "overlap": overlap, **reports[-1].to_json(), "equal": equal}


def table(entries: Sequence[dict[str, Any]]) -> Table:
    """One line per way."""
    shown = Table(title="Tokens of speculative decoding against greedy decoding")
    for column in ("attention", "dtype", "compiled", "overlap", "tokens", "close", "noise", "parted", "equal"):
        shown.add_column(column)
    for e in entries:
        numbers = (str(e["num_tokens"]), str(e["num_close"]), f"{e['noise']:.2g}", f"{e['parted']}/{e['num_prompts']}")
        equal = "identical" if e["identical"] else "equal" if e["equal"] else "NO"
        shown.add_row(e["attention"], e["dtype"], e["capture"], "yes" if e["overlap"] else "no", *numbers, equal)
    return shown


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--attn", nargs="*", choices=sorted(ATTENTION), default=list(ATTENTION), metavar="TARGET:DRAFT")
    parser.add_argument("--dtype", nargs="*", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of each prompt (default 32)")
    parser.add_argument("--json", type=Path, help="write the findings to a file")
    options = parser.parse_args(arguments)
    if options.tokens < 1:
        parser.error(f"argument --tokens: must be at least 1, got {options.tokens}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Judge every way; 0 if all are equal."""
    options = parse(arguments)
    references, entries = References(options), list[dict[str, Any]]()
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(ways(options)))
        for way in ways(options):
            progress.update(task, description=" ".join(way))
            entries += judge(way, references, options)
            write(options, entries)
            progress.advance(task)
            gc.collect()
    Console(width=120).print(table(entries))
    return 0 if entries and all(entry["equal"] for entry in entries) else 1


def write(options: argparse.Namespace, entries: Sequence[dict[str, Any]]) -> None:
    """Write what has been found so far, if a file is asked for."""
    if options.json is not None:
        versions = {"torch": torch.__version__, "device": options.device}
        if options.device == "cuda":
            versions["gpu"] = torch.cuda.get_device_name()
        options.json.write_text(json.dumps({**versions, "ways": entries}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
