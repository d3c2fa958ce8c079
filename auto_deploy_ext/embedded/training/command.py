"""The command `train-draft`: samples text, computes states, trains the head and measures it, within a time."""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...commands.report import write_text
from ..models.checkpoint import stored_config
from ..tokenizer import TOKENIZER_FILES
from .arguments import DEFAULT_CONFIG
from .checkpoint import CONFIG_FILE, WEIGHTS_FILE, check_layers, export, load_state, load_weights
from .corpus import DraftVocabulary, FeatureStore, load_text, save_text, sequences_that_fit
from .curves import RECORD_FILE, PlotError, plot
from .evaluate import (
    Acceptance,
    Continuation,
    continue_greedily,
    greedy_acceptance,
    prompt_tokens,
    read_prompts,
    sampled_acceptance,
)
from .head import TrainedHead, drafter_config, make_drafter
from .prompts import Excluded, StartMaker, encode
from .sampling import Sampler
from .target import States, TrainingTarget, tf32_products
from .trainer import Trainer, TrainingOptions, describe

if TYPE_CHECKING:
    from ..models.factory import ModelFactory

TEXT_FILE = "text.safetensors"
ENDING_SECONDS = 8.0
"""Of the time budget, for the last evaluation and for writing."""
ROUNDS = 8
"""Of sampling, at least, where starts are of several kinds: a round is of one."""
LAYERS_FIELD = "eagle3_layers_to_capture"
NEW_TOKENS = 64
"""Of a greedy continuation."""


class TrainingError(ValueError):
    """Something about the command that the user has to change."""


class Reporter:
    """Tells how far things are: a bar on a terminal, else a line now and then."""

    def __init__(self, clock: Callable[[], float], every: float = 8.0) -> None:
        self.clock = clock
        self.began = clock()
        self.every = every
        self._bar: Any = None
        self._task: Any = None
        self._told = self._start = self.began
        self._done = self._total = 0
        self._what = ""
        if sys.stderr.isatty():
            with suppress(ImportError):
                from rich.console import Console
                from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

                columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
                self._bar = Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True))
                self._bar.start()

    def say(self, text: str) -> None:
        """One line."""
        print(f"[{self.clock() - self.began:6.1f} s] {text}", file=sys.stderr, flush=True)

    def start(self, what: str, total: int) -> None:
        """A new stage; the one before is over."""
        self._what, self._total, self._done = what, total, 0
        self._start = self._told = self.clock()
        if self._bar is not None:
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(what, total=total, note="")

    def advance(self, tokens: int) -> None:
        """Some more of the stage is done."""
        self._done += tokens
        now = self.clock()
        rate = self._done / max(1e-9, now - self._start)
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, note=f"{rate:,.0f} tokens/s")
        elif now - self._told >= self.every:
            self._told = now
            self.say(f"{self._what}: {self._done:,} of {self._total:,} tokens, {rate:,.0f} tokens/s")

    def position(self, share: float, note: str) -> None:
        """How far the stage is, 0 to 1, for stages whose length changes."""
        if self._bar is not None:
            self._bar.update(self._task, completed=share * self._total, note=note)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()


def run(arguments: argparse.Namespace) -> int:
    """``auto-deploy-ext train-draft``."""
    if arguments.plot is not None:
        print(plot(arguments.plot))
        return 0
    if arguments.output is None:
        raise TrainingError("say where the head is to go: --output DIR")
    if arguments.init_from is not None and arguments.init_from.resolve() == arguments.output.resolve():
        raise TrainingError("--output is where --init-from reads: give another directory")
    if arguments.steps is None and arguments.time_budget is None:
        raise TrainingError("say when to end: --time-budget SECONDS or --steps N")
    prompts = read_prompts(arguments.held_out)
    device = chosen_device(arguments.device)
    _check(arguments)
    clock = time.monotonic
    reporter = Reporter(clock)
    try:
        DraftTraining(arguments, prompts, device, reporter, clock).run()
    finally:
        reporter.close()
    return 0


