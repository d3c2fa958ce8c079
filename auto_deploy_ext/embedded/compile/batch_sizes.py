"""Which batch sizes become device graphs, and to which of them a batch is padded."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence


def default_batch_sizes(max_batch_size: int) -> tuple[int, ...]:
    """The powers of two up to the largest batch, and the largest batch itself.

    Example:
        >>> default_batch_sizes(12)
        (1, 2, 4, 8, 12)
    """
    sizes = [1]
    while sizes[-1] * 2 <= max_batch_size:
        sizes.append(sizes[-1] * 2)
    return tuple(sorted({*sizes, max_batch_size}))


def checked_batch_sizes(sizes: Iterable[int] | None, max_batch_size: int) -> tuple[int, ...]:
    """The sizes that are asked for, ascending, the default ones for None.

    Raises:
        ValueError: one is below 1 or above the largest batch, or there are none.
    """
    if sizes is None:
        return default_batch_sizes(max_batch_size)
    found = tuple(sorted(set(sizes)))
    wrong = [size for size in found if not 1 <= size <= max_batch_size]
    if wrong or not found:
        raise ValueError(
            f"cuda_graph_batch_sizes must lie in 1..{max_batch_size} (max_batch_size), got {list(sizes)}: "
            "drop what lies outside, or raise max_batch_size"
        )
    return found


def padded_batch_size(sizes: Sequence[int], rows: int) -> int:
    """The smallest captured batch size that holds `rows`; `rows` itself where none does, and such a batch runs eagerly.

    Args:
        sizes: ascending, for example a model's `captured_batch_sizes`.
        rows: sequences in the batch.
    """
    place = bisect_left(sizes, rows)
    return sizes[place] if place < len(sizes) else rows
