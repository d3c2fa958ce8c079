"""Who owns which page of the KV cache and which state slot."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


class OutOfPagesError(RuntimeError):
    """More pages are asked for than are free."""


class PageAllocator:
    """A pool of equal pages, given to sequences in order of need.

    A page belongs to at most one sequence; a sequence's pages keep their order and grow at the end only.

    Args:
        num_pages: pages ``0 .. num_pages - 1``.
        tokens_per_page: tokens that one page holds.
    """

    def __init__(self, num_pages: int, tokens_per_page: int) -> None:
        """Start with every page free."""
        if num_pages < 1 or tokens_per_page < 1:
            raise ValueError(
                f"a pool needs at least one page of at least one token, got {num_pages} x {tokens_per_page}"
            )
        self.num_pages = num_pages
        self.tokens_per_page = tokens_per_page
        self._free = list(range(num_pages - 1, -1, -1))
        self._owned: dict[Hashable, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.tokens_per_page)

    def pages(self, owner: Hashable) -> Sequence[int]:
        """The owner's pages, in sequence order; none when it has none."""
        return tuple(self._owned.get(owner, ()))

    def grow(self, owner: Hashable, num_pages: int) -> Sequence[int]:
        """See to it that the owner has at least ``num_pages`` pages.

        Raises:
            OutOfPagesError: not enough are free; nothing is changed then.
        """
        missing = num_pages - len(self._owned.get(owner, ()))
        if missing > len(self._free):
            raise OutOfPagesError(
                f"{owner!r} needs {missing} more pages of {self.num_pages}, {len(self._free)} are free"
            )
        owned = self._owned.setdefault(owner, [])
        owned.extend(self._free.pop() for _ in range(missing))
        return tuple(owned)

    def release(self, owner: Hashable) -> None:
        """Give all of the owner's pages back; an owner without pages is fine."""
        self._free.extend(reversed(self._owned.pop(owner, [])))


class SlotAllocator:
    """A pool of state slots, one per running sequence.

    Args:
        num_slots: slots ``0 .. num_slots - 1``.
    """

    def __init__(self, num_slots: int) -> None:
        """Start with every slot free."""
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots that nobody holds."""
        return len(self._free)

    def take(self) -> int:
        """One free slot.

        Raises:
            IndexError: none is free.
        """
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Free a slot that was taken."""
        if slot in self._free:
            raise ValueError(f"slot {slot} is free already")
        self._free.append(slot)
