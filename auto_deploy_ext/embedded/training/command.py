"""The command `train-draft`: samples text, computes states, trains the head and measures it, within a time."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .arguments import DEFAULT_CONFIG
from .checkpoint import export, write_text
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
from .prompts import StartMaker
from .sampling import Sampler
from .target import TrainingTarget
from .trainer import Trainer, TrainingOptions, describe

if TYPE_CHECKING:
    from ..models.factory import ModelFactory

TEXT_FILE = "text.safetensors"
SAMPLING_SHARE = 0.22
"""Of the time budget: sampling ends when another round would take it beyond."""
ENDING_SECONDS = 12.0
"""Of the time budget, for the last evaluation and for writing."""
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
    if arguments.steps is None and arguments.time_budget is None:
        raise TrainingError("say when to end: --time-budget SECONDS or --steps N")
    clock = time.monotonic
    reporter = Reporter(clock)
    try:
        DraftTraining(arguments, reporter, clock).run()
    finally:
        reporter.close()
    return 0


def load_target(arguments: argparse.Namespace, device: torch.device) -> tuple[TrainingTarget, Any]:
    """The target in bfloat16 on a GPU and float32 elsewhere, and its tokenizer or None."""
    from ..models.factory import ModelFactoryRegistry

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    factory: ModelFactory
    tokenizer: Any = None
    directory: str | None = None
    if arguments.model is not None:
        from ..models.sources import resolve_source

        directory = str(resolve_source(arguments.model).directory)
    else:
        from ..config import load_config

        config = load_config(arguments.config or DEFAULT_CONFIG)
        factory = ModelFactoryRegistry.get(config.model_factory).from_config(config)
        directory = factory.model
    speculative = {"decoding_type": "Eagle3", "max_draft_len": arguments.draft_steps}
    if directory is not None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        with suppress(OSError, ValueError):
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype=dtype)
        factory = ModelFactoryRegistry.get("AutoModelForCausalLM")(directory, speculative_config=speculative)
    else:
        factory.speculative_config = speculative
        built: Any = factory
        model = built.build_target()
    return TrainingTarget(model, factory.layers_to_capture(), device, dtype), tokenizer


class DraftTraining:
    """One run of the command.

    Args:
        arguments: See `arguments.add_arguments`.
        reporter: Where progress goes.
        clock: Seconds.
    """

    def __init__(self, arguments: argparse.Namespace, reporter: Reporter, clock: Callable[[], float]) -> None:
        self.arguments = arguments
        self.reporter = reporter
        self.clock = clock
        self.began = clock()
        self.output: Path = arguments.output
        self.work: Path = arguments.work_dir or self.output / "work"
        name = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.device = torch.device(name)
        self.timings: dict[str, float] = {}

    def run(self) -> Acceptance:
        """All stages; gives the acceptance on the held-out prompts."""
        arguments, say = self.arguments, self.reporter.say
        if self.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = True
        self.target, self.tokenizer = load_target(arguments, self.device)
        sizes = f"{self.target.config.model_type}, {sum(p.numel() for p in self.target.model.parameters()):,} weights"
        say(f"target: {sizes}, layers {list(self.target.capture)} captured, on {self.device}")
        self._note("load")
        text = self._text()
        held_out = min(arguments.held_out_sequences, max(1, len(text) // 8))
        self.held_out, trained = text[-held_out:], text[:-held_out]
        self.vocabulary = DraftVocabulary.most_frequent(
            trained, self.target.vocab_size, arguments.draft_vocab, self.device
        )
        share = self.vocabulary.share(self.held_out)
        say(f"draft vocabulary: {len(self.vocabulary.tokens):,} tokens, {share:.2%} of held-out text")
        self._note("sampling")
        self.trainer = self._trainer(trained)
        self.continuations = self._continuations()
        self._note("states")
        return self._train()

    def _note(self, stage: str) -> None:
        self.timings[stage] = round(self.clock() - self.began - sum(self.timings.values()), 2)

    # ---------------------------------------------------------------- text

    def _text(self) -> torch.Tensor:
        """The sampled text, int32 [sequences, length]: the kept one when resuming, else a new one."""
        arguments, say = self.arguments, self.reporter.say
        path = self.work / TEXT_FILE
        about = {
            "target": str(arguments.model or arguments.config or DEFAULT_CONFIG),
            "length": str(arguments.sequence_length),
            "seed": str(arguments.seed),
            "chat_share": str(arguments.chat_share),
        }
        if path.is_file():
            if not arguments.resume:
                raise TrainingError(f"{self.work} keeps an earlier run: give --resume, or another --work-dir")
            text = load_text(path, about)
            say(f"text: {text.numel():,} tokens kept in {path}")
            return text
        text = self._sample()
        save_text(path, text, about)
        return text

    def _sample(self) -> torch.Tensor:
        arguments, say = self.arguments, self.reporter.say
        length = arguments.sequence_length
        fitting = sequences_that_fit(self.target, length)
        wanted = arguments.sequences if fitting is None else min(arguments.sequences, fitting)
        rows = min(arguments.sample_rows or (8192 if self.device.type == "cuda" else 64), wanted)
        say(f"sampling at most {wanted:,} sequences of {length} tokens, {rows:,} side by side; {fitting} would fit")
        starts = StartMaker(self.tokenizer, self.target.vocab_size, arguments.chat_share)
        sampler = Sampler(self.target, starts, length, arguments.seed)
        budget = None if arguments.time_budget is None else arguments.time_budget * SAMPLING_SHARE
        self.reporter.start("sampling", wanted * length)
        rounds: list[torch.Tensor] = []
        began, longest = self.clock(), 0.0
        while len(rounds) * rows < wanted:
            before = self.clock()
            rounds.append(sampler.round(len(rounds), rows, self.reporter.advance))
            longest = max(longest, self.clock() - before)
            if budget is not None and self.clock() - began + longest > budget:
                break
        text = torch.cat(rounds)[:wanted]
        spent = self.clock() - began
        say(f"sampled {text.numel():,} tokens in {spent:.1f} s, {text.numel() / spent:,.0f} tokens/s")
        self._show(text)
        return text

    def _show(self, text: torch.Tensor) -> None:
        """A few beginnings of sampled text, so that a reader sees what was trained on."""
        if self.tokenizer is not None:
            for row in text[:4]:
                self.reporter.say(repr(self.tokenizer.decode(row[:100].tolist())))

    # ---------------------------------------------------------------- states and trainer

    def _trainer(self, text: torch.Tensor) -> Trainer:
        arguments, say = self.arguments, self.reporter.say
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            fitting = sequences_that_fit(self.target, text.shape[1])
            text = text[:fitting]
        rows = arguments.feature_rows or (256 if self.device.type == "cuda" else 8)
        self.reporter.start("states", text.numel())
        store = FeatureStore(self.target, text, rows, progress=self.reporter.advance)
        say(f"states of {text.numel():,} tokens take {store.nbytes / 2**30:.1f} GiB")
        config = drafter_config(self.target, len(self.vocabulary.tokens), arguments.intermediate_size)
        drafter = make_drafter(config, self.target, arguments.seed)
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
        }
        trainer = Trainer(head, store, options, self.work, fingerprint)
        if arguments.resume and trainer.resume():
            say(f"resumed at step {trainer.step}")
        return trainer

    def _continuations(self) -> list[Continuation]:
        prompts = prompt_tokens(self.tokenizer, read_prompts(self.arguments.held_out), self.target.vocab_size)
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
            ).to_json()
            for kind in sorted({c.kind for c in self.continuations})
        }
        sampled = sampled_acceptance(head, self.held_out, scale, min(trainer.options.batch_sequences, 64))
        say(f"step {trainer.step}: acceptance length on prompts {greedy}")
        say(f"step {trainer.step}: acceptance length on held-out sampled text {sampled}")
        trainer.evaluations.append(
            {"step": trainer.step, "greedy": greedy.to_json(), "by_kind": kinds, "sampled": sampled.to_json()}
        )
        nbytes = export(self.output, head.drafter, self.vocabulary, scale, self.target.capture)
        trainer.save()
        write_text(self.output / RECORD_FILE, json.dumps(self._record(nbytes), indent=1) + "\n")
        return greedy

    def _record(self, nbytes: int) -> dict[str, Any]:
        trainer = self.trainer
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else platform.machine()
        arguments = {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(self.arguments).items()
            if isinstance(value, (str, int, float, bool, Path))
        }
        return {
            "command": arguments,
            "device": device,
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "seconds": self.timings | {"total": round(self.clock() - self.began, 2)},
            "text_tokens": trainer.store.text.numel(),
            "draft_vocabulary_share": round(self.vocabulary.share(self.held_out), 5),
            "weights_bytes": nbytes,
            "options": asdict(replace(trainer.options, steps=trainer.step)),
            "history": trainer.history,
            "evaluations": trainer.evaluations,
        }
