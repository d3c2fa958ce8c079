"""The effects table: that it says what the host's methods really do, and how it is extended."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from auto_deploy_ext import SequenceInfo
from auto_deploy_ext.effects import (
    HOST_READERS,
    MUTATIONS,
    buffer_of,
    is_mirror,
    mirror_of,
    pool_twins,
    register_host_reader,
    register_mutation,
)

BUFFERS = ("cache_loc", "cu_num_pages", "last_page_len")


def example(pools: int = 1, active: tuple[str, ...] = BUFFERS) -> SequenceInfo:
    """Two prefills and an extend row, with pages."""
    info = SequenceInfo(max_seq_len=32, max_batch_size=4, max_num_tokens=32, tokens_per_block=4)
    if pools > 1:
        info.register_window_groups([32] * pools)
    info.update_cache_information(16)
    for name in active:
        info.activate_arg(name)
    info.nest_sequences(
        [3, 4, 5, 6, 7, 8],
        [0, 2, 3, 6],
        [0, 3, 7],
        batch_info=[2, 3, 1, 3, 0, 0],
        slot_idx=[0, 1, 2],
        cache_loc_per_pool=[[0, 1, 2, 3, 4]],
        cu_num_pages_per_pool=[[0, 1, 2, 5]],
        extra_page_per_seq_per_pool=[[7, 8, 9]],
    )
    return info


def changed_by(info: SequenceInfo, *call: Any) -> set[str]:
    """The buffers whose device side a call changed, by the host's own versions."""
    buffer = info._input_buffer
    before = dict(buffer.device_version)
    getattr(info, call[0])(*call[1:])
    return {name for name, version in buffer.device_version.items() if version != before[name]}


