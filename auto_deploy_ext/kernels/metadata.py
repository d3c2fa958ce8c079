"""Triton kernels of metadata: a run of mutations in one launch, and the gathering of tokens.

Importing this module needs Triton; `auto_deploy_ext.kernels` says so where it is missing. The reference of everything
here is `auto_deploy_ext.runtime.metadata_arithmetic`.

A launch of `mutate_metadata` has one program for what belongs to all pools (tokens, positions) and one per pool (its
page table); within a program the parts of the run follow one another, with barriers between them, so that a part finds
what those before it wrote. The kernel is given addresses, in a table on the device that is made once: its arguments
are integers, of which Triton specialises none.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

# The table's layout, in elements of int64; see `fused_launch.AddressTable`.
INPUT_IDS = tl.constexpr(0)
POSITION_IDS = tl.constexpr(1)
INPUT_POS = tl.constexpr(2)
CU_SEQLEN = tl.constexpr(3)
SEQ_LEN = tl.constexpr(4)
USE_INITIAL_STATES = tl.constexpr(5)
#: where the first pool begins, how many elements each has, and what they are.
POOLS = tl.constexpr(8)
PER_POOL = tl.constexpr(8)
CACHE_LOC = tl.constexpr(0)
CU_NUM_PAGES = tl.constexpr(1)
LAST_PAGE_LEN = tl.constexpr(2)
EXTRA_PAGE = tl.constexpr(3)
WITH_CACHE = tl.constexpr(4)
SCRATCH = tl.constexpr(5)
CAPACITY = tl.constexpr(6)

# A part's code: what it does, then the kinds of the elements that it reads and writes, as digits to the base 4.
SWITCH = tl.constexpr(1)
OFFSET = tl.constexpr(2)
COPY = tl.constexpr(3)


@triton.jit
def _owner(boundaries, removed, index, valid, rows, SHIFTED: tl.constexpr, STEPS: tl.constexpr):
    """The first row whose end lies behind each index, by bisection; `rows` where there is none.

    A row's end is `boundaries[row + 1]`, less `removed[row + 1]` if SHIFTED.
    """
    low = tl.zeros_like(index)
    high = low + rows
    for _ in range(STEPS):
        middle = (low + high) // 2
        open = valid & (low < high)
        end = tl.load(boundaries + 1 + middle, mask=open, other=0)
        if SHIFTED:
            end -= tl.load(removed + 1 + middle, mask=open, other=0)
        behind = open & (end <= index)
        high = tl.where(open & (end > index), middle, high)
        low = tl.where(behind, middle + 1, low)
    return low


@triton.jit
def _load(address, at, mask, KIND: tl.constexpr):
    """Elements of memory of that kind: 0 int32, 1 int64, 2 bool."""
    if KIND == 0:
        value = tl.load(address.to(tl.pointer_type(tl.int32)) + at, mask=mask, other=0)
    elif KIND == 1:
        value = tl.load(address.to(tl.pointer_type(tl.int64)) + at, mask=mask, other=0)
    else:
        value = tl.load(address.to(tl.pointer_type(tl.int8)) + at, mask=mask, other=0)
    return value


@triton.jit
def _switch(table, rows, capacity, ROWS: tl.constexpr):
    """Reduce each row to its last token; see `metadata_arithmetic.generate_batch`."""
    input_ids = tl.load(table + INPUT_IDS).to(tl.pointer_type(tl.int32))
    position_ids = tl.load(table + POSITION_IDS).to(tl.pointer_type(tl.int64))
    input_pos = tl.load(table + INPUT_POS).to(tl.pointer_type(tl.int32))
    cu_seqlen = tl.load(table + CU_SEQLEN).to(tl.pointer_type(tl.int32))
    seq_len = tl.load(table + SEQ_LEN).to(tl.pointer_type(tl.int32))
    use_initial_states = tl.load(table + USE_INITIAL_STATES).to(tl.pointer_type(tl.int8))
    row = tl.arange(0, ROWS)
    valid = row < rows
    last = tl.load(cu_seqlen + 1 + row, mask=valid, other=1) - 1
    last = tl.minimum(tl.maximum(last, 0), capacity - 1)
    token = tl.load(input_ids + last, mask=valid, other=0)
    position = tl.load(input_pos + row, mask=valid, other=0) + tl.load(seq_len + row, mask=valid, other=0) - 1
    tl.debug_barrier()  # tokens and boundaries are read by other threads than those that replace them
    tl.store(input_ids + row, token, mask=valid)
    tl.store(input_pos + row, position, mask=valid)
    tl.store(position_ids + row, position.to(tl.int64), mask=valid)
    tl.store(use_initial_states + row, (position > 0).to(tl.int8), mask=valid)
    tl.store(seq_len + row, tl.full([ROWS], 1, tl.int32), mask=valid)
    tl.store(cu_seqlen + row, row, mask=row <= rows)


@triton.jit
def _copy(source, target, count, CODE: tl.constexpr, CHUNK: tl.constexpr):
    """Store `count` elements, converted to the target's kind."""
    KIND: tl.constexpr = CODE // 4 % 4
    TARGET: tl.constexpr = CODE // 16
    for start in range(0, count, CHUNK):
        at = start + tl.arange(0, CHUNK)
        valid = at < count
        value = _load(source, at, valid, KIND)
        if TARGET == 0:
            tl.store(target.to(tl.pointer_type(tl.int32)) + at, value.to(tl.int32), mask=valid)
        elif TARGET == 1:
            tl.store(target.to(tl.pointer_type(tl.int64)) + at, value.to(tl.int64), mask=valid)
        else:
            tl.store(target.to(tl.pointer_type(tl.int8)) + at, (value != 0).to(tl.int8), mask=valid)


