"""The command line ``auto-deploy-ext``: runs a decode, explains, checks and benches its mirrors, trains a drafter."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..bench import command as bench
from ..embedded.training.arguments import add_arguments as add_training_arguments
from . import report
from .command_line import one_thread, positive, why_not_writable

if TYPE_CHECKING:
    from ..embedded.models.custom.modeling_eagle import EagleWrapper
    from ..embedded.pipeline import Pipeline
    from ..embedded.shim.interface import CachedSequenceInterface
    from ..embedded.tokenizer import Tokenizer
    from ..reports.mirror_plan import CallSite
    from ..rewriting.scoping import ScopeOptions

DEFAULT_CONFIG = "eagle3_llama"
SCOPE_KEY = "scope_host_mirrors"
SMALL_MODEL = 20_000_000
"""Below so many parameters an operation on the CPU is shorter than waking up a second thread for it."""

EXIT_OK, EXIT_DIFFERENT, EXIT_USAGE = 0, 1, 2
EXIT_STALE = 1

EPILOG = """\
examples:
  auto-deploy-ext run                                        the Llama target with its Eagle3 drafter, shipped prompts
  auto-deploy-ext run --config mtp_hybrid --json out.json    the hybrid target with its MTP drafter
  auto-deploy-ext run --prompt "once upon" --max-new-tokens 64
  auto-deploy-ext run --config eagle3_smollm2 --prompt "Why is the sky blue?"    a language model, its text as it comes
  auto-deploy-ext explain --config ./mine.yaml --dot plan.dot
  auto-deploy-ext check --config eagle3_llama_paged          is any mirror read while it is stale?
  auto-deploy-ext bench --quick                              what a draft step costs under each mirror policy
  auto-deploy-ext train-draft --model DIR --output HEAD --time-budget 500    an Eagle3 head for a target

