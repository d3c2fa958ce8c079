"""The arithmetic of metadata mutations, against values by hand and a plain list-of-lists model."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_deploy_ext.runtime import metadata_arithmetic as arithmetic


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_generate_batch_keeps_each_sequences_last_token(device: torch.device) -> None:
    batch = arithmetic.generate_batch(
        input_ids=i32(10, 11, 12, 20, 30, 31, 99).to(device),
        input_pos=i32(0, 7, 4).to(device),
        cu_seqlen=i32(0, 3, 4, 6).to(device),
        seq_len=i32(3, 1, 2).to(device),
    )
    assert batch.input_ids.tolist() == [12, 20, 31]
    assert batch.input_pos.tolist() == [2, 7, 5]
    assert batch.cu_seqlen.tolist() == [0, 1, 2, 3]
    assert batch.seq_len.tolist() == [1, 1, 1]
    assert batch.position_ids.tolist() == [2, 7, 5] and batch.position_ids.dtype == torch.int64
    assert batch.use_initial_states.tolist() == [True, True, True] and batch.use_initial_states.dtype == torch.bool


def test_a_first_token_has_no_initial_state() -> None:
    batch = arithmetic.generate_batch(i32(5), i32(0), i32(0, 1), i32(1))
    assert batch.use_initial_states.tolist() == [False]


def test_tokens_belong_to_the_sequence_that_they_lie_in(device: torch.device) -> None:
    assert arithmetic.sequence_of_token(i32(0, 2, 3, 6).to(device), 6).tolist() == [0, 0, 1, 2, 2, 2]


def test_offset_per_token_repeats_a_sequences_offset(device: torch.device) -> None:
    offset = i32(5, -1).to(device)
    assert arithmetic.offset_per_token(offset, i32(0, 3, 4).to(device), 4).tolist() == [5, 5, 5, -1]
    assert arithmetic.offset_per_token(offset, i32(0, 1, 2).to(device), 2).tolist() == [5, -1]


def test_page_is_inserted_where_the_last_page_overflows(device: torch.device) -> None:
    table = arithmetic.offset_page_table(
        cache_loc=i32(1, 2, 3, 0, 0).to(device),
        cu_num_pages=i32(0, 2, 3).to(device),
        last_page_len=i32(4, 2).to(device),
        extra_page_per_seq=i32(8, 9).to(device),
        offset=i32(1, 2).to(device),
        tokens_per_block=4,
    )
    assert table.cache_loc[:4].tolist() == [1, 2, 8, 3]
    assert table.cu_num_pages.tolist() == [0, 3, 4]
    assert table.last_page_len.tolist() == [1, 4]


def test_page_is_dropped_where_the_last_page_empties(device: torch.device) -> None:
    table = arithmetic.offset_page_table(
        cache_loc=i32(1, 2, 3, 4).to(device),
        cu_num_pages=i32(0, 2, 4).to(device),
        last_page_len=i32(1, 2).to(device),
        extra_page_per_seq=i32(8, 9).to(device),
        offset=i32(-1, -4).to(device),
        tokens_per_block=4,
    )
    assert table.cu_num_pages.tolist() == [0, 1, 2]
    assert table.cache_loc[:2].tolist() == [1, 3]
    assert table.last_page_len.tolist() == [4, 2]


def test_missing_extra_page_is_counted_all_the_same() -> None:
    table = arithmetic.offset_page_table(i32(6, 0), i32(0, 1), i32(2), i32(-1), i32(1), tokens_per_block=2)
    assert table.cache_loc.tolist() == [6, -1]
    assert table.cu_num_pages.tolist() == [0, 2]
    assert table.last_page_len.tolist() == [1]


def test_overlap_offset_looks_up_the_rows_after_the_prefills(device: torch.device) -> None:
    new_lens = i32(1, 4, 2).to(device)
    slots = torch.tensor([1, 2], device=device)
    assert arithmetic.overlap_offset(new_lens, slots, num_prefill=1, num_sequences=4).tolist() == [0, 3, 1, 0]


@st.composite
def page_moves(draw: st.DrawFn) -> tuple[int, list[tuple[list[int], int, int, list[int]]]]:
    """Return (tokens per block, sequences of (pages, last page length, extra page, offsets))."""
    block = draw(st.integers(1, 6))
    steps = draw(st.integers(1, 4))
    sequences = []
    for row in range(draw(st.integers(1, 5))):
        pages = [100 * row + i for i in range(draw(st.integers(1 + steps, 4 + steps)))]
        last = draw(st.integers(1, block))
        offsets = draw(st.lists(st.integers(-block, block), min_size=steps, max_size=steps))
        sequences.append((pages, last, draw(st.sampled_from([-1, 900 + row])), offsets))
    return block, sequences


@settings(deadline=None, max_examples=200)
@given(page_moves())
def test_page_tables_move_as_lists_of_pages_do(case: tuple[int, list[tuple[list[int], int, int, list[int]]]]) -> None:
    block, sequences = case
    pages = [list(sequence[0]) for sequence in sequences]
    last = [sequence[1] for sequence in sequences]
    extra = [sequence[2] for sequence in sequences]
    steps = len(sequences[0][3])

    def ragged(rows: list[list[int]]) -> tuple[list[int], list[int]]:
        boundaries = [0]
        for row in rows:
            boundaries.append(boundaries[-1] + len(row))
        return [page for row in rows for page in row], boundaries

    flat, boundaries = ragged(pages)
    cache_loc = torch.tensor(flat + [-7] * (len(pages) * steps), dtype=torch.int32)
    table = arithmetic.PageTable(cache_loc, i32(*boundaries), i32(*last))
    for step in range(steps):
        offsets = [sequence[3][step] for sequence in sequences]
        table = arithmetic.offset_page_table(*table, i32(*extra), i32(*offsets), block)
        for row, offset in enumerate(offsets):
            last[row] += offset
            if last[row] > block:
                pages[row].append(extra[row])
                last[row] -= block
            elif last[row] < 1:
                pages[row].pop()
                last[row] += block
        flat, boundaries = ragged(pages)
        assert table.cu_num_pages.tolist() == boundaries
        assert table.cache_loc[: len(flat)].tolist() == flat
        assert table.last_page_len.tolist() == last
