"""SmolLM2 with its Eagle3 head on prompts that the head has not seen: equal tokens, accepted drafts, speed.

Two parts. `equality`: every prompt's greedy continuation is that of transformers' `generate(do_sample=False)`, token by
token, under every strategy of `scope_host_mirrors` and as the wrapper is written. `speed`: tokens per second with and
without speculation for each draft length and batch size, in turn within every repeat; medians count.

    python benchmarks/smollm2.py --json benchmarks/results/smollm2_cpu.json
    python benchmarks/smollm2.py --device cuda --attn triton --compile torch-cudagraph --batch 1 8 --strategies all \\
        --json benchmarks/results/smollm2_gpu.json

Exits with 1 when a token differs in float32 or float64. In half precision near-ties fall differently in a batch of
another shape, so there the share of equal prompts is reported and nothing is demanded.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import AutoModelForCausalLM

from auto_deploy_ext.bench.cells import Backend
from auto_deploy_ext.bench.pipelines import BenchPipeline, Limits, ModelSource
from auto_deploy_ext.commands.command_line import check_gpu, positive
from auto_deploy_ext.commands.decode_run import DecodeOptions, Decoder
from auto_deploy_ext.commands.report import write_text
from auto_deploy_ext.embedded.tokenizer import load_tokenizer
from auto_deploy_ext.embedded.transform.optimizer import InferenceOptimizer

PROMPTS = Path(__file__).parent / "data" / "smollm2_prompts.json"
STRATEGIES = ("auto", "replay", "copy", "override")
FULL = "full"
"""The wrapper as it is written: every mutation copies all mirrors."""

ALONE = "target alone"


def encode(prompts: Sequence[dict[str, str]], model: str) -> list[list[int]]:
    """Token ids of the prompts, chat ones in the chat template."""
    tokenizer = load_tokenizer(model)
    return [
        tokenizer.encode_chat(prompt["text"]) if prompt["kind"] == "chat" else tokenizer.encode(prompt["text"])
        for prompt in prompts
    ]


def _factory_of(source: ModelSource) -> Any:
    from auto_deploy_ext.embedded.models.factory import ModelFactoryRegistry

    return ModelFactoryRegistry.get(source.config.model_factory).from_config(source.config)


def transformers_tokens(
    source: ModelSource, prompts: Sequence[Sequence[int]], max_new_tokens: int, advance: Callable[[], None]
) -> list[tuple[int, ...]]:
    """The greedy continuations that transformers generates, one prompt at a time."""
    device, dtype = source.config.torch_device, source.config.torch_dtype
    model: Any = AutoModelForCausalLM.from_pretrained(_factory_of(source).model_directory, dtype=dtype)
    model = model.to(device).eval()
    continuations = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        mask = torch.ones_like(ids)
        output = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=max_new_tokens)
        continuations.append(tuple(output[0, len(prompt) :].tolist()))
        advance()
    return continuations


def build(source: ModelSource, backend: Backend, batch: int, longest: int, strategy: str) -> BenchPipeline:
    """A pipeline whose wrapper is rewritten by a strategy, or not at all."""
    sequence = longest + 2 * backend.k + 2
    pipeline = source.build(backend, Limits(max_batch_size=batch, max_seq_len=sequence), [batch])
    if strategy != FULL:
        transforms: dict[str, Any] = {"scope_host_mirrors": {"stage": "cache_init", "strategy": strategy}}
        InferenceOptimizer(pipeline.factory, transforms)(pipeline.cm, pipeline.wrapper)
    pipeline.compile()
    return pipeline


def decoder_of(pipeline: BenchPipeline, source: ModelSource, max_new_tokens: int) -> Decoder:
    """What decodes with a pipeline."""
    return Decoder(pipeline.wrapper, pipeline.cm, DecodeOptions(max_new_tokens, _factory_of(source).end_token_ids()))


def in_groups(prompts: Sequence[Sequence[int]], size: int) -> list[Sequence[Sequence[int]]]:
    """Prompts that are decoded at once."""
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


# ---------------------------------------------------------------- parts


def measure_equality(
    source: ModelSource,
    backend: Backend,
    prompts: list[list[int]],
    expected: list[tuple[int, ...]],
    max_new_tokens: int,
    strategies: Sequence[str],
    advance: Callable[[], None],
) -> Iterator[dict[str, Any]]:
    """One record per strategy: which prompts differ and where, and how many drafts were accepted."""
    longest = max(map(len, prompts)) + max_new_tokens
    for strategy in strategies:
        decoder = decoder_of(build(source, backend, 1, longest, strategy), source, max_new_tokens)
        results = []
        for prompt in prompts:
            results.append(decoder.generate([prompt], True)[0])
            advance()
        total = results[0]
        for result in results[1:]:
            total = total.joined(result)
        tokens = [output.tokens for output in total.outputs]
        differing = {
            number: next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min_length)
            for number, (ours, theirs) in enumerate(zip(tokens, expected, strict=True))
            if ours != theirs
            for min_length in [min(len(ours), len(theirs))]
        }
        yield {
            "attention": backend.attention,
            "compile": backend.compiled,
            "k": backend.k,
            "strategy": strategy,
            "equal_prompts": len(prompts) - len(differing),
            "prompts": len(prompts),
            "first_difference": differing,
            "acceptance_length": total.acceptance_length,
            "acceptance_by_position": total.acceptance_by_position,
        }


def measure_speed(
    source: ModelSource,
    backend: Backend,
    prompts: list[list[int]],
    batch: int,
    max_new_tokens: int,
    strategies: Sequence[str],
    repeats: int,
    advance: Callable[[], None],
) -> dict[str, Any]:
    """Tokens per second of the target alone and of every strategy, interleaved within each repeat."""
    longest = max(map(len, prompts)) + max_new_tokens
    decoders = {
        strategy: decoder_of(build(source, backend, batch, longest, strategy), source, max_new_tokens)
        for strategy in strategies
    }
    groups = in_groups(prompts, batch)
    ways: dict[str, tuple[Decoder, bool]] = {ALONE: (decoders[strategies[0]], False)}
    ways |= {strategy: (decoder, True) for strategy, decoder in decoders.items()}
    for decoder in decoders.values():
        decoder.warm_up(groups[0])
    rates: dict[str, list[float]] = {way: [] for way in ways}
    acceptance = 0.0
    for _ in range(repeats):
        seconds, tokens = dict.fromkeys(ways, 0.0), dict.fromkeys(ways, 0)
        accepted = []
        for group in groups:
            for way, (decoder, speculative) in ways.items():
                result, elapsed = decoder.generate(group, speculative)
                seconds[way] += elapsed
                tokens[way] += result.generated_tokens
                if way == strategies[0]:
                    accepted.append(result)
            advance()
        for way in ways:
            rates[way].append(tokens[way] / seconds[way])
        total = accepted[0]
        for result in accepted[1:]:
            total = total.joined(result)
        acceptance = total.acceptance_length
    medians = {way: statistics.median(values) for way, values in rates.items()}
    return {
        "attention": backend.attention,
        "compile": backend.compiled,
        "k": backend.k,
        "batch": batch,
        "tokens_per_second": medians,
        "all_repeats": rates,
        "speed_up": {way: medians[way] / medians[ALONE] for way in strategies},
        "acceptance_length": acceptance,
    }


# ---------------------------------------------------------------- showing


def equality_table(records: Sequence[dict[str, Any]]) -> Table:
    """One line per strategy."""
    table = Table(title="Greedy continuations beside transformers' generate", title_justify="left")
    for heading in ("attention", "K", "strategy", "equal prompts", "acceptance length", "accepted up to each draft"):
        table.add_column(heading)
    for record in records:
        same = record["equal_prompts"] == record["prompts"]
        table.add_row(
            record["attention"],
            str(record["k"]),
            record["strategy"],
            f"[{'green' if same else 'red'}]{record['equal_prompts']} of {record['prompts']}[/]",
            f"{record['acceptance_length']:.2f}",
            " ".join(f"{share:.0%}" for share in record["acceptance_by_position"]),
        )
    return table


def speed_table(records: Sequence[dict[str, Any]]) -> Table:
    """One line per draft length and batch; the best one of a batch is marked."""
    table = Table(title="Tokens per second, medians; times as fast as the target alone", title_justify="left")
    ways = list(records[0]["speed_up"])
    for heading in ("attention", "batch", "K", "acceptance", ALONE, *ways):
        table.add_column(heading, justify="right")
    for record in records:
        best = best_draft_length(records, record["batch"])
        shown = [f"{record['tokens_per_second'][w]:.1f} ({record['speed_up'][w]:.2f}x)" for w in ways]
        table.add_row(
            record["attention"],
            str(record["batch"]),
            f"[bold green]{record['k']}[/]" if record["k"] == best else str(record["k"]),
            f"{record['acceptance_length']:.2f}",
            f"{record['tokens_per_second'][ALONE]:.1f}",
            *shown,
        )
    return table


def best_draft_length(records: Sequence[dict[str, Any]], batch: int) -> int:
    """The draft length with the greatest speed-up under the first strategy."""
    of_batch = [record for record in records if record["batch"] == batch]
    return max(of_batch, key=lambda record: next(iter(record["speed_up"].values())))["k"]


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int], Callable[[], None]]]:
    """Bars on stderr; yields a function that starts one and gives what advances it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def start(description: str, total: int) -> Callable[[], None]:
            task = progress.add_task(description, total=total)
            return lambda: progress.advance(task)

        yield start


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="eagle3_smollm2")
    parser.add_argument("--model", metavar="SPEC", help="another place of the target than the config's")
    parser.add_argument("--head", metavar="DIR", help="another head than the config's")
    parser.add_argument("--parts", nargs="+", choices=("equality", "speed"), default=["equality", "speed"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attn", default="torch", help="attention backend of the speed part")
    parser.add_argument("--equality-attn", nargs="+", metavar="NAME", help="of the equality part; default: --attn")
    parser.add_argument("--compile", default="torch-simple")
    parser.add_argument("--k", nargs="+", type=positive, default=[1, 2, 3, 4, 5])
    parser.add_argument("--equality-k", type=positive, default=4)
    parser.add_argument("--batch", nargs="+", type=positive, default=[1])
    parser.add_argument("--strategies", choices=("auto", "all"), default="auto", help="of the speed part")
    parser.add_argument("--max-new-tokens", type=positive, default=64)
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--prompts", type=positive, metavar="N", help="only the first N prompts of each kind")
    parser.add_argument("--json", type=Path, metavar="FILE", help="written after every record")
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda"):
        check_gpu(parser, f"--device {arguments.device}", "--device cpu")
    return arguments


def chosen_prompts(limit: int | None) -> list[dict[str, str]]:
    """The held-out prompts, the first so many of each kind."""
    prompts = json.loads(PROMPTS.read_text(encoding="utf-8"))
    kinds = sorted({prompt["kind"] for prompt in prompts})
    return [prompt for kind in kinds for prompt in [p for p in prompts if p["kind"] == kind][:limit]]


def exit_code(records: Sequence[dict[str, Any]], dtype: torch.dtype) -> int:
    """1 where a token of the equality part differs, unless the type is half precision."""
    differs = any(record["equal_prompts"] < record["prompts"] for record in records)
    return 1 if differs and dtype.itemsize >= torch.float32.itemsize else 0


def main() -> int:
    """Measure, show, write."""
    arguments = parse_arguments()
    console = Console() if sys.stdout.isatty() else Console(width=160)
    overrides: dict[str, Any] = {"device": arguments.device, "dtype": arguments.dtype}
    if arguments.model:
        overrides["model"] = arguments.model
    if arguments.head:
        overrides["speculative_config.speculative_model"] = arguments.head
    source = ModelSource(arguments.config, overrides)
    prompts = encode(chosen_prompts(arguments.prompts), str(source.config.model))
    on_cuda = source.config.torch_device.type == "cuda"
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if on_cuda else f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": arguments.dtype,
        "max_new_tokens": arguments.max_new_tokens,
        "equality": [],
        "speed": [],
    }

    def save() -> None:
        if arguments.json:
            write_text(arguments.json, json.dumps(result, indent=1) + "\n")

    with progress_bar() as start:
        if "equality" in arguments.parts:
            advance = start("transformers", len(prompts))
            expected = transformers_tokens(source, prompts, arguments.max_new_tokens, advance)
            for attention in arguments.equality_attn or [arguments.attn]:
                backend = Backend(attention, arguments.compile, arguments.equality_k)
                advance = start(f"equality, {attention}", len(prompts) * (1 + len(STRATEGIES)))
                ways = (*STRATEGIES, FULL)
                for record in measure_equality(
                    source, backend, prompts, expected, arguments.max_new_tokens, ways, advance
                ):
                    result["equality"].append(record)
                    save()
        if "speed" in arguments.parts:
            ways = (*STRATEGIES, FULL) if arguments.strategies == "all" else (STRATEGIES[0],)
            for batch in arguments.batch:
                for k in arguments.k:
                    advance = start(f"speed, batch {batch}, K {k}", len(in_groups(prompts, batch)) * arguments.repeats)
                    backend = Backend(arguments.attn, arguments.compile, k)
                    result["speed"].append(
                        measure_speed(
                            source,
                            backend,
                            prompts,
                            batch,
                            arguments.max_new_tokens,
                            ways,
                            arguments.repeats,
                            advance,
                        )
                    )
                    save()
    if result["equality"]:
        console.print(equality_table(result["equality"]))
    if result["speed"]:
        console.print(speed_table(result["speed"]))
    return exit_code(result["equality"], source.config.torch_dtype)


if __name__ == "__main__":
    sys.exit(main())
