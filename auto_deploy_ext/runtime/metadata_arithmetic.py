"""The arithmetic of metadata mutations, as pure functions of tensors on any device.

Nothing here reads a value back to the host: every size comes from a shape or an ``int`` argument. So the same functions
run on the device, on host mirrors (replay) and as the reference of a fused kernel.

Throughout, ``n`` is the number of sequences and ``t`` the number of tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class GenerateBatch(NamedTuple):
    """What a batch looks like once each sequence is reduced to its last token."""

    input_ids: torch.Tensor
    input_pos: torch.Tensor
    cu_seqlen: torch.Tensor
    seq_len: torch.Tensor
    position_ids: torch.Tensor
    use_initial_states: torch.Tensor


class PageTable(NamedTuple):
    """The page table of one pool."""

    cache_loc: torch.Tensor
    cu_num_pages: torch.Tensor
    last_page_len: torch.Tensor


def last_tokens(input_ids: torch.Tensor, cu_seqlen: torch.Tensor) -> torch.Tensor:
    """Return ``[n]``: each sequence's last token.

    Args:
        input_ids: ``[>= t]``.
        cu_seqlen: ``[n + 1]`` int32, where each sequence begins among the tokens.
    """
    return input_ids.index_select(0, (cu_seqlen[1:] - 1).clamp(0, input_ids.shape[0] - 1))


def last_positions(input_pos: torch.Tensor, seq_len: torch.Tensor) -> torch.Tensor:
    """Return ``[n]``: the position of each sequence's last token, from its cached and its new tokens."""
    return input_pos + seq_len - 1


def single_token_boundaries(num_sequences: int, device: torch.device | None = None) -> torch.Tensor:
    """Return ``[n + 1]`` int32: ``cu_seqlen`` of sequences of one token."""
    return torch.arange(num_sequences + 1, dtype=torch.int32, device=device)


def generate_batch(
    input_ids: torch.Tensor, input_pos: torch.Tensor, cu_seqlen: torch.Tensor, seq_len: torch.Tensor
) -> GenerateBatch:
    """Reduce each sequence to its last token.

    Args:
        input_ids: ``[>= t]`` int32.
        input_pos: ``[n]`` int32, cached tokens before this batch.
        cu_seqlen: ``[n + 1]`` int32, where each sequence begins among the tokens.
        seq_len: ``[n]`` int32.

    Returns:
        New tensors of the arguments' dtypes; ``position_ids`` is ``[n]`` int64, ``use_initial_states`` ``[n]`` bool.
    """
    new_input_pos = last_positions(input_pos, seq_len)
    return GenerateBatch(
        input_ids=last_tokens(input_ids, cu_seqlen),
        input_pos=new_input_pos,
        cu_seqlen=single_token_boundaries(seq_len.shape[0], cu_seqlen.device),
        seq_len=torch.ones_like(seq_len),
        position_ids=new_input_pos.to(torch.int64),
        use_initial_states=new_input_pos > 0,
    )


