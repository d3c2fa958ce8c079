"""Triton kernels over a paged cache: appending keys and values, and attention that is split along the keys.

Everything that differs from row to row is read on the device, so a launch is determined by shapes and counts that the
host knows: it never waits, and it can be captured as part of a device graph. Importing this module needs triton.

The cache is `[pages, 2, kv_heads, page_size, dim]`, keys before values. `n` rows are described by `cu_seqlen` [n + 1]
(where each row's tokens start), `seq_len_with_cache` [n] (tokens up to the last new one), `cu_num_pages` [n + 1] (where
each row's pages start in `cache_loc`) and `cache_loc` (page numbers), all int32.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

MAX_SPLITS = 64
"""Most parts that the keys of one query are divided into."""

_LOG2_E = 1.4426950408889634


# -- kernels -----------------------------------------------------------------------------------------------------------


@triton.jit
def _row_of_tile(cu_seqlen, tile, num_rows, TILE: tl.constexpr):
    """The row that a tile of at most TILE tokens belongs to; row r's first tile is `cu_seqlen[r] // TILE + r`."""
    left: tl.int32 = 0
    right = num_rows
    while left < right:
        middle = (left + right) // 2
        if tl.load(cu_seqlen + middle) // TILE + middle <= tile:
            left = middle + 1
        else:
            right = middle
    return left - 1


