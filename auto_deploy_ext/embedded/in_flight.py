"""Steps that were launched and whose results the host has not read yet, and how these results reach it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from ..orchestrator import Dispatcher
from .compile.captured_segments import SegmentedForward, Told
from .requests import RunningSequence

_IN_FLIGHT = 3
"""Landing places: one that is read, one on its way, one that is being launched."""


class Landing:
    """A step's results on their way to the host.

    Args:
        tokens: ``[rows, width]`` on the host, complete once the event has happened.
        lens: ``[rows]`` likewise; None: one token per row.
        event: None: they are there.
        sources: what the copies read from, kept until they are done.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        lens: torch.Tensor | None,
        event: torch.cuda.Event | None = None,
        sources: tuple[torch.Tensor, ...] = (),
    ) -> None:
        self._tokens = tokens
        self._lens = lens
        self._event = event
        self._sources = sources

    def wait(self) -> bool:
        """Wait until the results are there; says whether there was anything to wait for."""
        if self._event is None:
            return False
        waits = not self._event.query()
        if waits:
            self._event.synchronize()
        self._event, self._sources = None, ()
        return waits

    def tokens(self) -> list[list[int]]:
        """The new tokens of every row, as many as count."""
        self.wait()
        tokens = self._tokens.tolist()
        if self._lens is None:
            return tokens
        return [row[:length] for row, length in zip(tokens, self._lens.tolist(), strict=True)]

    def lens(self) -> torch.Tensor:
        """How many tokens of each row count, ``[rows]`` int32 on the host."""
        self.wait()
        return torch.ones(len(self._tokens), dtype=torch.int32) if self._lens is None else self._lens


def watching_drafts(model: nn.Module, drafter: nn.Module, told: Told) -> AbstractContextManager[None]:
    """While active, `told` is called when a step of a model begins to draft: its results are complete then.

    What runs the model as segments is asked to tell, see `SegmentedForward.telling`; a hook on the drafter would keep
    steps from being replayed. All else calls the drafter as a module, and `told` is given None before each call.
    A batch that no traced variant of such a runner covers tells nothing, so its results come with its end.

    Args:
        model: the wrapper.
        drafter: what it drafts with.
        told: given the results that are complete, or None: all that are there.
    """
    bound = model.__dict__.get("forward")
    if isinstance(bound, Dispatcher) and isinstance(bound.runner, SegmentedForward) and not bound.bypassed:
        return bound.runner.telling(drafter, told)
    return _hooked(drafter, told)


@contextlib.contextmanager
def _hooked(drafter: nn.Module, told: Told) -> Iterator[None]:
    handle = drafter.register_forward_pre_hook(lambda *_: told(None))
    try:
        yield
    finally:
        handle.remove()


class ResultCopies:
    """Brings results of steps to the host without waiting, through pinned memory that is made once.

    Where the drafter is called as a module, or drafts in device graphs of its own, results travel on a side stream as
    soon as the target's answer was compared with the drafts: they arrive while the step still drafts. Elsewhere (one
    graph for the whole step) they travel behind the step, on its stream.

    Args:
        device: where steps run.
        max_rows: most rows of a step.
        width: most tokens that a row can yield.
    """

    def __init__(self, device: torch.device, max_rows: int, width: int) -> None:
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._places: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._next = 0
        self._verified: torch.cuda.Event | None = None
        self._complete: tuple[torch.Tensor, ...] | None = None
        if self._on_cuda:
            self._side = torch.cuda.Stream(device)
            self._places = [
                (
                    torch.empty(max_rows * width, dtype=torch.int32, pin_memory=True),
                    torch.empty(max_rows, dtype=torch.int32, pin_memory=True),
                )
                for _ in range(_IN_FLIGHT)
            ]

    def watching(self, model: nn.Module, drafter: nn.Module | None) -> AbstractContextManager[None]:
        """While active, note when a step of a model begins to draft: its results are complete then."""
        self._verified = self._complete = None
        if not self._on_cuda or drafter is None:
            return contextlib.nullcontext()
        return watching_drafts(model, drafter, self._note)

    def _note(self, complete: tuple[torch.Tensor, ...] | None) -> None:
        if self._verified is None and not torch.cuda.is_current_stream_capturing():
            self._complete = complete
            self._verified = torch.cuda.Event()
            self._verified.record(torch.cuda.current_stream(self._device))

    def _are_complete(self, sources: Sequence[torch.Tensor]) -> bool:
        """Whether what was noted is that these results are there."""
        if self._verified is None:
            return False
        known = self._complete
        return known is None or all(any(source is tensor for tensor in known) for source in sources)

    def start(self, tokens: torch.Tensor, lens: torch.Tensor | None) -> Landing:
        """Start bringing a step's results, which nothing may overwrite on the device until they are there.

        Args:
            tokens: ``[rows, width]`` integers on the device.
            lens: ``[rows]`` integers; None: one token per row.
        """
        if not self._on_cuda:
            return Landing(tokens, lens)
        place, self._next = self._places[self._next], (self._next + 1) % len(self._places)
        landed = [place[0][: tokens.numel()].view(tokens.shape), place[1][: len(tokens)]]
        sources = (tokens,) if lens is None else (tokens, lens)
        stream = torch.cuda.current_stream(tokens.device)
        # A copy that converts would read memory that the step's own stream allocated for it just now.
        if self._are_complete(sources) and all(source.dtype is torch.int32 for source in sources):
            assert self._verified is not None
            stream = self._side
            stream.wait_event(self._verified)
        event = torch.cuda.Event()
        with torch.cuda.stream(stream):
            for target, source in zip(landed, sources, strict=False):
                target.copy_(source, non_blocking=True)
            event.record(stream)
        return Landing(landed[0], None if lens is None else landed[1], event, sources)


@dataclass(frozen=True)
class StepInFlight:
    """A step that was launched.

    Attributes:
        rows: its sequences, in the order of the batch.
        prefills: how many of them, the first ones, ran their prompt.
        next_tokens: ``[>= rows, 1 + K]`` on the device: what each row continues with.
        lens: ``[>= rows]`` on the device: tokens that each row has yielded; None: one each.
        results: new tokens and their numbers, for the host.
    """

    rows: Sequence[RunningSequence]
    prefills: int
    next_tokens: torch.Tensor
    lens: torch.Tensor | None
    results: Landing

    def row_of(self, seq: RunningSequence) -> int:
        """Where a sequence is in the batch."""
        return self._row_by_id[id(seq)]

    @functools.cached_property
    def _row_by_id(self) -> dict[int, int]:
        return {id(seq): row for row, seq in enumerate(self.rows)}
