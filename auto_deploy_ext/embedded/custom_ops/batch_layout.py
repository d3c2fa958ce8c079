"""Host-side derivations of a new batch: plain lists in, plain lists out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

IntList = Sequence[int] | torch.Tensor


def as_ints(values: IntList) -> list[int]:
    """Return the values as a flat list; a tensor must be on the host (one on a device would stall the host)."""
    if isinstance(values, torch.Tensor):
        return values.reshape(-1).tolist()
    return [int(value) for value in values]


def batch_counts(seq_len: Sequence[int]) -> list[int]:
    """Return BatchInfo's six counts when nobody says: trailing sequences of length 1 decode, the rest prefill."""
    num_decode = 0
    for length in reversed(seq_len):
        if length != 1:
            break
        num_decode += 1
    num_prefill = len(seq_len) - num_decode
    return [num_prefill, sum(seq_len[:num_prefill]), 0, 0, num_decode, num_decode]


def check_counts(counts: Sequence[int], seq_len: Sequence[int]) -> None:
    """Check that BatchInfo's six counts describe sequences of these lengths.

    Raises:
        ValueError: they do not.
    """
    num_prefill, prefill_tokens, num_extend, extend_tokens, num_decode, decode_tokens = counts
    prefill, extend = seq_len[:num_prefill], seq_len[num_prefill : num_prefill + num_extend]
    decode = seq_len[num_prefill + num_extend :]
    expected = [num_prefill, sum(prefill), num_extend, sum(extend), len(decode), sum(decode)]
    if expected != list(counts) or num_decode != decode_tokens:
        raise ValueError(
            f"batch_info says prefill {num_prefill}/{prefill_tokens} tokens, extend {num_extend}/{extend_tokens}, "
            f"decode {num_decode}/{decode_tokens}, but cu_seqlen gives sequences of {list(seq_len)} tokens"
        )


def positions(input_pos: Sequence[int], seq_len: Sequence[int]) -> list[int]:
    """Return each token's position: ``input_pos + 0..len-1`` per sequence."""
    return [start + i for start, length in zip(input_pos, seq_len, strict=True) for i in range(length)]


def last_page_lengths(seq_len_with_cache: Sequence[int], tokens_per_block: int) -> list[int]:
    """Return how many tokens each sequence's last page holds, in ``1..tokens_per_block``."""
    return [(length - 1) % tokens_per_block + 1 for length in seq_len_with_cache]


def gather_indices(cu_seqlen: Sequence[int], num_prefill: int, gather_context_logits: bool) -> tuple[list[int], bool]:
    """Return the tokens that get logits and whether gathering is needed.

    Every token (not needed) when there is no prefill or context logits are wanted, else each prefill's last token and
    all tokens of the others.
    """
    num_tokens = cu_seqlen[-1]
    if num_prefill == 0 or gather_context_logits:
        return list(range(num_tokens)), False
    last_tokens = [end - 1 for end in cu_seqlen[1 : num_prefill + 1]]
    return last_tokens + list(range(cu_seqlen[num_prefill], num_tokens)), True


def example_pages(
    seq_len_with_cache: Sequence[int], tokens_per_block: int, num_blocks: int | None
) -> tuple[list[int], list[int]]:
    """Return (cache_loc, cu_num_pages) that give each sequence pages of its own, reusing them when they run out."""
    num_pages = [-(-length // tokens_per_block) for length in seq_len_with_cache]
    cu_num_pages = list(accumulate(num_pages, initial=0))
    total = cu_num_pages[-1]
    return [page % (num_blocks or max(total, 1)) for page in range(total)], cu_num_pages