def chosen_device(name: str | None) -> torch.device:
    """The device of a name; without one a GPU, where there is any.

    Raises:
        TrainingError: It is no name of a device, or that of a GPU that is not there.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device: torch.device | None = None
    with suppress(RuntimeError):
        device = torch.device(name or ("cuda" if count else "cpu"))
    if device is None or device.type not in ("cpu", "cuda"):
        raise TrainingError(f"--device {name}: give cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= count:
        found = f"GPUs 0 to {count - 1}" if count else "no GPU"
        remedy = "one of them" if count else "--device cpu"
        raise TrainingError(f"--device {name}: PyTorch {torch.__version__} finds {found}; give {remedy}")
    return device


def _check(arguments: argparse.Namespace) -> None:
    """Refuse at once what could only fail after text has been sampled.

    Raises:
        TrainingError: arguments that do not go together, or places that cannot be used.
    """
    if arguments.sequences < 2:
        raise TrainingError(f"--sequences {arguments.sequences}: give at least 2, one to train on and one held out")
    if arguments.sequence_length < arguments.draft_steps + 2:
        raise TrainingError(
            f"--sequence-length {arguments.sequence_length} leaves no room for --draft-steps {arguments.draft_steps}: "
            f"give sequences of at least {arguments.draft_steps + 2} tokens"
        )
    for option, path in (("--output", arguments.output), ("--work-dir", arguments.work_dir)):
        try:
            if path is not None:
                path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TrainingError(f"{option} {path} cannot be made: {error.strerror}; give another directory") from error
    if arguments.init_from is not None:
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (arguments.init_from / name).is_file():
                raise TrainingError(f"--init-from {arguments.init_from} has no {name}: give a head's directory")
        if not isinstance(stored_config(arguments.init_from).get("intermediate_size"), int):
            raise TrainingError(f"--init-from: {arguments.init_from / CONFIG_FILE} has no intermediate_size")


def load_target(arguments: argparse.Namespace, device: torch.device) -> tuple[TrainingTarget, Any]:
    """The target in bfloat16 on a GPU and float32 elsewhere, and its tokenizer, or None where it comes without one."""
    from ..models.factory import ModelFactoryRegistry
    from ..models.sources import resolve_source

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    factory: ModelFactory
    tokenizer: Any = None
    spec: str | None = arguments.model
    layers: list[int] | None = None
    model_kwargs: dict[str, Any] = {}
    if spec is None:
        from ..config import load_config

        loaded = load_config(arguments.config or DEFAULT_CONFIG)
        factory = ModelFactoryRegistry.get(loaded.model_factory).from_config(loaded)
        spec, layers = factory.model, factory.speculative_config.get(LAYERS_FIELD)
        model_kwargs = factory.model_kwargs
    speculative = {"decoding_type": "Eagle3", "max_draft_len": arguments.draft_steps, LAYERS_FIELD: layers}
    if spec is not None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        directory = resolve_source(spec).directory
        if any((directory / name).is_file() for name in TOKENIZER_FILES):
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        checkpoint: Any = ModelFactoryRegistry.get("AutoModelForCausalLM")(
            str(directory), model_kwargs=model_kwargs, speculative_config=speculative
        )
        factory, config = checkpoint, checkpoint.target_config
        model = AutoModelForCausalLM.from_pretrained(directory, config=config, local_files_only=True, dtype=dtype)
    else:
        factory.speculative_config = speculative
        built: Any = factory
        model = built.build_target()
    return TrainingTarget(model, factory.layers_to_capture(), device, dtype), tokenizer


class DraftTraining:
    """One run of the command.

    Args:
        arguments: See `arguments.add_arguments`.
        prompts: Held-out ones, as `read_prompts` gives them.
        device: Where to train.
        reporter: Where progress goes.
        clock: Seconds.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        prompts: list[tuple[str, str]],
        device: torch.device,
        reporter: Reporter,
        clock: Callable[[], float],
    ) -> None:
        self.arguments = arguments
        self.prompts = prompts
        self.device = device
        self.reporter = reporter
        self.clock = clock
        self.began = clock()
        self.output: Path = arguments.output
        self.work: Path = arguments.work_dir or self.output / "work"
        self.timings: dict[str, float] = {}

    def run(self) -> Acceptance:
        """All stages; gives the acceptance on the held-out prompts."""
        with tf32_products(self.device):
            return self._stages()

    def _stages(self) -> Acceptance:
        arguments, say = self.arguments, self.reporter.say
        self.target, self.tokenizer = load_target(arguments, self.device)
        sizes = f"{self.target.config.model_type}, {sum(p.numel() for p in self.target.model.parameters()):,} weights"
        say(f"target: {sizes}, layers {list(self.target.capture)} captured, on {self.device}")
        if self.tokenizer is None:
            say("the target has no tokenizer: texts start with random tokens, and prompts are their bytes")
        self._note("load")
        if arguments.init_from is not None:
            check_layers(arguments.init_from, self.target.capture)
        text, counted, states = self._text()
        trained, held_out = self._split(text)
        self.held_out, self.held_out_counted = text[held_out], counted[held_out]
        self.vocabulary = DraftVocabulary.most_frequent(
            text[trained], self.target.vocab_size, arguments.draft_vocab, self.device, counted[trained]
        )
        share = self.vocabulary.share(self.held_out[self.held_out_counted])
        say(f"draft vocabulary: {len(self.vocabulary.tokens):,} tokens, {share:.2%} of held-out text")
        self._note("sampling")
        self.trainer = self._trainer(text, counted, trained, states)
        self.continuations = self._continuations()
        self._note("states")
        return self._train()

    def _note(self, stage: str) -> None:
        self.timings[stage] = round(self.clock() - self.began - sum(self.timings.values()), 2)

    # ---------------------------------------------------------------- text

    def _text(self) -> tuple[torch.Tensor, torch.Tensor, list[States] | None]:
        """The sampled text, int32 [sequences, length], which of its tokens count, and its states.

        When resuming it is the kept one, whose states are to be computed again.
        """
        arguments, say = self.arguments, self.reporter.say
        path = self.work / TEXT_FILE
        about = {
            "target": str(arguments.model or arguments.config or DEFAULT_CONFIG),
            "length": str(arguments.sequence_length),
            "seed": str(arguments.seed),
            "chat_share": str(arguments.chat_share),
            "general_share": str(arguments.general_share),
        }
        if path.is_file():
            if not arguments.resume:
                raise TrainingError(f"{self.work} keeps an earlier run: give --resume, or another --work-dir")
            text, counted = load_text(path, about)
            say(f"text: {text.numel():,} tokens kept in {path}")
            return text, counted, None
        text, counted, states = self._sample()
        save_text(path, text, counted, about)
        return text, counted, states

    def _sample(self) -> tuple[torch.Tensor, torch.Tensor, list[States]]:
        arguments, say = self.arguments, self.reporter.say
        length = arguments.sequence_length
        fitting = sequences_that_fit(self.target, length)
        wanted = arguments.sequences if fitting is None else min(arguments.sequences, fitting)
        starts = StartMaker(self.tokenizer, self.target.vocab_size, arguments.chat_share, arguments.general_share)
        rows = min(arguments.sample_rows or (8192 if self.device.type == "cuda" else 64), wanted)
        if len(starts.shares) > 1:
            rows = min(rows, -(-wanted // ROUNDS))
        self.sample_rows = rows
        say(f"sampling at most {wanted:,} sequences of {length} tokens, {rows:,} side by side; {fitting} would fit")
        sampler = Sampler(self.target, starts, length, arguments.seed)
        budget = None if arguments.time_budget is None else arguments.time_budget * arguments.sampling_share
        self.reporter.start("sampling", wanted * length)
        texts: list[torch.Tensor] = []
        counted: list[torch.Tensor] = []
        states: list[States] = []
        began, longest = self.clock(), 0.0
        while len(texts) * rows < wanted:
            before = self.clock()
            written = sampler.round(len(texts), rows, self.reporter.advance)
            texts.append(written.tokens.to(torch.int32).cpu())
            counted.append(written.counted.cpu())
            assert written.states is not None
            states.append(written.states)
            longest = max(longest, self.clock() - before)
            if budget is not None and self.clock() - began + longest > budget:
                break
        text = torch.cat(texts)[:wanted]
        spent = self.clock() - began
        say(f"sampled {text.numel():,} tokens in {spent:.1f} s, {text.numel() / spent:,.0f} tokens/s")
        for part in texts[:6]:
            self._show(part)
        return text, torch.cat(counted)[:wanted], states

    def _split(self, text: torch.Tensor) -> tuple[list[int], list[int]]:
        """Which sequences are trained on and which are held out; those that resemble a held-out prompt are neither."""
        prompts = [
            [byte % self.target.vocab_size for byte in prompt.encode()]
            if self.tokenizer is None
            else encode(self.tokenizer, prompt)
            for _, prompt in self.prompts
        ]
        excluded = Excluded(prompts)(text, self.device)
        order = (~excluded).nonzero()[:, 0].tolist()
        self.reporter.say(f"left out {int(excluded.sum()):,} sequences that hold most of a held-out prompt")
        if len(order) < 2:
            raise TrainingError(
                f"{len(order)} of {len(text)} sequences are left, too few to train on and to hold one out: delete "
                f"{self.work / TEXT_FILE} and sample more"
            )
        random.Random(f"{self.arguments.seed}:held out").shuffle(order)
        held_out = min(self.arguments.held_out_sequences, max(1, len(order) // 8))
        return sorted(order[held_out:]), sorted(order[:held_out])

    def _show(self, text: torch.Tensor) -> None:
        """A few beginnings of sampled text, so that a reader sees what was trained on."""
        if self.tokenizer is not None:
            for row in text[:2]:
                self.reporter.say(repr(self.tokenizer.decode(row[:100].tolist())))

    # ---------------------------------------------------------------- states and trainer

    def _trainer(
        self, text: torch.Tensor, counted: torch.Tensor, trained: list[int], states: list[States] | None
    ) -> Trainer:
        arguments, say = self.arguments, self.reporter.say
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if states is None:
            rows = arguments.feature_rows or (256 if self.device.type == "cuda" else 8)
            self.reporter.start("states", text.numel())
        else:
            rows = self.sample_rows
        kept = load_state(self.work, self.device) if arguments.resume else None
        scale = None if kept is None else kept["scale"]
        store = FeatureStore(self.target, text, rows, counted, trained, states, scale, self.reporter.advance)
        say(f"states of {text.numel():,} tokens take {store.nbytes / 2**30:.1f} GiB")
        intermediate_size = arguments.intermediate_size
        if arguments.init_from is not None:
            intermediate_size = stored_config(arguments.init_from)["intermediate_size"]
        config = drafter_config(self.target, len(self.vocabulary.tokens), intermediate_size)
        drafter = make_drafter(config, self.target, arguments.seed)
        if arguments.init_from is not None:
            load_weights(arguments.init_from, drafter, store.scale)
            say(f"starts with the weights of {arguments.init_from}")
        head = TrainedHead(drafter, self.target, self.vocabulary, arguments.draft_steps)
        options = TrainingOptions(
            batch_sequences=min(arguments.batch_sequences, len(store)),
            learning_rate=arguments.learning_rate,
            steps=arguments.steps,
            seed=arguments.seed,
            log_every=arguments.log_every,
        )
        fingerprint = describe(options) | {
            "sequences": str(len(store)),
            "draft_steps": str(arguments.draft_steps),
            "draft_vocab": str(len(self.vocabulary.tokens)),
            "intermediate_size": str(config.intermediate_size),
            "capture": str(self.target.capture),
            "init_from": str(arguments.init_from),
        }
        trainer = Trainer(head, store, options, self.work, fingerprint)
        if arguments.resume and trainer.resume():
            say(f"resumed at step {trainer.step}")
        return trainer

    def _continuations(self) -> list[Continuation]:
        prompts = prompt_tokens(self.tokenizer, self.prompts, self.target.vocab_size)
        end = getattr(self.tokenizer, "eos_token_id", None)
        beyond = self.arguments.draft_steps + 2
        return continue_greedily(self.target, prompts, NEW_TOKENS, beyond, end)

    # ---------------------------------------------------------------- training

    def _train(self) -> Acceptance:
        arguments, say, trainer = self.arguments, self.reporter.say, self.trainer
        deadline = None
        if arguments.time_budget is not None:
            ending = min(ENDING_SECONDS, 0.1 * arguments.time_budget)
            deadline = self.began + arguments.time_budget - ending
        self.reporter.start("training", 1000)
        told = [self.clock()]

        def on_log(entry: dict[str, Any]) -> None:
            note = f"step {entry['step']}, loss {entry['loss']:.3f}, acceptance {entry['acceptance']}"
            self.reporter.position(entry["progress"], note)
            if self.clock() - told[0] >= self.reporter.every or len(trainer.history) < 3:
                told[0] = self.clock()
                say(f"{note}, {entry['tokens_per_second']:,} tokens/s, {entry['planned_steps']} planned")

        if arguments.init_from is not None and trainer.step == 0:
            self._pause()
        trainer.run(deadline, on_log, self._pause, arguments.checkpoint_seconds, self.clock)
        self._note("training")
        acceptance = self._pause()
        try:
            plot(self.output)
        except PlotError as error:
            say(f"no picture: {error}; later: auto-deploy-ext train-draft --plot {self.output}")
        say(f"done: {self.output}")
        return acceptance

    def _pause(self) -> Acceptance:
        """Measure, and write everything."""
        trainer, say = self.trainer, self.reporter.say
        head, scale = trainer.head, trainer.store.scale
        accepted = greedy_acceptance(head, self.continuations, scale)
        greedy = Acceptance.of([a for row in accepted for a in row], head.steps)
        kinds = {
            kind: Acceptance.of(
                [a for row, c in zip(accepted, self.continuations, strict=True) if c.kind == kind for a in row],
                head.steps,
            )
            for kind in sorted({c.kind for c in self.continuations})
        }
        sampled = sampled_acceptance(
            head, self.held_out, self.held_out_counted, scale, min(trainer.options.batch_sequences, 64)
        )
        say(f"step {trainer.step}: acceptance length on prompts {greedy}")
        for kind, some in kinds.items():
            say(f"step {trainer.step}: on {kind} prompts {some}")
        say(f"step {trainer.step}: acceptance length on held-out sampled text {sampled}")
        best = max((entry["sampled"]["length"] for entry in trainer.evaluations), default=0.0)
        trainer.evaluations.append(
            {
                "step": trainer.step,
                "greedy": greedy.to_json(),
                "by_kind": {kind: some.to_json() for kind, some in kinds.items()},
                "sampled": sampled.to_json(),
            }
        )
        if sampled.length >= best or not (self.output / WEIGHTS_FILE).is_file():
            export(self.output, head.drafter, self.vocabulary, scale, self.target.capture)
        trainer.save()
        write_text(self.output / RECORD_FILE, json.dumps(self._record(), indent=1) + "\n")
        return greedy

    def _record(self) -> dict[str, Any]:
        trainer = self.trainer
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else platform.machine()
        arguments = {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(self.arguments).items()
            if isinstance(value, (str, int, float, bool, Path))
        }
        written = max(trainer.evaluations, key=lambda entry: (entry["sampled"]["length"], entry["step"]))
        return {
            "command": arguments,
            "device": device,
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "seconds": self.timings | {"total": round(self.clock() - self.began, 2)},
            "text_tokens": trainer.store.text.numel(),
            "sequences": {"trained": len(trainer.store), "held_out": len(self.held_out)},
            "draft_vocabulary_share": round(self.vocabulary.share(self.held_out[self.held_out_counted]), 5),
            "weights_bytes": (self.output / WEIGHTS_FILE).stat().st_size,
            "written_step": written["step"],
            "options": asdict(replace(trainer.options, steps=trainer.step)),
            "history": trainer.history,
            "evaluations": trainer.evaluations,
            "earlier_runs": self._earlier_runs(),
        }

    def _earlier_runs(self) -> list[dict[str, Any]]:
        """The records of the runs that made the weights which this one started with, the oldest first."""
        start: Path | None = self.arguments.init_from
        if start is None or not (start / RECORD_FILE).is_file():
            return []
        record = json.loads((start / RECORD_FILE).read_text(encoding="utf-8"))
        return [*record.pop("earlier_runs", []), record]