A config is a name that comes with the package or a YAML file, merged over configs/embedded/default.yaml.
Exit codes: 0 all well; 1 the tokens differ from greedy decoding (run), a stale mirror is read (check), or the GPU
failed and what came before is reported (bench); 2 something about the command or config is wrong, or nothing could be
measured (bench). explain and train-draft end with 0 or 2.
"""


class UsageError(ValueError):
    """Something about the command or the config that the user has to change."""


class _Version(argparse.Action):
    """Prints versions, one a line, and ends."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from .. import host
        from ..reports.versions import versions

        known = {**versions(), "host": f"{host.name} {host.version}"}
        print("\n".join(f"{name} {value or 'none'}" for name, value in known.items()))
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """The argument parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="auto-deploy-ext",
        description="Scopes the host mirrors of a speculative draft loop by an FX pass, and shows what that saves.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--version", action=_Version, help="show the versions of the package and of what it runs on; then exit"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser(
        "run",
        help="decode with the rewritten wrapper and compare tokens and traffic",
        description="Decodes the prompts three times: with the wrapper that the pass has rewritten, with the target "
        "alone, and with the wrapper as it is written (every mutation copies all mirrors to the host). Compares the "
        "tokens, times the first two and counts the device-to-host copies. Text of a checkpoint's model is printed as "
        "it is accepted; on a terminal, accepted drafts are in colour.",
    )
    _add_common_arguments(run)
    run.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue, instead of the config's prompts; may be given several times. Random models read bytes",
    )
    run.add_argument(
        "--max-new-tokens", type=positive, metavar="N", help="tokens to generate per prompt; default: the config's"
    )
    run.add_argument(
        "--max-draft-len", type=positive, metavar="K", help="tokens drafted per step; default: the config's"
    )
    style = run.add_mutually_exclusive_group()
    style.add_argument(
        "--chat",
        dest="prompt_style",
        action="store_const",
        const="chat",
        help="put each prompt into the tokenizer's chat template; default: the config's prompt_style",
    )
    style.add_argument(
        "--plain", dest="prompt_style", action="store_const", const="plain", help="continue each prompt as it stands"
    )
    run.add_argument(
        "--temperature", type=float, metavar="T", help="draw tokens instead of decoding greedily; 0 is greedy"
    )
    run.add_argument("--seed", type=int, metavar="S", help="of sampling, and of random weights; default: the config's")
    run.add_argument(
        "--repeats", type=positive, default=1, metavar="N", help="time both ways so often and give the medians"
    )
    run.set_defaults(function=run_command)

    explain = commands.add_parser(
        "explain",
        help="say for every metadata mutation which mirrors it copies and why",
        description="Builds the pipeline of a config and prints, for every call that changes metadata on the device, "
        "which host mirrors it copied before the pass, which it copies after, and who reads them.",
    )
    _add_common_arguments(explain)
    explain.add_argument(
        "--dot", type=Path, metavar="FILE", help="also write the order of calls and reads as a Graphviz file"
    )
    explain.set_defaults(function=explain_command)

    check = commands.add_parser(
        "check",
        help="say whether any consumer reads a stale mirror, and prove it",
        description="Builds the pipeline of a config and looks, without running it, for consumers that read a host "
        "mirror after its buffer has changed on the device: in the wrapper as it is written, and as the pass has "
        "rewritten it. A wrapper whose mutations are not narrowed mirrors everything after each of them, so there only "
        "writes that mirror nothing can be found. Each finding comes with the path that proves it; then the exit code "
        "is 1.",
    )
    _add_common_arguments(check)
    check.set_defaults(function=check_command)

    train = commands.add_parser(
        "train-draft",
        help="train an Eagle3 head for a target on text that the target writes",
        description="Samples text from the target, trains an Eagle3 head on it by distillation, and writes a "
        "checkpoint directory that speculative_model: takes, with the run's record and curves beside it.",
    )
    add_training_arguments(train)
    train.set_defaults(function=train_draft_command)
    bench.add_parser(commands)
    return parser


def _add_common_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        default=DEFAULT_CONFIG,
        metavar="NAME_OR_PATH",
        help="a config's name or a YAML file (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result as JSON")
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="log what each transform does, and show tracebacks of errors"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; the process's own when left out.

    Returns:
        0 all well; 1 tokens differ from greedy decoding, a stale mirror is read, or a GPU failed in the middle of a
        benchmark; 2 wrong usage or config, or nothing could be measured.
    """
    from ..binding import HostError
    from ..embedded.config import ConfigError
    from ..embedded.requests import RequestTooLargeError

    arguments = make_parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("auto_deploy_ext").setLevel(logging.INFO if arguments.verbose else logging.WARNING)
    try:
        _check_writable("--json", getattr(arguments, "json", None))
        _check_writable("--dot", getattr(arguments, "dot", None))
        return arguments.function(arguments)
    except (UsageError, ConfigError, RequestTooLargeError, HostError, bench.BenchError, OSError) as error:
        if arguments.verbose:
            raise
        print(f"auto-deploy-ext {arguments.command}: {error}", file=sys.stderr)
        return EXIT_USAGE


# ---------------------------------------------------------------- commands