def offset(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


CALLS = [
    ("switch_to_generate_",),
    ("offset_pos_and_cache_", offset(1, 2, -2)),
    ("copy_", "input_ids", torch.arange(6, dtype=torch.int32)),
]


@pytest.mark.parametrize("pools", [1, 3])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
def test_the_table_names_exactly_what_the_host_writes(call: tuple[Any, ...], pools: int) -> None:
    twins = tuple(f"{b}_g{p}" for b in BUFFERS for p in range(1, pools))
    info = example(pools, (*BUFFERS, *twins))
    spec = MUTATIONS[call[0]]
    written = spec.written(info, call[1:], {}, info._input_buffer.tensor_names)
    assert set(written) == changed_by(info, *call)
    assert written == tuple(sorted(written))


def test_a_second_switch_writes_nothing() -> None:
    info = example()
    info.switch_to_generate_()
    assert changed_by(info, "switch_to_generate_") == set()
    assert MUTATIONS["switch_to_generate_"].may_be_noop


@pytest.mark.parametrize("batch", [[2, 3, 1, 3, 0, 0], [0, 0, 0, 0, 3, 6]])
def test_the_host_effect_of_a_switch_is_what_it_does_to_batch_info(batch: list[int]) -> None:
    real, shadow = example(), example()
    for info in (real, shadow):
        info.batch_info.update(batch)
    real.switch_to_generate_()
    buffers = {n: shadow._input_buffer.get_view(n).clone() for n in shadow._input_buffer.tensor_names}
    MUTATIONS["switch_to_generate_"].host_effect(shadow)
    assert shadow.batch_info.serialize().tolist() == real.batch_info.serialize().tolist()
    assert all(torch.equal(shadow._input_buffer.get_view(n), v) for n, v in buffers.items())


@pytest.mark.parametrize("call", CALLS[1:], ids=lambda call: call[0])
def test_no_other_call_touches_batch_info(call: tuple[Any, ...]) -> None:
    info = example()
    before = info.batch_info.serialize().tolist()
    getattr(info, call[0])(*call[1:])
    assert info.batch_info.serialize().tolist() == before
    MUTATIONS[call[0]].host_effect(info)
    assert info.batch_info.serialize().tolist() == before
    assert not MUTATIONS[call[0]].changes_batch


@pytest.mark.parametrize("name", ["switch_to_generate_", "offset_pos_and_cache_"])
def test_what_a_calls_arithmetic_reads_is_all_it_needs(name: str) -> None:
    """Other buffers' contents do not influence what it writes."""
    call = next(c for c in CALLS if c[0] == name)
    spec = MUTATIONS[name]
    first, second = example(), example()
    for buffer in second._input_buffer.tensor_names:
        if buffer not in spec.needs:
            second._input_buffer.get_view(buffer).fill_(1)
    for info in (first, second):
        getattr(info, name)(*call[1:])
    for buffer in spec.written(first, call[1:], {}, first._input_buffer.tensor_names):
        views = [info._input_buffer.get_view(buffer, truncate=True) for info in (first, second)]
        if buffer == "cache_loc":
            pages = int(first._input_buffer.get_view("cu_num_pages")[3])
            views = [view[:pages] for view in views]
        elif buffer in ("input_pos", "seq_len_with_cache", "use_initial_states", "last_page_len", "seq_len"):
            views = [view[:3] for view in views]
        assert torch.equal(*views), buffer


def test_names_of_buffers_mirrors_and_twins() -> None:
    assert mirror_of("cu_seqlen") == "cu_seqlen_host"
    assert buffer_of("cu_seqlen_host") == buffer_of("cu_seqlen") == "cu_seqlen"
    assert is_mirror("seq_len_host") and not is_mirror("seq_len") and not is_mirror("batch_info_host")
    names = ["cache_loc_g10", "cache_loc", "cache_loc_g2", "cache_loc_gx", "cache_loc_g2_host", "cache_locs_g1"]
    assert pool_twins("cache_loc", names) == ("cache_loc_g10", "cache_loc_g2")


def test_a_copys_name_must_be_known() -> None:
    spec = MUTATIONS["copy_"]
    assert spec.written(None, ("input_ids", None), {}, ()) == ("input_ids",)
    assert spec.written(None, ("input_ids_host", None), {}, ()) == ("input_ids",)
    assert spec.written(None, (), {"name": "input_ids"}, ()) == ("input_ids",)
    assert spec.written(None, (object(), None), {}, ()) is None


def test_a_wrappers_own_mutation_can_be_registered_and_replaced() -> None:
    try:
        spec = register_mutation("advance_", writes=["seq_len", "cache_loc", "seq_len"], operand=0)
        assert MUTATIONS["advance_"] is spec
        assert spec.writes == ("cache_loc", "seq_len")
        assert spec.written(None, (), {}, ["cache_loc_g1"]) == ("cache_loc", "cache_loc_g1", "seq_len")
        assert (spec.mirrors, spec.takes_override, spec.changes_batch) == ("none", False, False)
        spec = register_mutation(
            "advance_", writes=lambda info, which: (which,), takes_override=True, host_effect=print, pooled=False
        )
        assert spec.written(None, ("seq_len",), {}, ["seq_len_g1"]) == ("seq_len",)
        assert (spec.mirrors, spec.changes_batch) == ("written", True)
    finally:
        del MUTATIONS["advance_"]


def test_mirrors_are_no_buffers_and_buffers_no_mirrors() -> None:
    with pytest.raises(ValueError, match=r"advance_.*in 'seq_len'"):
        register_mutation("advance_", writes=["seq_len_host"])
    with pytest.raises(ValueError, match="advance_"):
        register_mutation("advance_", writes=["seq_len"], needs=["seq_len_host"])
    with pytest.raises(ValueError, match="seq_len_host"):
        register_host_reader("plan", ["seq_len"])
    assert "advance_" not in MUTATIONS and "plan" not in HOST_READERS


def test_readers() -> None:
    info = example(active=(*BUFFERS, "seq_len_host"))
    info.register_host_prepare_for_attention_forward(
        lambda **args: None, ["seq_len_host", "seq_len", "batch_info_host"]
    )
    read = {name: reader.read for name, reader in HOST_READERS.items()}
    assert read["run_host_prepare_for_attention_forward"](info, (), {}) == ("seq_len_host",)
    assert read["run_host_prepare_for_attention_forward"](None, (), {}) is None
    assert read["get_arg"](info, ("cu_seqlen_host",), {}) == ("cu_seqlen_host",)
    assert read["get_arg"](info, (), {"name": "cu_seqlen"}) == ()
    assert read["get_arg"](info, (object(),), {}) is None
    assert read["unnest_sequences"](info, (None,), {}) == ("seq_len_host",)