def sequence_of_token(cu_seqlen: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return ``[t]`` int64: the sequence that each token belongs to.

    Args:
        cu_seqlen: ``[n + 1]``, non-decreasing, first element 0.
        num_tokens: t; tokens beyond ``cu_seqlen[-1]`` count to the last sequence.
    """
    tokens = torch.arange(num_tokens, dtype=cu_seqlen.dtype, device=cu_seqlen.device)
    owner = torch.searchsorted(cu_seqlen[1:].contiguous(), tokens, right=True)
    return owner.clamp(max=cu_seqlen.shape[0] - 2)


def offset_per_token(offset: torch.Tensor, cu_seqlen: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Expand an offset per sequence ``[n]`` to one per token ``[t]``.

    When there are as many tokens as sequences, each sequence has one token and the offset is its own expansion.
    """
    if num_tokens == offset.shape[0]:
        return offset
    return offset.index_select(0, sequence_of_token(cu_seqlen, num_tokens))


def offset_page_ends(
    last_page_len: torch.Tensor, offset: torch.Tensor, tokens_per_block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move the end of each sequence within its last page, or into the next or the previous one.

    Args:
        last_page_len: ``[n]`` int32, each in ``1..tokens_per_block``.
        offset: ``[n]`` integer, each in ``-tokens_per_block..tokens_per_block``.
        tokens_per_block: tokens in a page.

    Returns:
        The new lengths ``[n]``, wrapped back into ``1..tokens_per_block``, and ``[n]`` int32 how many pages more each
        sequence has: -1, 0 or 1.
    """
    moved = last_page_len + offset.to(last_page_len.dtype)
    change = (moved > tokens_per_block).to(torch.int32) - (moved < 1).to(torch.int32)
    return moved - change * tokens_per_block, change


def offset_page_boundaries(cu_num_pages: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    """Return ``cu_num_pages`` ``[n + 1]`` once each sequence has ``change`` ``[n]`` pages more."""
    new_cu = torch.zeros_like(cu_num_pages)
    new_cu[1:] = torch.cumsum(cu_num_pages[1:] - cu_num_pages[:-1] + change, dim=0)
    return new_cu


def offset_page_table(
    cache_loc: torch.Tensor,
    cu_num_pages: torch.Tensor,
    last_page_len: torch.Tensor,
    extra_page_per_seq: torch.Tensor,
    offset: torch.Tensor,
    tokens_per_block: int,
) -> PageTable:
    """Move the end of each sequence by its offset, inserting or dropping at most one page per sequence.

    Where ``last_page_len + offset`` exceeds ``tokens_per_block`` the sequence's extra page is appended to its pages
    (it counts even where it is -1); where it falls below 1 the last page is dropped; then the length wraps back
    into ``1..tokens_per_block``.

    Args:
        cache_loc: ``[p]`` int32, the sequences' pages one after another. ``p`` bounds the result too: leave one
            element per sequence for pages that may be inserted. Elements beyond ``cu_num_pages[-1]`` are ignored.
        cu_num_pages: ``[n + 1]`` int32.
        last_page_len: ``[n]`` int32, each in ``1..tokens_per_block``.
        extra_page_per_seq: ``[n]`` int32.
        offset: ``[n]`` integer, each in ``-tokens_per_block..tokens_per_block``.
        tokens_per_block: tokens in a page.

    Returns:
        New tensors of the arguments' shapes. ``cache_loc`` beyond the new ``cu_num_pages[-1]`` is unspecified.
    """
    num_slots, num_sequences = cache_loc.shape[0], last_page_len.shape[0]
    new_last, change = offset_page_ends(last_page_len, offset, tokens_per_block)
    new_cu = offset_page_boundaries(cu_num_pages, change)
    first_page, num_pages = cu_num_pages[:-1], cu_num_pages[1:] - cu_num_pages[:-1]

    slots = torch.arange(num_slots, dtype=cu_num_pages.dtype, device=cu_num_pages.device)
    owner = torch.searchsorted(new_cu[1:].contiguous(), slots, right=True).clamp(max=num_sequences - 1)
    index_in_sequence = slots - new_cu.index_select(0, owner)
    kept = index_in_sequence < num_pages.index_select(0, owner)
    source = (first_page.index_select(0, owner) + index_in_sequence).clamp(0, max(num_slots - 1, 0))
    new_loc = torch.where(kept, cache_loc.index_select(0, source), extra_page_per_seq.index_select(0, owner))
    return PageTable(new_loc, new_cu, new_last)


def overlap_offset(
    new_lens: torch.Tensor, gather_slot_idx: torch.Tensor, num_prefill: int, num_sequences: int
) -> torch.Tensor:
    """Return the offset that the previous iteration's acceptance means for this batch's rows.

    Args:
        new_lens: integer, per slot of the previous iteration the number of tokens it accepted.
        gather_slot_idx: ``[m]`` int64, for each overlap row its slot in ``new_lens``.
        num_prefill: rows before the overlap rows.
        num_sequences: n.

    Returns:
        ``[n]`` int32: ``new_lens[gather_slot_idx] - 1`` at rows ``num_prefill .. num_prefill + m``, 0 elsewhere.
    """
    offset = torch.zeros(num_sequences, dtype=torch.int32, device=new_lens.device)
    rows = slice(num_prefill, num_prefill + gather_slot_idx.shape[0])
    offset[rows] = new_lens.reshape(-1).index_select(0, gather_slot_idx).to(torch.int32) - 1
    return offset