@triton.jit
def _offset_positions(
    table, rows, offset, tokens, KIND: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr
):
    """Move every row's positions by its offset; there are `tokens` tokens."""
    position_ids = tl.load(table + POSITION_IDS).to(tl.pointer_type(tl.int64))
    input_pos = tl.load(table + INPUT_POS).to(tl.pointer_type(tl.int32))
    cu_seqlen = tl.load(table + CU_SEQLEN).to(tl.pointer_type(tl.int32))
    use_initial_states = tl.load(table + USE_INITIAL_STATES).to(tl.pointer_type(tl.int8))
    row = tl.arange(0, ROWS)
    valid = row < rows
    change = _load(offset, row, valid, KIND).to(tl.int32)
    position = tl.load(input_pos + row, mask=valid, other=0) + change
    tl.store(input_pos + row, position, mask=valid)
    tl.store(use_initial_states + row, (position > 0).to(tl.int8), mask=valid)
    if tokens == rows:
        old = tl.load(position_ids + row, mask=valid, other=0)
        tl.store(position_ids + row, old + change.to(tl.int64), mask=valid)
    else:
        for start in range(0, tokens, CHUNK):
            token = start + tl.arange(0, CHUNK)
            present = token < tokens
            owner = _owner(cu_seqlen, cu_seqlen, token, present, rows, False, STEPS)
            owner = tl.minimum(owner, rows - 1)
            of_token = _load(offset, owner, present, KIND).to(tl.int32)
            old = tl.load(position_ids + token, mask=present, other=0)
            tl.store(position_ids + token, old + of_token.to(tl.int64), mask=present)


