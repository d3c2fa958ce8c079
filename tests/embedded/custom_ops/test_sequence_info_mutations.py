"""SequenceInfo: copy_, switch_to_generate_, offset_pos_and_cache_, and the mirrors that they bring up to date."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_deploy_ext.embedded.custom_ops.attention_interface import OFFSET_WRITES, SWITCH_WRITES, SequenceInfo
from auto_deploy_ext.runtime.mirrors import record_mirrors

BLOCK = 4


@pytest.fixture
def info(device: torch.device) -> SequenceInfo:
    info = SequenceInfo(max_seq_len=32, max_batch_size=4, max_num_tokens=24, tokens_per_block=BLOCK).to(device)
    info.activate_arg("cache_loc")
    return info


#: name -> (lengths, cached tokens, BatchInfo's six counts)
LAYOUTS = {
    "prefill": ([3, 5], [0, 0], [2, 8, 0, 0, 0, 0]),
    "extend": ([3, 3], [5, 6], [0, 0, 2, 6, 0, 0]),
    "decode": ([1, 1], [2, 8], [0, 0, 0, 0, 2, 2]),
    "mixed": ([3, 3, 1], [0, 6, 7], [1, 3, 1, 3, 1, 1]),
}


def nest(info: SequenceInfo, layout: str, **kwargs: Any) -> None:
    """Nest a layout: tokens 10, 11, .. and, where pages are not given, pages 100, 101, .., 200, .. per sequence."""
    lengths, cached, counts = LAYOUTS[layout]
    tokens = iter(range(10, 10 + sum(lengths)))
    pages = [
        [100 * (row + 1) + i for i in range(-(-(start + length) // BLOCK))]
        for row, (start, length) in enumerate(zip(cached, lengths, strict=True))
    ]
    arguments: dict[str, Any] = {
        "cache_loc_per_pool": [[page for row in pages for page in row]],
        "cu_num_pages_per_pool": [[0, *torch.tensor([len(row) for row in pages]).cumsum(0).tolist()]],
        "extra_page_per_seq_per_pool": [[901, 902, 903][: len(lengths)]],
    }
    info.set_example_sequence(
        [[next(tokens) for _ in range(length)] for length in lengths],
        input_pos=cached,
        batch_info=counts,
        **(arguments | kwargs),
    )


def value(info: SequenceInfo, name: str) -> list[Any]:
    return info.get_arg(name, truncate=True, unflatten=False).tolist()


def pages(info: SequenceInfo, suffix: str = "") -> list[list[int]]:
    n = info.num_sequences
    boundaries = info.get_arg("cu_num_pages" + suffix)[: n + 1].tolist()
    loc = info.get_arg("cache_loc" + suffix).tolist()
    return [loc[start:end] for start, end in itertools.pairwise(boundaries)]


def offset(info: SequenceInfo, *values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=info.device)


# switch_to_generate_


@pytest.mark.parametrize(
    ("layout", "input_ids", "input_pos"),
    [
        ("prefill", [12, 17], [2, 4]),
        ("extend", [12, 15], [7, 8]),
        ("mixed", [12, 15, 16], [2, 8, 7]),
    ],
)
def test_switch_keeps_each_sequences_last_token(
    info: SequenceInfo, layout: str, input_ids: list[int], input_pos: list[int]
) -> None:
    nest(info, layout)
    n = len(input_ids)
    pages_before, lengths_before = pages(info), value(info, "seq_len_with_cache")
    info.switch_to_generate_()
    assert info.is_generate_only and info.batch_info.get_num_sequences() == (0, 0, n)
    assert (info.batch_info.get_num_tokens_to_gather(), info.batch_info.is_gather_required()) == (n, False)
    assert value(info, "input_ids") == input_ids
    assert info.get_arg("input_ids").shape == info.get_arg("position_ids").shape == (n, 1)
    assert value(info, "input_pos") == value(info, "position_ids") == input_pos
    assert value(info, "cu_seqlen") == list(range(n + 1))
    assert value(info, "seq_len") == [1] * n
    assert value(info, "use_initial_states") == [True] * n
    assert (pages(info), value(info, "seq_len_with_cache")) == (pages_before, lengths_before)


def test_switch_of_a_first_token_has_no_initial_state(info: SequenceInfo) -> None:
    info.set_example_sequence([[7], [8, 9]])
    info.switch_to_generate_()
    assert value(info, "use_initial_states") == [False, True]


def test_switch_of_a_generate_only_batch_does_nothing(info: SequenceInfo) -> None:
    info.activate_arg("cu_seqlen_host")
    nest(info, "decode")
    info.batch_info.update_tokens_gather_info(1, True)
    versions = dict(info._input_buffer.device_version)
    with record_mirrors(info) as transfers:
        info.switch_to_generate_()
    assert transfers == []
    assert info._input_buffer.device_version == versions
    assert info.batch_info.is_gather_required()


# offset_pos_and_cache_


@pytest.mark.parametrize(
    ("layout", "offsets", "input_pos", "position_ids", "with_cache", "last_page_len"),
    [
        ("prefill", (1, 2), [1, 2], [1, 2, 3, 2, 3, 4, 5, 6], [4, 7], [4, 3]),
        ("extend", (-1, 0), [4, 6], [4, 5, 6, 6, 7, 8], [7, 9], [3, 1]),
        ("decode", (1, 3), [3, 11], [3, 11], [4, 12], [4, 4]),
        ("mixed", (1, -2, 0), [1, 4, 7], [1, 2, 3, 4, 5, 6, 7], [4, 7, 8], [4, 3, 4]),
    ],
)
def test_offset_moves_every_length(
    info: SequenceInfo,
    layout: str,
    offsets: tuple[int, ...],
    input_pos: list[int],
    position_ids: list[int],
    with_cache: list[int],
    last_page_len: list[int],
) -> None:
    nest(info, layout)
    untouched = {name: value(info, name) for name in ("input_ids", "cu_seqlen", "seq_len", "slot_idx", "prompt_lens")}
    info.offset_pos_and_cache_(offset(info, *offsets))
    assert value(info, "input_pos") == input_pos
    assert value(info, "position_ids") == position_ids
    assert value(info, "seq_len_with_cache") == with_cache
    assert value(info, "last_page_len") == last_page_len
    assert value(info, "use_initial_states") == [pos > 0 for pos in input_pos]
    assert {name: value(info, name) for name in untouched} == untouched


def test_offset_crosses_pages_both_ways(info: SequenceInfo) -> None:
    nest(info, "mixed")  # 3 of 4, 9 = 1 of 4, 8 = 4 of 4 tokens in the last page
    assert pages(info) == [[100], [200, 201, 202], [300, 301]]
    info.offset_pos_and_cache_(offset(info, 2, -1, 1))
    assert pages(info) == [[100, 901], [200, 201], [300, 301, 903]]
    assert value(info, "last_page_len") == [1, 4, 1]
    info.offset_pos_and_cache_(offset(info, -1, 1, -4))
    assert pages(info) == [[100], [200, 201, 902], [300, 301]]
    assert value(info, "last_page_len") == [4, 1, 1]


def test_missing_extra_page_is_counted(info: SequenceInfo) -> None:
    nest(info, "decode", extra_page_per_seq_per_pool=[[-1, -1]])
    info.offset_pos_and_cache_(offset(info, 0, 4))
    assert pages(info) == [[100], [200, 201, 202, -1]]


def test_cache_loc_is_said_to_grow_by_one_page_per_sequence(info: SequenceInfo) -> None:
    nest(info, "decode")
    before = info._input_buffer.get_current_length("cache_loc")
    info.offset_pos_and_cache_(offset(info, 0, 0))
    assert info._input_buffer.get_current_length("cache_loc") == before + 2
    for _ in range(20):
        info.offset_pos_and_cache_(offset(info, 0, 0))
    assert info._input_buffer.get_current_length("cache_loc") == info._input_buffer.get_capacity("cache_loc")
    assert pages(info) == [[100], [200, 201, 202]]


@pytest.mark.parametrize("name", ["cache_loc", "cu_num_pages_host", "last_page_len", "last_page_len_host"])
def test_pages_move_only_if_somebody_reads_them(device: torch.device, name: str) -> None:
    info = SequenceInfo(max_seq_len=32, max_batch_size=4, max_num_tokens=24, tokens_per_block=BLOCK).to(device)
    nest(info, "decode")
    info.offset_pos_and_cache_(offset(info, 2, 4))
    assert value(info, "last_page_len") == [3, 1]
    assert pages(info) == [[100], [200, 201, 202]]
    assert "last_page_len" not in info._input_buffer.stale_names()
    assert value(info, "seq_len_with_cache") == [5, 13]
    info.activate_arg(name)
    nest(info, "decode")
    info.offset_pos_and_cache_(offset(info, 2, 4))
    assert value(info, "last_page_len") == [1, 1]
    assert pages(info) == [[100, 901], [200, 201, 202, 902]]


def test_each_active_pool_moves_by_its_own_pages(info: SequenceInfo) -> None:
    info.register_window_groups([32, 8, 8])
    info.activate_arg("cache_loc_g1")
    nest(
        info,
        "decode",
        cache_loc_per_pool=[[100, 200, 201, 202], [50, 60, 61], [70, 80]],
        cu_num_pages_per_pool=[[0, 1, 4], [0, 1, 3], [0, 1, 2]],
        extra_page_per_seq_per_pool=[[901, 902], [951, 952], [971, 972]],
        seq_len_with_cache_per_pool=[[3, 9], [4, 5], [4, 4]],
    )
    info.offset_pos_and_cache_(offset(info, 1, -1))
    assert pages(info) == [[100], [200, 201]]
    assert pages(info, "_g1") == [[50, 951], [60]]
    assert value(info, "last_page_len_g1") == [1, 4]
    assert value(info, "seq_len_with_cache_g1") == [5, 4]
    assert pages(info, "_g2") == [[70], [80]], "pool 2 is not active"
    assert value(info, "last_page_len_g2") == [4, 4]
    assert value(info, "seq_len_with_cache_g2") == [5, 3]


def test_offset_needs_one_value_per_sequence(info: SequenceInfo) -> None:
    nest(info, "decode")
    with pytest.raises(ValueError, match="one offset for each of 2 sequences, got 3"):
        info.offset_pos_and_cache_(offset(info, 1, 1, 1))


@pytest.mark.parametrize(
    ("wrong", "named"), [(torch.full((2,), 1.7), "torch.float32"), (1, "int"), ([1, 1], "list"), (None, "NoneType")]
)
def test_an_offset_is_a_tensor_of_integers(info: SequenceInfo, wrong: Any, named: str) -> None:
    nest(info, "decode")
    before = {name: value(info, name) for name in info._input_buffer.tensor_names}
    with pytest.raises(TypeError, match=f"a tensor of integers, one for each sequence, got {named}"):
        info.offset_pos_and_cache_(wrong)
    assert {name: value(info, name) for name in before} == before


# Overrides.

Mutate = Any
MUTATIONS = {
    "switch_to_generate_": lambda info, **kw: info.switch_to_generate_(**kw),
    "offset_pos_and_cache_": lambda info, **kw: info.offset_pos_and_cache_(offset(info, 1, 1), **kw),
}


@pytest.fixture(params=sorted(MUTATIONS))
def trigger(request: pytest.FixtureRequest) -> str:
    return request.param


def activate(info: SequenceInfo, *names: str) -> None:
    for name in names:
        info.activate_arg(name)
    nest(info, "extend")


def test_unnarrowed_call_mirrors_everything_if_a_written_twin_is_active(info: SequenceInfo, trigger: str) -> None:
    activate(info, "position_ids_host")
    with record_mirrors(info) as transfers:
        MUTATIONS[trigger](info)
    (transfer,) = transfers
    assert transfer.names == tuple(sorted(name + "_host" for name in info._input_buffer.tensor_names))
    assert (transfer.waited, transfer.trigger) == (True, trigger)
    assert info._input_buffer.stale_names() == []
    for name in info._input_buffer.tensor_names:
        assert value(info, name) == value(info, name + "_host")


@pytest.mark.parametrize("name", [None, "slot_idx_host", "token_gather_indices_host", "batch_info_host"])
def test_unnarrowed_call_mirrors_nothing_otherwise(info: SequenceInfo, trigger: str, name: str | None) -> None:
    activate(info, *([name] if name else []))
    with record_mirrors(info) as transfers:
        MUTATIONS[trigger](info)
    assert transfers == []


def test_twins_out_of_a_mutations_scope_do_not_make_it_mirror(info: SequenceInfo) -> None:
    activate(info, "cu_seqlen_host", "seq_len_host", "input_ids_host")
    with record_mirrors(info) as transfers:
        info.offset_pos_and_cache_(offset(info, 1, 1))
    assert transfers == []
    activate(info, "cu_num_pages_host", "last_page_len_host", "cache_loc_host", "seq_len_with_cache_host")
    info._active_args = tuple(name for name in info._active_args if name.removesuffix("_host") not in SWITCH_WRITES)
    with record_mirrors(info) as transfers:
        info.switch_to_generate_()
    assert transfers == []


@pytest.mark.parametrize("call", sorted(MUTATIONS))
def test_every_written_twin_makes_an_unnarrowed_call_mirror(device: torch.device, call: str) -> None:
    for name in {"switch_to_generate_": SWITCH_WRITES, "offset_pos_and_cache_": OFFSET_WRITES}[call]:
        info = SequenceInfo(32, 4, 24, BLOCK).to(device)
        activate(info, name + "_host")
        with record_mirrors(info) as transfers:
            MUTATIONS[call](info)
        assert len(transfers) == 1, name


def test_pool_twins_are_mirrored_too(info: SequenceInfo) -> None:
    info.register_window_groups([32, 8])
    activate(info, "seq_len_with_cache_g1_host")
    with record_mirrors(info) as transfers:
        info.offset_pos_and_cache_(offset(info, 1, 1))
    assert len(transfers) == 1
    assert value(info, "seq_len_with_cache_g1_host") == value(info, "seq_len_with_cache_g1") == [9, 10]
    with record_mirrors(info) as transfers:
        info.offset_pos_and_cache_(offset(info, 1, 1), active_args_override={"seq_len_with_cache_g1_host"})
    assert transfers[0].names == ("seq_len_with_cache_g1_host",)
    assert value(info, "seq_len_with_cache_g1_host") == [10, 11]


def test_host_prepare_arguments_count_as_active(info: SequenceInfo, trigger: str) -> None:
    info.register_host_prepare_for_attention_forward(lambda input_pos_host: None, ["input_pos_host"])
    nest(info, "extend")
    with record_mirrors(info) as transfers:
        MUTATIONS[trigger](info)
    assert len(transfers) == 1
    nest(info, "extend")
    with record_mirrors(info) as transfers:
        MUTATIONS[trigger](info, active_args_override={"input_pos_host"})
    assert [transfer.names for transfer in transfers] == [("input_pos_host",)]


def test_narrowed_call_mirrors_exactly_what_it_writes_among_the_named(info: SequenceInfo, trigger: str) -> None:
    activate(info, "input_pos_host", "position_ids_host", "cu_seqlen_host", "last_page_len_host", "slot_idx_host")
    override = {"input_ids", "input_pos_host", "cu_seqlen_host", "last_page_len_host", "slot_idx_host"}
    with record_mirrors(info) as transfers:
        MUTATIONS[trigger](info, active_args_override=override)
    second = {"switch_to_generate_": "cu_seqlen_host", "offset_pos_and_cache_": "last_page_len_host"}[trigger]
    (transfer,) = transfers
    assert transfer.names == tuple(sorted(("input_pos_host", second)))
    moved = [info.get_arg(name, truncate=True) for name in transfer.names]
    assert transfer.nbytes == sum(mirror.nbytes for mirror in moved)
    for name in transfer.names:
        assert value(info, name) == value(info, name.removesuffix("_host"))
    assert "position_ids" in info._input_buffer.stale_names()


@pytest.mark.parametrize("override", [set(), {"input_ids"}, {"slot_idx_host"}])
def test_narrowed_call_out_of_scope_mirrors_nothing(info: SequenceInfo, trigger: str, override: set[str]) -> None:
    activate(info, "input_pos_host", "slot_idx_host")
    with record_mirrors(info) as transfers:
        MUTATIONS[trigger](info, active_args_override=override)
    assert transfers == []
    assert "input_pos" in info._input_buffer.stale_names()


def test_override_may_name_active_arguments_only(info: SequenceInfo, trigger: str) -> None:
    activate(info, "input_pos_host")
    before = {name: value(info, name) for name in info._input_buffer.tensor_names}
    with pytest.raises(ValueError, match="names arguments that are not active: cu_seqlen_host, nonsense"):
        MUTATIONS[trigger](info, active_args_override={"input_pos_host", "cu_seqlen_host", "nonsense"})
    assert {name: value(info, name) for name in before} == before
    assert info.is_extend_only


@pytest.mark.parametrize("override", [["input_pos_host"], ("input_pos_host",), "input_pos_host", {"input_pos_host": 1}])
def test_override_must_be_a_set(info: SequenceInfo, trigger: str, override: Any) -> None:
    activate(info, "input_pos_host")
    with pytest.raises(ValueError, match="must be a set of argument names, got"):
        MUTATIONS[trigger](info, active_args_override=override)


def test_copying_cache_loc_moves_up_to_its_bound(info: SequenceInfo) -> None:
    activate(info, "cache_loc_host", "cu_num_pages_host")
    pages_staged = info._input_buffer.get_current_length("cache_loc")
    with record_mirrors(info) as transfers:
        info.offset_pos_and_cache_(offset(info, 1, -1), active_args_override={"cache_loc_host", "cu_num_pages_host"})
    assert transfers[0].nbytes == (pages_staged + 2) * 4 + 3 * 4
    count = value(info, "cu_num_pages_host")[-1]
    assert value(info, "cache_loc_host")[:count] == value(info, "cache_loc")[:count] == [100, 101, 901, 200, 201]


# copy_


def test_copy_changes_one_side_and_the_length(info: SequenceInfo) -> None:
    nest(info, "extend")
    info.copy_("input_ids", torch.arange(6, device=info.device).view(2, 3))
    assert value(info, "input_ids") == [0, 1, 2, 3, 4, 5]
    assert value(info, "input_ids_host") == [10, 11, 12, 13, 14, 15]
    assert info._input_buffer.stale_names() == ["input_ids"]
    info.copy_("token_gather_indices", torch.tensor([2, 5], device=info.device), strict=False)
    assert value(info, "token_gather_indices") == [2, 5]
    info.copy_("input_ids_host", torch.tensor([9] * 6))
    assert value(info, "input_ids_host") == [9] * 6
    assert value(info, "input_ids") == [0, 1, 2, 3, 4, 5]


def test_copy_is_strict_about_the_number_of_elements(info: SequenceInfo) -> None:
    nest(info, "extend")
    with pytest.raises(ValueError, match=r"copy_\('input_ids'\) got 2 elements where 6 are in use"):
        info.copy_("input_ids", torch.arange(2, device=info.device))
    with pytest.raises(ValueError, match="holds at most 24 elements, got 25"):
        info.copy_("input_ids", torch.arange(25, device=info.device), strict=False)
    with pytest.raises(ValueError, match="unknown metadata buffer 'input_id'; did you mean 'input_ids'"):
        info.copy_("input_id", torch.arange(6, device=info.device))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_copy_from_the_host_writes_the_mirror_alone() -> None:
    info = SequenceInfo(32, 4, 24, BLOCK).to("cuda")
    nest(info, "extend")
    info.copy_("input_ids", torch.arange(6))
    assert value(info, "input_ids_host") == [0, 1, 2, 3, 4, 5]
    assert value(info, "input_ids") == [10, 11, 12, 13, 14, 15]


# The law: device metadata moves as plain sequences do, and a full mirror follows it.


@dataclass
class PlainSequence:
    """One sequence as a person would keep it: tokens of this batch, what is cached, its pages."""

    tokens: list[int]
    cached: int
    pages: list[int]
    extra: int
    last: int

    def switch(self) -> None:
        self.cached += len(self.tokens) - 1
        self.tokens = self.tokens[-1:]

    def offset(self, count: int) -> None:
        self.cached += count
        self.last += count
        if self.last > BLOCK:
            self.last -= BLOCK
            self.pages.append(self.extra)
        elif self.last < 1:
            self.last += BLOCK
            self.pages.pop()


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[int], list[PlainSequence], list[tuple[int, ...] | None]]:
    """Return (BatchInfo counts, sequences, mutations: offsets or ``None`` for a switch)."""
    prefill, extend, decode = draw(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)).filter(lambda kinds: sum(kinds) > 0)
    )
    draft = draw(st.integers(1, 3))
    lengths = [draw(st.integers(1, 5)) for _ in range(prefill)] + [1 + draft] * extend + [1] * decode
    sequences = []
    for row, length in enumerate(lengths):
        cached = draw(st.integers(0 if row < prefill else 12, 16))
        total = cached + length
        page_list = [50 * row + i for i in range(-(-total // BLOCK))]
        tokens = draw(st.lists(st.integers(0, 99), min_size=length, max_size=length))
        sequences.append(PlainSequence(tokens, cached, page_list, 900 + row, (total - 1) % BLOCK + 1))
    counts = [prefill, sum(lengths[:prefill]), extend, extend * (1 + draft), decode, decode]
    low = [-min(draft, s.cached + len(s.tokens) - 1) if s.cached >= 12 else 0 for s in sequences]
    moves = st.tuples(*(st.integers(bound, 2) for bound in low))
    mutations = draw(st.lists(st.none() | moves, min_size=1, max_size=4))
    return counts, sequences, mutations


@settings(deadline=None, max_examples=150)
@given(programs(), st.booleans())
def test_mutations_move_metadata_as_plain_sequences_move(
    program: tuple[list[int], list[PlainSequence], list[tuple[int, ...] | None]], two_pools: bool
) -> None:
    counts, sequences, mutations = program
    info = SequenceInfo(max_seq_len=48, max_batch_size=6, max_num_tokens=48, tokens_per_block=BLOCK)
    info.update_cache_information(400)
    suffixes = [""]
    if two_pools:
        info.register_window_groups([48, 16])
        suffixes.append("_g1")
    for suffix in suffixes:
        info.activate_arg("cache_loc" + suffix)
        info.activate_arg("last_page_len" + suffix + "_host")
    info.activate_arg("cu_seqlen_host")
    boundaries = [0]
    for sequence in sequences:
        boundaries.append(boundaries[-1] + len(sequence.pages))
    info.set_example_sequence(
        [sequence.tokens for sequence in sequences],
        input_pos=[sequence.cached for sequence in sequences],
        batch_info=counts,
        cache_loc_per_pool=[[page for sequence in sequences for page in sequence.pages]],
        cu_num_pages_per_pool=[boundaries],
        extra_page_per_seq_per_pool=[[sequence.extra for sequence in sequences]],
    )
    for offsets in mutations:
        if offsets is None:
            for sequence in sequences:
                sequence.switch()
            info.switch_to_generate_()
        else:
            for sequence, count in zip(sequences, offsets, strict=True):
                sequence.offset(count)
            info.offset_pos_and_cache_(offset(info, *offsets))
        assert value(info, "input_ids") == [token for s in sequences for token in s.tokens]
        assert value(info, "position_ids") == [s.cached + i for s in sequences for i in range(len(s.tokens))]
        assert value(info, "input_pos") == [s.cached for s in sequences]
        assert value(info, "seq_len") == [len(s.tokens) for s in sequences]
        assert value(info, "use_initial_states") == [s.cached > 0 for s in sequences]
        for suffix in suffixes:
            assert value(info, "seq_len_with_cache" + suffix) == [s.cached + len(s.tokens) for s in sequences]
            assert value(info, "last_page_len" + suffix) == [s.last for s in sequences]
            assert pages(info, suffix) == [s.pages for s in sequences]
        assert info._input_buffer.stale_names() == []
        for name in info._input_buffer.tensor_names:
            assert value(info, name) == value(info, name + "_host"), name