def run_command(arguments: argparse.Namespace) -> int:
    """``auto-deploy-ext run``."""
    from .. import host
    from ..embedded.tokenizer import TokenizerError, load_tokenizer
    from .decode_run import DecodeOptions, Decoder
    from .streamed_text import DRAFTED_STYLE, StreamedText

    console = report.make_console()
    named = {
        "speculative_config.max_draft_len": arguments.max_draft_len,
        "temperature": arguments.temperature,
        "seed": arguments.seed,
        "prompt_style": arguments.prompt_style,
    }
    pipeline, model = _build(arguments.config, {key: value for key, value in named.items() if value is not None})
    config = pipeline.config
    try:
        tokenizer = load_tokenizer(config.model)
    except TokenizerError as error:
        raise UsageError(str(error)) from error
    texts = arguments.prompt or config.prompts
    prompts = _encode(texts, tokenizer, model, chat=config.prompt_style == "chat")
    shown = [text if isinstance(text, str) else tokenizer.decode(text) for text in texts]
    options = DecodeOptions(
        arguments.max_new_tokens or config.max_new_tokens,
        pipeline.factory.end_token_ids(),
        config.seed,
        arguments.repeats,
    )
    # What a random model says is no text to be read as it comes, and its prompts run as one batch.
    streams = config.model is not None
    groups = [[prompt] for prompt in prompts] if streams else [prompts]

    def stream(number: int) -> StreamedText:
        console.out(f"\n> {shown[number]}", style="dim", highlight=False)
        return StreamedText(console, tokenizer)

    decoder = Decoder(model, pipeline.cm, options)
    with one_thread(_is_small(model)):
        decoder.warm_up(groups[0])
        if streams:
            if console.is_terminal:
                console.print(f"[{DRAFTED_STYLE}]drafted and accepted[/], said by the target itself")
            runs = decoder.each_way(groups, on_tokens=stream)
        else:
            with _progress() as start:
                total = len(prompts) * options.max_new_tokens
                runs = decoder.each_way(groups, progress=lambda name: start(name, total))
    scoped, reference = runs.speculative, runs.alone if not config.temperature else runs.original
    same = [o.tokens for o in runs.original.outputs] == [o.tokens for o in scoped.outputs]
    same = same and [o.tokens for o in reference.outputs] == [o.tokens for o in scoped.outputs]
    result = report.RunReport(
        config=str(arguments.config),
        host={"name": host.name, "version": host.version},
        device=str(pipeline.cm.device),
        generated_tokens=scoped.generated_tokens,
        tokens_match_greedy=None if config.temperature else same,
        acceptance_length=scoped.acceptance_length,
        acceptance_by_position=scoped.acceptance_by_position,
        tokens_per_second=runs.tokens_per_second,
        temperature=config.temperature,
        mirrors={
            "full": report.MirrorTotals.of(runs.original_transfers),
            "scoped": report.MirrorTotals.of(runs.speculative_transfers),
        },
        call_sites=_call_sites(model, pipeline.cm),
    )
    if not streams:
        console.print(report.output_table(shown, [tokenizer.decode(output.tokens) for output in scoped.outputs]))
    console.print(report.run_summary(result, scoped.steps, scoped.accepted))
    if arguments.json:
        report.write_text(arguments.json, json.dumps(result.to_json(), indent=2) + "\n")
    if not same:
        compared = "those of the wrapper as it is written" if config.temperature else "greedy decoding"
        print(f"auto-deploy-ext run: the tokens differ from {compared}", file=sys.stderr)
    return EXIT_OK if same else EXIT_DIFFERENT


def explain_command(arguments: argparse.Namespace) -> int:
    """``auto-deploy-ext explain``."""
    from .. import plan
    from ..transforms.drain_hostfuncs import drain_plan

    pipeline, model = _build(arguments.config)
    mirror_plan = plan(model, pipeline.cm)
    drains = drain_plan(model)
    print(mirror_plan.to_text())
    if drains.sites:
        print(drains.to_text())
    if arguments.json:
        result = {**json.loads(mirror_plan.to_json()), **(drains.to_json() if drains.sites else {})}
        report.write_text(arguments.json, json.dumps(result, indent=2) + "\n")
    if arguments.dot:
        report.write_text(arguments.dot, report.to_dot(mirror_plan))
    return EXIT_OK


def check_command(arguments: argparse.Namespace) -> int:
    """``auto-deploy-ext check``."""
    from ..analysis.program import UnknownEffectError
    from ..orchestrator import UntraceableError
    from ..reports.stale_check import check_module
    from ..rewriting.strategies import StaleReadError

    try:
        try:
            pipeline, model = _build(arguments.config)
        except StaleReadError:
            # With `insert_missing: false` the pass refuses what is to be reported here.
            pipeline, model = _build(arguments.config, {f"transforms.{SCOPE_KEY}.enabled": False})
        result = check_module(model, pipeline.cm, _scope_options(pipeline))
    except (UntraceableError, UnknownEffectError) as error:
        raise UsageError(
            f"config {str(arguments.config)!r} cannot be checked: {error}; run it under "
            "auto_deploy_ext.sanitize instead"
        ) from error
    print(result.to_text())
    if arguments.json:
        report.write_text(arguments.json, json.dumps({"config": arguments.config, **result.to_json()}, indent=2) + "\n")
    return EXIT_STALE if result.stale else EXIT_OK


def train_draft_command(arguments: argparse.Namespace) -> int:
    """``auto-deploy-ext train-draft``."""
    from ..embedded.training.command import run

    try:
        return run(arguments)
    except ValueError as error:
        if arguments.verbose:
            raise
        raise UsageError(str(error)) from error


# ---------------------------------------------------------------- pieces


def _check_writable(option: str, path: Path | None) -> None:
    """Raise before anything is computed for a file that could not be written in the end."""
    if path is None:
        return
    reason = why_not_writable(path)
    if reason is not None:
        raise UsageError(f"{option} {path} cannot be written: {reason}; name another file")