@triton.jit
def _offset_pages(
    pool,
    rows,
    offset,
    adjusts_pages,
    KIND: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Move the end of every row in a pool by its offset; see `metadata_arithmetic.offset_page_table`.

    The table is changed in place. First pages that are dropped are closed up, which moves the rest towards the front,
    chunk by chunk from there; then room is made for those that are inserted, from the end. Either begins at the first
    row that it concerns, so that nothing moves as long as no row crosses a page.

    Args:
        pool: where the pool's part of the table of addresses begins.
        rows: n.
        offset: address of the offsets, `[n]`.
        adjusts_pages: 0 where nobody uses the page table.
        KIND: of the offsets.
        TOKENS_PER_BLOCK: tokens in a page.
        ROWS: a power of two above n.
        CHUNK: slots of the table that move together.
        STEPS: of a bisection among the rows.
    """
    with_cache = tl.load(pool + WITH_CACHE).to(tl.pointer_type(tl.int32))
    row = tl.arange(0, ROWS)
    valid = row < rows
    change = _load(offset, row, valid, KIND).to(tl.int32)
    old_length = tl.load(with_cache + row, mask=valid, other=0)
    tl.store(with_cache + row, old_length + change, mask=valid)
    if adjusts_pages != 0:
        cache_loc = tl.load(pool + CACHE_LOC).to(tl.pointer_type(tl.int32))
        boundaries = tl.load(pool + CU_NUM_PAGES).to(tl.pointer_type(tl.int32))
        last_page_len = tl.load(pool + LAST_PAGE_LEN).to(tl.pointer_type(tl.int32))
        extra_page = tl.load(pool + EXTRA_PAGE).to(tl.pointer_type(tl.int32))
        removed = tl.load(pool + SCRATCH).to(tl.pointer_type(tl.int32))
        inserted = removed + ROWS
        capacity = tl.load(pool + CAPACITY).to(tl.int32)

        moved = tl.load(last_page_len + row, mask=valid, other=1) + change
        grows = valid & (moved > TOKENS_PER_BLOCK)
        shrinks = valid & (moved < 1)
        grown = grows.to(tl.int32)
        shrunk = shrinks.to(tl.int32)
        tl.store(last_page_len + row, moved - (grown - shrunk) * TOKENS_PER_BLOCK, mask=valid)
        # How many pages are dropped and inserted in the rows before each, the row behind the last included.
        removed_before = tl.cumsum(shrunk, 0) - shrunk
        inserted_before = tl.cumsum(grown, 0) - grown
        first = tl.load(boundaries + row, mask=row <= rows, other=0)
        following = tl.load(boundaries + 1 + row, mask=valid, other=0)
        num_pages = tl.load(boundaries + rows)
        dropped = tl.sum(shrunk, 0)
        added = tl.sum(grown, 0)
        if dropped + added > 0:
            tl.store(removed + row, removed_before, mask=row <= rows)
            tl.store(inserted + row, inserted_before, mask=row <= rows)
            tl.debug_barrier()
            if dropped > 0:
                begin = tl.min(tl.where(shrinks, following - 1, num_pages), 0)
                for start in range(begin, num_pages, CHUNK):
                    slot = start + tl.arange(0, CHUNK)
                    present = slot < num_pages
                    owner = _owner(boundaries, removed, slot, present, rows, False, STEPS)
                    before = tl.load(removed + owner, mask=present, other=0)
                    after = tl.load(removed + 1 + owner, mask=present & (owner < rows), other=0)
                    end = tl.load(boundaries + 1 + owner, mask=present & (owner < rows), other=0)
                    kept = present & ((after == before) | (slot + 1 < end))
                    page = tl.load(cache_loc + slot, mask=kept, other=0)
                    tl.debug_barrier()
                    tl.store(cache_loc + slot - before, page, mask=kept)
                tl.debug_barrier()
            if added > 0:
                remaining = num_pages - dropped
                begin = tl.min(tl.where(grows, following - removed_before - shrunk, remaining), 0)
                chunks = (remaining - begin + CHUNK - 1) // CHUNK
                for index in range(0, chunks):
                    slot = begin + (chunks - 1 - index) * CHUNK + tl.arange(0, CHUNK)
                    present = slot < remaining
                    owner = _owner(boundaries, removed, slot, present, rows, True, STEPS)
                    page = tl.load(cache_loc + slot, mask=present, other=0)
                    target = slot + tl.load(inserted + owner, mask=present, other=0)
                    tl.debug_barrier()
                    tl.store(cache_loc + target, page, mask=present & (target < capacity))
                tl.debug_barrier()
                target = following - removed_before - shrunk + inserted_before
                page = tl.load(extra_page + row, mask=valid, other=0)
                tl.store(cache_loc + target, page, mask=grows & (target < capacity))
            tl.debug_barrier()
            tl.store(boundaries + row, first - removed_before + inserted_before, mask=row <= rows)


@triton.jit
def _part(
    table,
    rows,
    page_mask,
    source,
    target,
    count,
    CODE: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """What one program does for one part."""
    program = tl.program_id(0)
    if CODE % 4 == SWITCH:
        if program == 0:
            _switch(table, rows, count, ROWS)
    elif CODE % 4 == COPY:
        if program == 0:
            _copy(source, target, count, CODE, CHUNK)
    elif CODE % 4 == OFFSET:
        if program == 0:
            _offset_positions(table, rows, source, count, CODE // 4 % 4, ROWS, CHUNK, STEPS)
        else:
            pool = table + POOLS + (program - 1) * PER_POOL
            adjusts_pages = (page_mask >> (program - 1)) & 1
            _offset_pages(pool, rows, source, adjusts_pages, CODE // 4 % 4, TOKENS_PER_BLOCK, ROWS, CHUNK, STEPS)
    if CODE != 0:
        tl.debug_barrier()


_INTEGERS = ["table", "rows", "page_mask", *(f"{name}_{i}" for i in range(4) for name in ("source", "target", "count"))]


@triton.jit(do_not_specialize=_INTEGERS)
def mutate_metadata(
    table: tl.int64,
    rows: tl.int32,
    page_mask: tl.int32,
    source_0: tl.int64,
    target_0: tl.int64,
    count_0: tl.int32,
    source_1: tl.int64,
    target_1: tl.int64,
    count_1: tl.int32,
    source_2: tl.int64,
    target_2: tl.int64,
    count_2: tl.int32,
    source_3: tl.int64,
    target_3: tl.int64,
    count_3: tl.int32,
    CODE_0: tl.constexpr,
    CODE_1: tl.constexpr,
    CODE_2: tl.constexpr,
    CODE_3: tl.constexpr,
    TOKENS_PER_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Run up to four parts, one after the other; one program for all pools together and one for each.

    Args:
        table: address of the table of addresses.
        rows: n.
        page_mask: bit i: pool i's page table is in use.
        source_0: address of what the first part reads: the offsets, or what is copied.
        target_0: address of what it writes, if it copies.
        count_0: elements copied; tokens, if it offsets; the capacity of `input_ids`, if it switches.
        source_1: likewise for the second part, and so on.
        CODE_0: what the first part does, 0 where there is none; see above.
        TOKENS_PER_BLOCK: tokens in a page.
        ROWS: a power of two above n.
        CHUNK: elements that one step of a loop takes.
        STEPS: of a bisection among ROWS.
    """
    addresses = table.to(tl.pointer_type(tl.int64))
    _part(addresses, rows, page_mask, source_0, target_0, count_0, CODE_0, TOKENS_PER_BLOCK, ROWS, CHUNK, STEPS)
    _part(addresses, rows, page_mask, source_1, target_1, count_1, CODE_1, TOKENS_PER_BLOCK, ROWS, CHUNK, STEPS)
    _part(addresses, rows, page_mask, source_2, target_2, count_2, CODE_2, TOKENS_PER_BLOCK, ROWS, CHUNK, STEPS)
    _part(addresses, rows, page_mask, source_3, target_3, count_3, CODE_3, TOKENS_PER_BLOCK, ROWS, CHUNK, STEPS)


@triton.jit
def gather_rows(source, index, target, width, source_stride, CHUNK: tl.constexpr):
    """`target[i] = source[index[i]]`; a program per row and chunk of columns. `index` is int32 or int64."""
    row = tl.program_id(0)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    valid = column < width
    taken = tl.load(index + row).to(tl.int64)
    value = tl.load(source + taken * source_stride + column, mask=valid)
    tl.store(target + row.to(tl.int64) * width + column, value, mask=valid)
