"""Whether two decodes of the same prompts agree as far as rounding lets them: the one place that says what equal means.

In exact arithmetic speculative decoding gives the tokens of greedy decoding. In rounded arithmetic a token's logits
come out a little differently when it is verified among others than when it is decoded alone, and where the two best lie
closer than that, either may win, after which the texts have nothing to do with each other. So tokens have to be equal
up to the first such position, and how many such positions there are is counted, lest the rule excuse everything.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .generation import generate
from .shim.interface import CachedSequenceInterface, HybridCacheManager


@dataclass(frozen=True)
class PromptComparison:
    """How two continuations of one prompt compare.

    Attributes:
        num_tokens: tokens of the reference.
        first_difference: first position at which they differ; None: nowhere.
        first_close: first position whose two best logits lie no farther apart than the noise; None: there is none.
        num_close: how many such positions there are.
        gap: how far apart the two best logits lie where the continuations part.
    """

    num_tokens: int
    first_difference: int | None
    first_close: int | None
    num_close: int
    gap: float | None = None

    @property
    def equal(self) -> bool:
        """Whether they are equal up to the first close position."""
        if self.first_difference is None:
            return True
        return self.first_close is not None and self.first_close <= self.first_difference


@dataclass(frozen=True)
class EqualityReport:
    """How two decodes compare.

    Attributes:
        noise: the measured rounding noise, see `rounding_noise`.
        prompts: per prompt.
    """

    noise: float
    prompts: tuple[PromptComparison, ...]

    @property
    def equal(self) -> bool:
        """Whether every prompt's continuations are equal up to the first close position."""
        return all(prompt.equal for prompt in self.prompts)

    @property
    def identical(self) -> bool:
        """Whether all tokens are equal."""
        return all(prompt.first_difference is None for prompt in self.prompts)

    @property
    def num_close(self) -> int:
        """Positions whose two best logits lie no farther apart than the noise."""
        return sum(prompt.num_close for prompt in self.prompts)

    @property
    def num_tokens(self) -> int:
        """Tokens of the reference."""
        return sum(prompt.num_tokens for prompt in self.prompts)

    def to_json(self) -> dict[str, Any]:
        """The numbers, for reports."""
        return {
            "equal": self.equal,
            "identical": self.identical,
            "noise": self.noise,
            "num_tokens": self.num_tokens,
            "num_close": self.num_close,
            "parted": sum(prompt.first_difference is not None for prompt in self.prompts),
            "num_prompts": len(self.prompts),
        }

    def describe(self) -> str:
        """A line for the whole and one per prompt that parts."""
        lines = [
            f"{'equal' if self.equal else 'NOT equal'}: {len(self.prompts)} prompts, {self.num_tokens} tokens, "
            f"{self.num_close} of them with two best logits within the noise of {self.noise:.3g}"
        ]
        for index, prompt in enumerate(self.prompts):
            if prompt.first_difference is not None:
                lines.append(
                    f"  prompt {index} parts at {prompt.first_difference} of {prompt.num_tokens} (gap {prompt.gap}), "
                    f"first close position: {prompt.first_close}"
                )
        return "\n".join(lines)


def compare(tokens: Sequence[int], reference: Sequence[int], gaps: Sequence[float], noise: float) -> PromptComparison:
    """Compare two continuations of one prompt.

    Args:
        tokens: one.
        reference: the other.
        gaps: for each position of the reference, how far apart the two best logits lie.
        noise: see `rounding_noise`.
    """
    pairs = zip(tokens, reference, strict=False)
    shorter = min(len(tokens), len(reference))
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter if len(tokens) != len(reference) else None)
    close = [i for i, gap in enumerate(gaps) if gap <= noise]
    gap = gaps[first] if first is not None and first < len(gaps) else None
    return PromptComparison(len(reference), first, close[0] if close else None, len(close), gap)


def rounding_noise(ways: Sequence[torch.Tensor]) -> float:
    """The most by which the distance of a position's two best logits differs between ways of computing them.

    Args:
        ways: [positions, vocabulary] each, of the same tokens; whose two best are meant, the first way says.
    """
    best = ways[0].topk(2, dim=-1).indices
    distances = torch.stack([way.gather(-1, best).diff(dim=-1).squeeze(-1) for way in ways])
    return float((distances.amax(0) - distances.amin(0)).max())


def gaps_of(logits: torch.Tensor) -> list[float]:
    """How far apart each position's two best logits lie; [positions, vocabulary]."""
    best = logits.topk(2, dim=-1).values
    return (best[:, 0] - best[:, 1]).tolist()


# -- logits of given tokens --------------------------------------------------------------------------------------------


