"""Decodes the same prompts with speculation, with the target alone and with the wrapper as it is written; times it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import torch

from ..orchestrator.dispatch import original_forward
from ..runtime.mirrors import Transfer, record_mirrors

if TYPE_CHECKING:
    from ..embedded.generation import OnTokens, Progress
    from ..embedded.models.custom.modeling_eagle import EagleWrapper
    from ..embedded.requests import GenerationResult
    from ..embedded.shim.interface import CachedSequenceInterface

WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class DecodeOptions:
    """How to decode.

    Attributes:
        max_new_tokens: per prompt.
        eos_token_ids: what ends a continuation.
        seed: of sampling; every generation starts from it.
        repeats: how often speculation and the target alone are timed, in turn.
    """

    max_new_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    repeats: int = 1


@dataclass(frozen=True)
class DecodeRuns:
    """What came out.

    Attributes:
        speculative: the rewritten wrapper.
        alone: the target without a drafter.
        original: the wrapper as it is written, which mirrors everything.
        speculative_transfers: device-to-host copies of the first.
        original_transfers: of the last.
        tokens_per_second: ``speculative`` and ``target_alone``; the medians of the repeats.
    """

    speculative: GenerationResult
    alone: GenerationResult
    original: GenerationResult
    speculative_transfers: tuple[Transfer, ...]
    original_transfers: tuple[Transfer, ...]
    tokens_per_second: dict[str, float]


class Decoder:
    """Runs prompts on one wrapper.

    Args:
        model: rewritten by the passes, or not.
        cm: its interface.
        options: see `DecodeOptions`.
    """

    def __init__(self, model: EagleWrapper, cm: CachedSequenceInterface, options: DecodeOptions) -> None:
        self._model = model
        self._cm = cm
        self._options = options

    def warm_up(self, prompts: Sequence[Sequence[int]]) -> None:
        """Run both ways for a few tokens, so that what is timed later starts from equal terms."""
        for speculative in (True, False):
            self.generate(prompts, speculative, max_new_tokens=WARM_UP_TOKENS)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        speculative: bool,
        *,
        max_new_tokens: int | None = None,
        progress: Progress | None = None,
        on_tokens: OnTokens | None = None,
    ) -> tuple[GenerationResult, float]:
        """Generate once, from the seed; the process's own random state is left alone. Gives the seconds, too."""
        from ..embedded.generation import generate

        device = self._cm.device
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(self._options.seed)
            start = time.perf_counter()
            result = generate(
                self._model,
                self._cm,
                prompts,
                max_new_tokens or self._options.max_new_tokens,
                eos_token_ids=self._options.eos_token_ids,
                speculative=speculative,
                progress=progress,
                on_tokens=on_tokens,
            )
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return result, time.perf_counter() - start

    def each_way(
        self,
        groups: Sequence[Sequence[Sequence[int]]],
        *,
        on_tokens: Callable[[int], OnTokens] | None = None,
        progress: Callable[[str], Progress] | None = None,
    ) -> DecodeRuns:
        """Decode groups of prompts with speculation and, in turn, with the target alone; at last as the wrapper says.

        Args:
            groups: prompts as token ids; those of a group run at once.
            on_tokens: gives, by a group's number, what is told of its tokens in its first speculative run.
            progress: gives, by the name of a way, what is told how many tokens a step of its first run added.
        """
        tell = progress or (lambda name: lambda added: None)
        told = {name: tell(name) for name in ("rewritten", "target alone", "as written")}
        repeats = self._options.repeats
        results: dict[str, list[GenerationResult]] = {name: [] for name in told}
        seconds = {"speculative": [0.0] * repeats, "target_alone": [0.0] * repeats}
        transfers: list[Transfer] = []
        for number, group in enumerate(groups):
            listener = on_tokens(number) if on_tokens else None
            for repeat in range(repeats):
                first = repeat == 0
                with record_mirrors(self._cm.info) as recorded:
                    shown = told["rewritten"] if first else None
                    result, elapsed = self.generate(group, True, progress=shown, on_tokens=listener if first else None)
                seconds["speculative"][repeat] += elapsed
                shown = told["target alone"] if first else None
                alone, elapsed = self.generate(group, False, progress=shown)
                seconds["target_alone"][repeat] += elapsed
                if first:
                    transfers += recorded
                    results["rewritten"].append(result)
                    results["target alone"].append(alone)
        with original_forward(self._model), record_mirrors(self._cm.info) as original_transfers:
            for group in groups:
                results["as written"].append(self.generate(group, True, progress=told["as written"])[0])
        scoped, alone, original = (
            reduce(lambda a, b: a.joined(b), results[name]) for name in ("rewritten", "target alone", "as written")
        )
        rates = {
            "speculative": scoped.generated_tokens / statistics.median(seconds["speculative"]),
            "target_alone": alone.generated_tokens / statistics.median(seconds["target_alone"]),
        }
        return DecodeRuns(scoped, alone, original, tuple(transfers), tuple(original_transfers), rates)
