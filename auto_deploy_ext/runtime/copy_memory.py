"""Host memory that copies between host and device go through, and the events that say when it is free again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_STAGING_SLOTS = 3
_SMALLEST_PIECE = 256


def _new_memory(nbytes: int, pinned: bool) -> torch.Tensor:
    """Return uint8 memory, rounded up so that lengths that grow step by step find the same piece again."""
    size = 1 << (max(nbytes, _SMALLEST_PIECE) - 1).bit_length()
    return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


class StagingRing:
    """Pinned host slots that an H2D copy reads from, each reused only after its copy's event.

    Host values may be written as soon as :meth:`upload` returns, however long the copy takes.
    """

    def __init__(self, depth: int = _STAGING_SLOTS) -> None:
        self._slots: list[torch.Tensor | None] = [None] * depth
        self._events: list[torch.cuda.Event | None] = [None] * depth
        self._next = 0

    def upload(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy (host bytes, CUDA device bytes) pairs on the current stream without waiting for it."""
        index, self._next = self._next, (self._next + 1) % len(self._slots)
        event = self._events[index]
        if event is not None:
            event.synchronize()
        needed = sum(source.numel() for source, _ in pairs)
        slot = self._slots[index]
        if slot is None or slot.numel() < needed:
            slot = self._slots[index] = _new_memory(needed, pinned=True)
        start = 0
        for source, target in pairs:
            piece = slot[start : start + source.numel()]
            piece.copy_(source)
            target.copy_(piece, non_blocking=True)
            start += source.numel()
        if event is None:
            event = self._events[index] = torch.cuda.Event()
        event.record(torch.cuda.current_stream(pairs[0][1].device.index))


class LandingPool:
    """Host memory that D2H copies land in; a piece is handed out again only after its copy's event."""

    def __init__(self) -> None:
        self._free: list[tuple[torch.Tensor, torch.cuda.Event | None]] = []

    def take(self, nbytes: int, pinned: bool) -> torch.Tensor:
        """Return ``[>= nbytes]`` uint8 host memory that no copy is writing."""
        for index, (memory, event) in enumerate(self._free):
            if memory.numel() >= nbytes and (event is None or event.query()):
                del self._free[index]
                return memory
        return _new_memory(nbytes, pinned)

    def give_back(self, memory: torch.Tensor, event: torch.cuda.Event | None) -> None:
        """Take memory back whose copy ends with ``event`` (``None``: has ended)."""
        self._free.append((memory, event))