@triton.jit
def _slot_of(position, first_page, cache_loc, inside, num_entries, num_pages, PAGE: tl.constexpr):
    """Page (int64) and place in it of each position of a row; in range whatever the metadata says."""
    entry = tl.minimum(tl.maximum(first_page + position // PAGE, 0), num_entries - 1)
    page = tl.load(cache_loc + entry, mask=inside, other=0)
    return tl.minimum(tl.maximum(page, 0), num_pages - 1).to(tl.int64), position % PAGE


@triton.jit
def _accumulate(q, k, v, visible, scale, top, total, acc):
    """One step of the online softmax, in base 2: q [M, D], k and v [N, D], visible [M, N]."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    # A query that has seen no key yet has nothing to subtract; its weights are exp2(-inf) = 0 then.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_top, total, acc


_VARYING = ("seq", "num_rows", "num_tokens", "num_pages", "num_entries")


@triton.jit(do_not_specialize=[*_VARYING, "num_splits"])
def _attend_kernel(
    q,
    k,
    v,
    kv_cache,
    cu_seqlen,
    cu_num_pages,
    seq_len_with_cache,
    cache_loc,
    out,
    part_acc,
    part_top,
    part_total,
    scale,
    q_batch,
    q_seq,
    q_head,
    k_batch,
    k_seq,
    k_head,
    v_batch,
    v_seq,
    v_head,
    cache_page,
    cache_side,
    cache_head,
    cache_slot,
    seq,
    num_rows,
    num_tokens,
    num_pages,
    num_entries,
    num_splits,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_P: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Program (tile, kv_head, split): BLOCK_Q queries of one row, all heads of a group, one part of the keys.

    What the row had before is read from its pages, what is new from k and v, so that the new part can be written into
    the pages here too (by split 0) without anybody waiting for it.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row = _row_of_tile(cu_seqlen, tile, num_rows, BLOCK_Q)
    first = tl.load(cu_seqlen + row)
    length = tl.load(cu_seqlen + row + 1) - first
    query0 = (tile - (first // BLOCK_Q + row)) * BLOCK_Q
    if query0 >= length:
        return
    keys = tl.load(seq_len_with_cache + row)
    past = keys - length
    first_page = tl.load(cu_num_pages + row)
    dims = tl.arange(0, BLOCK_D)
    in_dim = dims < DIM

    if split == 0:
        new = query0 + tl.arange(0, BLOCK_Q)
        token = first + new
        inside = (new < length) & (token < num_tokens) & (past + new >= 0)
        page, slot = _slot_of(past + new, first_page, cache_loc, inside, num_entries, num_pages, PAGE)
        place = kv_cache + page * cache_page + kv_head * cache_head + slot * cache_slot
        batch, step = (token // seq).to(tl.int64), token % seq
        both = inside[:, None] & in_dim[None, :]
        k_rows = k + batch * k_batch + step * k_seq + kv_head * k_head
        v_rows = v + batch * v_batch + step * v_seq + kv_head * v_head
        new_k = tl.load(k_rows[:, None] + dims[None, :], mask=both, other=0.0)
        new_v = tl.load(v_rows[:, None] + dims[None, :], mask=both, other=0.0)
        tl.store(place[:, None] + dims[None, :], new_k.to(kv_cache.dtype.element_ty), mask=both)
        tl.store((place + cache_side)[:, None] + dims[None, :], new_v.to(kv_cache.dtype.element_ty), mask=both)

    # A row of the tile is one query and one head of the group.
    rows = tl.arange(0, BLOCK_Q * GROUP_P)
    query = query0 + rows // GROUP_P
    member = rows % GROUP_P
    head = kv_head * GROUP + member
    token = first + query
    is_query = (query < length) & (member < GROUP) & (token < num_tokens)
    batch, step = (token // seq).to(tl.int64), token % seq
    q_rows = q + batch * q_batch + step * q_seq + head * q_head
    queries = tl.load(q_rows[:, None] + dims[None, :], mask=is_query[:, None] & in_dim[None, :], other=0.0)
    position = past + query
    out_row = token.to(tl.int64) * HEADS + head

    span = tl.cdiv(tl.cdiv(keys, num_splits), BLOCK_N) * BLOCK_N
    begin = split * span
    end = tl.minimum(begin + span, past + tl.minimum(query0 + BLOCK_Q, length))
    if SPLIT:
        part = out_row * num_splits + split
        if begin >= end:
            tl.store(part_top + part, tl.full([BLOCK_Q * GROUP_P], float("-inf"), tl.float32), mask=is_query)
            return

    top = tl.full([BLOCK_Q * GROUP_P], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q * GROUP_P], tl.float32)
    acc = tl.zeros([BLOCK_Q * GROUP_P, BLOCK_D], tl.float32)
    steps = tl.arange(0, BLOCK_N)

    cached_end = tl.minimum(end, past)
    for start in range(begin, cached_end, BLOCK_N):
        key = start + steps
        inside = key < cached_end
        page, slot = _slot_of(key, first_page, cache_loc, inside, num_entries, num_pages, PAGE)
        place = kv_cache + page * cache_page + kv_head * cache_head + slot * cache_slot
        both = inside[:, None] & in_dim[None, :]
        old_k = tl.load(place[:, None] + dims[None, :], mask=both, other=0.0).to(q.dtype.element_ty)
        old_v = tl.load((place + cache_side)[:, None] + dims[None, :], mask=both, other=0.0).to(q.dtype.element_ty)
        visible = is_query[:, None] & inside[None, :]
        top, total, acc = _accumulate(queries, old_k, old_v, visible, scale, top, total, acc)

    for start in range(tl.maximum(begin, past), end, BLOCK_N):
        key = start + steps
        token_of_key = first + key - past
        inside = (key < end) & (token_of_key < num_tokens)
        batch_of_key, step_of_key = (token_of_key // seq).to(tl.int64), token_of_key % seq
        both = inside[:, None] & in_dim[None, :]
        k_of_key = k + batch_of_key * k_batch + step_of_key * k_seq + kv_head * k_head
        v_of_key = v + batch_of_key * v_batch + step_of_key * v_seq + kv_head * v_head
        # Through the cache's type, so that a token counts the same now as when it is read from its page.
        fresh_k = tl.load(k_of_key[:, None] + dims[None, :], mask=both, other=0.0)
        fresh_v = tl.load(v_of_key[:, None] + dims[None, :], mask=both, other=0.0)
        fresh_k = fresh_k.to(kv_cache.dtype.element_ty).to(q.dtype.element_ty)
        fresh_v = fresh_v.to(kv_cache.dtype.element_ty).to(q.dtype.element_ty)
        visible = is_query[:, None] & inside[None, :] & (key[None, :] <= position[:, None])
        top, total, acc = _accumulate(queries, fresh_k, fresh_v, visible, scale, top, total, acc)

    both = is_query[:, None] & in_dim[None, :]
    if SPLIT:
        tl.store(part_top + part, top, mask=is_query)
        tl.store(part_total + part, total, mask=is_query)
        tl.store(part_acc + part[:, None] * DIM + dims[None, :], acc, mask=both)
    else:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out + out_row[:, None] * DIM + dims[None, :], acc.to(out.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["num_splits"])
def _merge_kernel(
    part_acc,
    part_top,
    part_total,
    out,
    num_splits,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Program (token, head): put the parts of one query together. A part without keys has only its top, -inf."""
    row = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    splits = tl.arange(0, BLOCK_S)
    dims = tl.arange(0, BLOCK_D)
    part = row * num_splits + splits
    top = tl.load(part_top + part, mask=splits < num_splits, other=float("-inf"))
    has_keys = top > float("-inf")
    best = tl.max(top, axis=0)
    weight = tl.where(has_keys, tl.exp2(top - tl.where(best == float("-inf"), 0.0, best)), 0.0)
    total = tl.sum(weight * tl.load(part_total + part, mask=has_keys, other=0.0), axis=0)
    both = has_keys[:, None] & (dims < DIM)[None, :]
    acc = tl.load(part_acc + part[:, None] * DIM + dims[None, :], mask=both, other=0.0)
    merged = tl.sum(weight[:, None] * acc, axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * DIM + dims, merged.to(out.dtype.element_ty), mask=dims < DIM)


@triton.jit(do_not_specialize=[*_VARYING, "num_tiles"])
def _append_kernel(
    k,
    v,
    kv_cache,
    cu_seqlen,
    cu_num_pages,
    seq_len_with_cache,
    cache_loc,
    indices,
    k_batch,
    k_seq,
    k_head,
    v_batch,
    v_seq,
    v_head,
    cache_page,
    cache_side,
    cache_head,
    cache_slot,
    seq,
    num_rows,
    num_tokens,
    num_pages,
    num_entries,
    num_tiles,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    INDEX_TILE: tl.constexpr,
):
    """Program (tile, kv_head): write TILE tokens of one row; the tiles after those copy the page numbers, clamped."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    if tile >= num_tiles:
        if kv_head == 0:
            entries = (tile - num_tiles) * INDEX_TILE + tl.arange(0, INDEX_TILE)
            inside = (entries < num_entries) & (entries < tl.load(cu_num_pages + num_rows))
            page = tl.load(cache_loc + entries, mask=inside, other=0)
            tl.store(indices + entries, tl.minimum(tl.maximum(page, 0), num_pages - 1), mask=inside)
        return
    row = _row_of_tile(cu_seqlen, tile, num_rows, TILE)
    first = tl.load(cu_seqlen + row)
    length = tl.load(cu_seqlen + row + 1) - first
    new = (tile - (first // TILE + row)) * TILE + tl.arange(0, TILE)
    position = tl.load(seq_len_with_cache + row) - length + new
    token = first + new
    inside = (new < length) & (token < num_tokens) & (position >= 0)
    first_page = tl.load(cu_num_pages + row)
    page, slot = _slot_of(position, first_page, cache_loc, inside, num_entries, num_pages, PAGE)
    place = kv_cache + page * cache_page + kv_head * cache_head + slot * cache_slot
    batch, step = (token // seq).to(tl.int64), token % seq
    dims = tl.arange(0, BLOCK_D)
    both = inside[:, None] & (dims < DIM)[None, :]
    k_rows = k + batch * k_batch + step * k_seq + kv_head * k_head
    v_rows = v + batch * v_batch + step * v_seq + kv_head * v_head
    new_k = tl.load(k_rows[:, None] + dims[None, :], mask=both, other=0.0)
    new_v = tl.load(v_rows[:, None] + dims[None, :], mask=both, other=0.0)
    tl.store(place[:, None] + dims[None, :], new_k.to(kv_cache.dtype.element_ty), mask=both)
    tl.store((place + cache_side)[:, None] + dims[None, :], new_v.to(kv_cache.dtype.element_ty), mask=both)


# -- launches ----------------------------------------------------------------------------------------------------------


def _power_of_two(value: int) -> int:
    """The smallest power of two that is not below."""
    return 1 << max(value - 1, 0).bit_length()


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def choose_splits(num_programs: int, max_keys: int, block_keys: int, processors: int) -> int:
    """In how many parts to divide the keys: enough to fill the device twice, a power of two, none without keys.

    Args:
        num_programs: programs of an unsplit launch.
        max_keys: most keys that a row may have.
        block_keys: keys that a program handles at a time.
        processors: multiprocessors of the device.

    Example:
        >>> choose_splits(8, 32768, 64, 132), choose_splits(512, 32768, 64, 132), choose_splits(8, 128, 64, 132)
        (32, 1, 2)
    """
    wanted = 2 * processors // max(num_programs, 1)
    possible = min(wanted, -(-max_keys // block_keys), MAX_SPLITS)
    return 1 << (possible.bit_length() - 1) if possible > 1 else 1


def tile_shape(group: int, dim: int, dtype: torch.dtype, longest: int) -> tuple[int, int]:
    """Queries and keys of a tile.

    Args:
        group: query heads per key head, a power of two.
        dim: width of a head; several tiles of keys and values have to fit in shared memory.
        dtype: of the queries.
        longest: tokens of a row, as far as the host can tell; rows may be longer.

    Returns:
        `(queries, keys)`, powers of two, such that a tile's rows (queries times heads of a group) are at least 16.
    """
    exact = dtype == torch.float32
    most_rows, keys = 32 if exact else 64, 32 if exact or dim > 128 else 64
    rows = min(max(_power_of_two(longest) * group, 16), most_rows)
    return max(rows // group, 1, 16 // group), keys


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    cu_seqlen: torch.Tensor,
    cu_num_pages: torch.Tensor,
    seq_len_with_cache: torch.Tensor,
    cache_loc: torch.Tensor,
    *,
    num_rows: int,
    num_tokens: int,
    longest: int,
    max_keys: int,
    scale: float,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Append k and v to a paged cache and attend causally over it; one launch, two where the keys are split.

    Args:
        q: [batch, sequence, heads, dim] float32, bfloat16 or float16; the batch's tokens in order when flattened. Any
            strides but the last.
        k: [batch, sequence, kv_heads, dim]; heads is a multiple of kv_heads.
        v: Likewise.
        kv_cache: [pages, 2, kv_heads, page_size, dim], written in place.
        cu_seqlen: int32 [>= num_rows + 1], as in the module's docstring, like the next three.
        cu_num_pages: int32 [>= num_rows + 1].
        seq_len_with_cache: int32 [>= num_rows].
        cache_loc: int32 [>= pages of the rows].
        num_rows: rows of the batch.
        num_tokens: tokens of the batch.
        longest: tokens of a row, as far as the host can tell; decides the tiles' size only.
        max_keys: most keys that a row may have; decides the number of splits only.
        scale: factor on the scores.
        num_splits: parts of the keys, up to MAX_SPLITS; None chooses.

    Returns:
        [batch, sequence, heads, dim], contiguous, in q's dtype; zero for tokens beyond num_tokens.
    """
    batch, seq, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    padded_group = _power_of_two(group)
    everything = batch * seq == num_tokens
    out = (torch.empty if everything else torch.zeros)(batch, seq, heads, dim, dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    q, k, v = _unit_stride(q), _unit_stride(k), _unit_stride(v)
    block_q, block_n = tile_shape(padded_group, dim, q.dtype, longest)
    tiles = num_tokens // block_q + num_rows
    if num_splits is None:
        num_splits = choose_splits(tiles * kv_heads, max_keys, block_n, _processors(q.device))
    block_d, exact = max(_power_of_two(dim), 16), q.dtype == torch.float32
    part_acc = part_top = part_total = out
    if num_splits > 1:
        part_acc = q.new_empty(num_tokens, heads, num_splits, dim, dtype=torch.float32)
        part_top, part_total = q.new_empty(2, num_tokens, heads, num_splits, dtype=torch.float32)
    _attend_kernel[(tiles, kv_heads, num_splits)](
        q,
        k,
        v,
        kv_cache,
        cu_seqlen,
        cu_num_pages,
        seq_len_with_cache,
        cache_loc,
        out,
        part_acc,
        part_top,
        part_total,
        scale * _LOG2_E,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *kv_cache.stride()[:4],
        seq,
        num_rows,
        num_tokens,
        kv_cache.shape[0],
        cache_loc.shape[0],
        num_splits,
        HEADS=heads,
        GROUP=group,
        GROUP_P=padded_group,
        DIM=dim,
        BLOCK_D=block_d,
        PAGE=kv_cache.shape[3],
        BLOCK_Q=block_q,
        BLOCK_N=block_n,
        SPLIT=num_splits > 1,
        num_warps=8 if exact else 4,
        num_stages=2 if exact else 3,
    )
    if num_splits > 1:
        _merge_kernel[(num_tokens, heads)](
            part_acc,
            part_top,
            part_total,
            out,
            num_splits,
            HEADS=heads,
            DIM=dim,
            BLOCK_D=block_d,
            BLOCK_S=num_splits,
            num_warps=4,
        )
    return out


_APPEND_TILE, _INDEX_TILE = 8, 1024


def append_to_pages(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    cu_seqlen: torch.Tensor,
    cu_num_pages: torch.Tensor,
    seq_len_with_cache: torch.Tensor,
    cache_loc: torch.Tensor,
    indices: torch.Tensor,
    *,
    num_rows: int,
    num_tokens: int,
) -> None:
    """Append k and v to a paged cache, and copy the page numbers in use with every one in range; one launch.

    Args:
        k: [batch, sequence, kv_heads, dim]; the batch's tokens in order when flattened. Any strides but the last.
        v: Likewise.
        kv_cache: [pages, 2, kv_heads, page_size, dim], written in place.
        cu_seqlen: int32 [>= num_rows + 1], as in the module's docstring, like the next three.
        cu_num_pages: int32 [>= num_rows + 1].
        seq_len_with_cache: int32 [>= num_rows].
        cache_loc: int32 [entries].
        indices: int32 [entries]; its first `cu_num_pages[num_rows]` elements are written.
        num_rows: rows of the batch.
        num_tokens: tokens of the batch.
    """
    if num_tokens == 0:
        return
    k, v = _unit_stride(k), _unit_stride(v)
    seq, kv_heads, dim = k.shape[1:]
    tiles = num_tokens // _APPEND_TILE + num_rows
    entries = cache_loc.shape[0]
    _append_kernel[(tiles + triton.cdiv(entries, _INDEX_TILE), kv_heads)](
        k,
        v,
        kv_cache,
        cu_seqlen,
        cu_num_pages,
        seq_len_with_cache,
        cache_loc,
        indices,
        *k.stride()[:3],
        *v.stride()[:3],
        *kv_cache.stride()[:4],
        seq,
        num_rows,
        num_tokens,
        kv_cache.shape[0],
        entries,
        tiles,
        DIM=dim,
        BLOCK_D=max(_power_of_two(dim), 16),
        PAGE=kv_cache.shape[3],
        TILE=_APPEND_TILE,
        INDEX_TILE=_INDEX_TILE,
        num_warps=4,
    )