def _pieces(start: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    for begin in range(start, end, size):
        yield begin, min(begin + size, end)


def teacher_forced_logits(
    model: Any, cm: CachedSequenceInterface, prompt: Sequence[int], continuation: Sequence[int], kind: str
) -> torch.Tensor:
    """The target's logits of given tokens, computed the way that a kind of batch computes them.

    Args:
        model: exported wrapper.
        cm: its interface; nothing else may use it meanwhile.
        prompt: token ids.
        continuation: what follows them.
        kind: `prefill`: all tokens at once, as far as they fit; `decode`: the prompt, then a token at a time; `extend`:
            the prompt, then rows of `1 + max_draft_len` tokens.

    Returns:
        [len(continuation), vocabulary] float32 on the CPU: what each token of the continuation was chosen from.
    """
    tokens = [*prompt, *continuation[:-1]]
    info = cm.info
    pieces = [("prefill", *piece) for piece in _pieces(0, len(tokens), info.max_num_tokens)]
    if kind != "prefill":
        size = 1 if kind == "decode" else 1 + model.max_draft_len
        pieces = [("prefill", *piece) for piece in _pieces(0, len(prompt), info.max_num_tokens)]
        pieces += [(kind, *piece) for piece in _pieces(len(prompt), len(tokens), size)]
    rows = []
    for piece_kind, start, end in pieces:
        counts = [0] * 6
        first = 2 * ("prefill", "extend", "decode").index(piece_kind)
        counts[first : first + 2] = 1, end - start
        num_pages = -(-end // info.tokens_per_block)
        info.nest_sequences(
            tokens[start:end],
            cu_seqlen=[0, end - start],
            input_pos=[start],
            batch_info=counts,
            slot_idx=[0],
            prompt_lens=[len(prompt)],
            cache_loc_per_pool=[list(range(num_pages))],
            cu_num_pages_per_pool=[[0, num_pages]],
            extra_page_per_seq_per_pool=[[-1]],
            gather_context_logits=True,
        )
        with torch.no_grad():
            rows.append(model.forward_target(cm).float().cpu())
    return torch.cat(rows)[len(prompt) - 1 :]


def _kinds(cm: CachedSequenceInterface) -> tuple[str, ...]:
    # A verification leaves a recurrent state for the wrapper to promote, so rows cannot simply follow one another.
    recurrent = isinstance(cm.kv_cache_manager, HybridCacheManager)
    return ("decode", "prefill") if recurrent else ("decode", "prefill", "extend")


@dataclass(frozen=True)
class Reference:
    """Continuations to be met, and how close the two best tokens of their positions are.

    Attributes:
        tokens: per prompt, token ids.
        gaps: per prompt, for each position, how far apart the two best logits lie, in units of logits.
        noise: the measured rounding noise, see `rounding_noise`.
    """

    tokens: tuple[tuple[int, ...], ...]
    gaps: tuple[tuple[float, ...], ...]
    noise: float

    @classmethod
    def measure(
        cls, model: Any, cm: CachedSequenceInterface, prompts: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> Reference:
        """Measure the rounding noise on the reference itself.

        The noise is the largest over all positions between decoding token by token, one prefill of everything, and
        verification in rows of drafts.

        Args:
            model: exported wrapper that made the tokens, compiled or not.
            cm: its interface; nothing else may use it meanwhile.
            prompts: token ids.
            tokens: their continuations, usually greedy ones.

        Raises:
            ValueError: not as many continuations as prompts; or logits that are not finite, of which no token follows.
        """
        gaps, noise = [], 0.0
        for number, (prompt, continuation) in enumerate(zip(prompts, tokens, strict=True)):
            ways = [teacher_forced_logits(model, cm, prompt, continuation, kind) for kind in _kinds(cm)]
            gaps.append(tuple(gaps_of(ways[0])))
            own = rounding_noise(ways)
            if not math.isfinite(own):
                raise ValueError(f"prompt {number}: its best logits are infinite or no numbers, so nothing is greedy")
            noise = max(noise, own)
        return cls(tuple(map(tuple, tokens)), tuple(gaps), noise)

    def report(self, tokens: Sequence[Sequence[int]]) -> EqualityReport:
        """Judge other continuations of the same prompts.

        Raises:
            ValueError: not as many as there are prompts.
        """
        triples = zip(tokens, self.tokens, self.gaps, strict=True)
        return EqualityReport(self.noise, tuple(compare(own, met, apart, self.noise) for own, met, apart in triples))


def equality_report(
    model: Any,
    cm: CachedSequenceInterface,
    prompts: Sequence[Sequence[int]],
    tokens: Sequence[Sequence[int]],
    reference: Sequence[Sequence[int]],
) -> EqualityReport:
    """Compare two decodes by the rounding noise of the model that made the reference; see `Reference.measure`.

    Args:
        model: exported wrapper, compiled or not.
        cm: its interface; nothing else may use it meanwhile.
        prompts: token ids.
        tokens: continuations to be judged.
        reference: continuations to be met, usually greedy ones of the same backend.

    Example:
        >>> spec, greedy = (generate(model, cm, prompts, 32, speculative=s) for s in (True, False))
        >>> report = equality_report(model, cm, prompts, *([o.tokens for o in r.outputs] for r in (spec, greedy)))
        >>> assert report.equal, report.describe()
    """
    return Reference.measure(model, cm, prompts, reference).report(tokens)


def speculative_equality(
    model: Any,
    cm: CachedSequenceInterface,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    **options: Any,
) -> EqualityReport:
    """Decode with drafts and, on the same backend, greedily without, and compare.

    Args:
        model: exported wrapper, compiled or not.
        cm: its interface; nothing else may use it meanwhile.
        prompts: token ids.
        max_new_tokens: for each prompt.
        **options: of `generate`, for the decode with drafts.
    """
    speculative = generate(model, cm, prompts, max_new_tokens, **options)
    greedy = generate(model, cm, prompts, max_new_tokens, speculative=False)
    tokens, reference = ([list(output.tokens) for output in result.outputs] for result in (speculative, greedy))
    return equality_report(model, cm, prompts, tokens, reference)