def _scope_options(pipeline: Pipeline) -> ScopeOptions:
    """The options of the config's pass; their defaults where it has none."""
    from .. import TransformRegistry

    fields = pipeline.config.transforms.get(SCOPE_KEY, {})
    return TransformRegistry.get_config_class(SCOPE_KEY)(**fields).options()


def _build(name_or_path: str, overrides: Mapping[str, Any] | None = None) -> tuple[Pipeline, EagleWrapper]:
    """Build a config's pipeline, which must make a wrapper; the wrapper comes beside it.

    A value that only a model or a transform can judge (an unknown architecture, sizes that do not go together) shows
    when it is built: that is the config's fault, too.
    """
    from ..embedded.config import load_config
    from ..embedded.models.custom.modeling_eagle import EagleWrapper
    from ..embedded.pipeline import build_pipeline
    from ..embedded.transform.interface import TransformError
    from ..reports.capture import CaptureError

    config = load_config(name_or_path, overrides=overrides)
    if not config.max_draft_len:
        raise UsageError(
            f"config {name_or_path!r} has no draft loop: set speculative_config.decoding_type and max_draft_len"
        )
    try:
        with Console(stderr=True).status(f"building {name_or_path}"):
            pipeline = build_pipeline(config)
    except (ValueError, KeyError, ImportError, NotImplementedError, CaptureError, TransformError) as error:
        # Some have no arguments but a text; a KeyError's text is its argument in quotes.
        reason = str(error.args[0] if error.args else error)
        if any(note not in reason for note in getattr(error, "__notes__", ())):
            reason = "; ".join([reason, *error.__notes__])
        raise UsageError(f"config {name_or_path!r} cannot be built: {reason}") from error
    if not isinstance(pipeline.model, EagleWrapper):
        raise UsageError(f"config {name_or_path!r} builds a {type(pipeline.model).__name__}, not an EagleWrapper")
    return pipeline, pipeline.model


def _encode(texts: Sequence[str | list[int]], tokenizer: Tokenizer, model: EagleWrapper, chat: bool) -> list[list[int]]:
    """Token ids of the prompts, checked against the model's vocabulary."""
    from ..embedded.tokenizer import TokenizerError

    if not texts:
        raise UsageError("there is nothing to decode: give --prompt, or prompts: in the config")
    encode = tokenizer.encode_chat if chat else tokenizer.encode
    try:
        prompts = [encode(text) if isinstance(text, str) else list(text) for text in texts]
    except TokenizerError as error:
        raise UsageError(str(error)) from error
    vocab_size = model.target_model.get_input_embeddings().weight.shape[0]
    for text, prompt in zip(texts, prompts, strict=True):
        if not prompt:
            raise UsageError(f"prompt {text!r} has no tokens")
        outside = [token for token in prompt if not 0 <= token < vocab_size]
        if outside:
            raise UsageError(f"prompt {text!r} has token {outside[0]}, the model knows 0 to {vocab_size - 1}")
    return prompts


def _is_small(model: EagleWrapper) -> bool:
    """Whether one thread is faster than several, and on a busy machine much faster."""
    return sum(parameter.numel() for parameter in model.parameters()) < SMALL_MODEL


@contextmanager
def _progress() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Progress bars on stderr; yields a function that starts one and gives its advance callback."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:

        def start(description: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(description, total=total)
            return lambda tokens: progress.update(task, advance=tokens)

        yield start


def _call_sites(model: EagleWrapper, cm: CachedSequenceInterface) -> tuple[CallSite, ...]:
    """What the calls of this very model mirror; says so when the pass has not run on it."""
    from .. import orchestrator_graphs, plan

    mirror_plan = plan(model, cm)
    for line in (*mirror_plan.problems, *mirror_plan.warnings, *mirror_plan.reasons):
        print(f"auto-deploy-ext: {line}", file=sys.stderr)
    sites = report.distinct_call_sites(mirror_plan)
    if orchestrator_graphs(model) or not sites:
        return sites
    print(
        "auto-deploy-ext: nothing is scoped, because scope_host_mirrors is missing among the config's transforms, "
        "or disabled",
        file=sys.stderr,
    )
    return tuple(
        replace(site, mirrored_after=site.mirrored_before, replayed=(), operand="", copies_operand=False)
        for site in sites
    )
