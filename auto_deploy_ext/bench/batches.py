"""Extend-only batches with filled caches, prepared ahead: what a server nests in the middle of a decode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..embedded.shim.interface import CachedSequenceInterface

#: batches that the steps of a block go through, over and over; a block is a multiple of them.
RING = 4
_STAGGER = 7


def advance(k: int) -> int:
    """Tokens by which each row moves on from one batch of the ring to the next: half of the drafts accepted."""
    return 1 + k // 2


def longest_sequence(context: int, k: int) -> int:
    """Tokens that a row of the ring's batches may reach, those of its drafts included."""
    return context + RING * advance(k) + 2 * (k + 1)


def make_ring(cm: CachedSequenceInterface, batch: int, k: int, context: int, seed: int = 0) -> list[Mapping[str, Any]]:
    """Arguments of `nest_sequences` for each batch of the ring.

    Row r has a few tokens less than `context` cached in the first batch, so that rows cross pages at different steps;
    each batch moves every row on. Pages are spread over the cache in random order, and each row owns those of all its
    drafted tokens and one more, as an engine gives them out. Tokens are random.

    Args:
        cm: the interface, with caches.
        batch: rows.
        k: drafted tokens per row.
        context: cached tokens of a row.
        seed: of tokens and pages.

    Raises:
        ValueError: the interface is too small.
    """
    info = cm.info
    size = info.tokens_per_block
    if batch > info.max_batch_size or longest_sequence(context, k) > info.max_seq_len:
        raise ValueError(
            f"{batch} rows of up to {longest_sequence(context, k)} tokens do not fit max_batch_size "
            f"{info.max_batch_size} and max_seq_len {info.max_seq_len}"
        )
    per_row = -(-longest_sequence(context, k) // size) + 1
    if batch * per_row > info.num_blocks:
        raise ValueError(f"{batch} rows need {batch * per_row} pages, the caches have {info.num_blocks}")
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randperm(info.num_blocks, generator=generator)[: batch * per_row].view(batch, per_row).tolist()
    first = [max(1, context - (_STAGGER * row) % size) for row in range(batch)]
    return [
        _nested([start + index * advance(k) for start in first], pages, size, k, generator) for index in range(RING)
    ]


def _nested(
    cached: list[int], pages: list[list[int]], tokens_per_block: int, k: int, generator: torch.Generator
) -> dict[str, Any]:
    batch, length = len(cached), 1 + k
    counts = [-(-(position + length) // tokens_per_block) for position in cached]
    cu_num_pages = [0]
    for count in counts:
        cu_num_pages.append(cu_num_pages[-1] + count)
    return {
        "input_ids": torch.randint(0, _TOKENS, (batch * length,), generator=generator, dtype=torch.int32),
        "cu_seqlen": list(range(0, batch * length + 1, length)),
        "input_pos": cached,
        "batch_info": [0, 0, batch, batch * length, 0, 0],
        "slot_idx": list(range(batch)),
        "prompt_lens": [1] * batch,
        "cache_loc_per_pool": [[page for row, count in zip(pages, counts, strict=True) for page in row[:count]]],
        "cu_num_pages_per_pool": [cu_num_pages],
        "extra_page_per_seq_per_pool": [[row[count] for row, count in zip(pages, counts, strict=True)]],
        "_gather_idx": [],
        "_mask_scatter_indices": [],
        "_gather_slot_idx": [],
    }


#: tokens are below this, which every vocabulary has.
_TOKENS = 64
