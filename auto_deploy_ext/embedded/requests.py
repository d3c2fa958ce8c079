"""What is asked of the generation engine and what it answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest


class RequestTooLargeError(ValueError):
    """A request that could not run even on an empty engine."""


@dataclass(frozen=True)
class Request:
    """One prompt to continue.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: generate at most so many, at least one.
        eos_token_ids: generation ends after any of these, which is part of the output.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        """Reject a request that asks for nothing."""
        if not self.prompt:
            raise ValueError("a request needs a prompt of at least one token")
        if not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be a whole number of at least 1, got {self.max_new_tokens!r}")


@dataclass
class RunningSequence:
    """A request while it runs, with what the engine has to remember between steps.

    Attributes:
        request_id: its position among all requests of the engine; owns its pages.
        request: what was asked.
        slot: state slot while it runs.
        tokens: what was generated so far.
        next_input: tokens of its next row, as far as the host knows: last new token and drafts; the prompt at first.
        cached: tokens whose cache entries are final, as far as the host knows.
        launches: steps that it is part of and whose results the host has not taken yet.
        accepted: how often 0, 1, .. K drafts were accepted.
    """

    request_id: int
    request: Request
    slot: int
    next_input: list[int]
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    launches: int = 0
    accepted: Counter[int] = field(default_factory=Counter)

    @property
    def is_prefill(self) -> bool:
        """Nothing of it has been run yet."""
        return self.cached == 0 and not self.launches

    @property
    def has_ended(self) -> bool:
        """Whether it has all its tokens."""
        return len(self.tokens) == self.request.max_new_tokens or (
            bool(self.tokens) and self.tokens[-1] in self.request.eos_token_ids
        )

    @property
    def ends_in_flight(self) -> bool:
        """Whether what is launched certainly gives its last token: every step gives at least one."""
        return len(self.tokens) + self.launches >= self.request.max_new_tokens

    def extend(self, new_tokens: Sequence[int]) -> bool:
        """Take new tokens up to the request's end; says whether that is reached."""
        for token in new_tokens:
            self.tokens.append(token)
            if self.has_ended:
                return True
        return False


@dataclass(frozen=True)
class TokenEvent:
    """New tokens of one request, told as soon as the host knows them.

    Attributes:
        request_id: what `Engine.submit` gave; the position of the prompt for `generate`.
        tokens: the tokens that one step added to the output, at least one.
        num_drafted_accepted: so many of them, the first ones, were drafted and accepted by the target; the others are
            the target's own.
        finished: the request has all its tokens now.
    """

    request_id: int
    tokens: tuple[int, ...]
    num_drafted_accepted: int
    finished: bool


@dataclass(frozen=True)
class RequestOutput:
    """The answer to one request.

    Attributes:
        prompt: as asked.
        tokens: generated tokens.
        accepted: entry ``i`` says in how many steps ``i`` drafts were accepted; empty without speculation.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    accepted: tuple[int, ...]


@dataclass(frozen=True)
class GenerationResult:
    """The answers to all requests and how they came about.

    Attributes:
        outputs: one per request, in the order of submission.
        steps: forwards of the model.
        batches: how many of them were ``prefill``, ``extend``, ``decode`` or ``mixed`` batches.
        accepted: entry ``i`` says how many rows had ``i`` drafts accepted, over all requests.
    """

    outputs: tuple[RequestOutput, ...]
    steps: int
    batches: dict[str, int]
    accepted: tuple[int, ...]

    @property
    def generated_tokens(self) -> int:
        """Tokens generated over all requests."""
        return sum(len(output.tokens) for output in self.outputs)

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens that a verified row yields: accepted drafts + 1. 1.0 when nothing was verified."""
        rows = sum(self.accepted)
        return 1.0 + (sum(length * count for length, count in enumerate(self.accepted)) / rows if rows else 0.0)

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Entry ``i`` says in which share of the verified rows the drafts up to and including number ``i`` counted."""
        rows = sum(self.accepted)
        return tuple(sum(self.accepted[length:]) / rows for length in range(1, len(self.accepted))) if rows else ()

    def joined(self, other: GenerationResult) -> GenerationResult:
        """This result and that of a later generation on the same model as one."""
        batches = Counter(self.batches) + Counter(other.batches)
        accepted = tuple(map(sum, zip_longest(self.accepted, other.accepted, fillvalue=0)))
        return GenerationResult(self.outputs + other.outputs, self.steps + other.steps, dict(batches), accepted)
