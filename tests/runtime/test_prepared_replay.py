"""A prepared replay gives mirrors the values of the device, touches no other, and counts versions like `replay`."""

from __future__ import annotations

import dataclasses
from types import MethodType
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from auto_deploy_ext.effects import MUTATIONS
from auto_deploy_ext.embedded.custom_ops.attention_interface import SequenceInfo
from auto_deploy_ext.runtime import fused_mutations, host_mirrors, replay
from auto_deploy_ext.runtime.fused_mutations import SWITCH_NAME, TICKET, Part
from auto_deploy_ext.runtime.mirrors import Transfer
from auto_deploy_ext.runtime.replay import OperandTicket, PreparedReplay
from tests.metadata_runs import TOKENS_PER_BLOCK, Batch, Row, batches

OFFSET = "offset_pos_and_cache_"
#: buffers whose mirrors have the short way.
SHORT = ("last_page_len", "cu_num_pages", "seq_len_with_cache", "input_pos", "cu_seqlen", "seq_len")


def values(info: SequenceInfo, side: str) -> dict[str, list[Any]]:
    """All buffers' values of one side, page tables as far as the device's count says."""
    buffer, found = info._input_buffer, {}
    for name in buffer.tensor_names:
        count = buffer.get_current_length(name)
        if name.startswith("cache_loc"):
            count = int(buffer.get_view(name.replace("cache_loc", "cu_num_pages"))[info.num_sequences])
        view = buffer.get_view(name) if side == "device" else buffer.get_host_memory(name)
        found[name] = view[:count].tolist()
    return found


@st.composite
def calls(draw: st.DrawFn) -> tuple[Batch, str, tuple[int, ...] | int | None, list[str]]:
    """A batch, a mutation, its operand (per row, or one number that the host knows), and which mirrors are wanted."""
    batch = draw(batches())
    info = batch.make()
    mutation = draw(st.sampled_from([OFFSET, OFFSET, "switch_to_generate_"]))
    written = MUTATIONS[mutation].written(info, (), {}, info._input_buffer.tensor_names)
    assert written is not None
    able = [name for name in written if MUTATIONS[mutation].replay_inputs(name) is not None]
    short = [name for name in able if name.startswith(SHORT)]
    names = draw(st.lists(st.sampled_from(draw(st.sampled_from([able, short]))), min_size=1, unique=True))
    offset: Any = None
    if mutation == OFFSET:
        one = st.integers(-TOKENS_PER_BLOCK, TOKENS_PER_BLOCK)
        offset = draw(one | st.lists(one, min_size=len(batch.rows), max_size=len(batch.rows)).map(tuple))
    return batch, mutation, offset, sorted(names)


@given(calls())
def test_mirrors_are_what_the_device_has(call: tuple[Batch, str, tuple[int, ...] | int | None, list[str]]) -> None:
    batch, mutation, offset, names = call
    info, other = batch.make(), batch.make()
    rows = info.num_sequences
    operands = []
    known: int | OperandTicket | None = None
    if offset is not None:
        per_row = torch.tensor([offset] * rows if isinstance(offset, int) else offset, dtype=torch.int32)
        operands = [per_row]
        known = offset if isinstance(offset, int) else OperandTicket(Transfer((), 0, False, ""), per_row)
    before = values(info, "host")

    versions = replay.device_versions(info, tuple(names))
    host_mirrors.mutate(info, mutation, *operands, active_args=())
    device = replay.device_versions(info, tuple(names))
    written = tuple(name for name in names if device[name] != versions[name])
    if not written:  # a switch of a batch that generates already
        return
    PreparedReplay(mutation, written)(info, rows, operands[0] if operands else None, known)

    now, there = values(info, "host"), values(info, "device")
    for name in info._input_buffer.tensor_names:
        if name in written:
            assert now[name] == there[name], name
        elif len(now[name]) == len(before[name]):
            assert now[name] == before[name], name

    versions = replay.device_versions(other, tuple(names))
    host_mirrors.mutate(other, mutation, *operands, active_args=())
    replay.replay(other, mutation, versions, lambda: operands[0])
    assert host_mirrors.stale_names(info) == host_mirrors.stale_names(other)
    assert values(other, "host") == now


@st.composite
def steps_of_a_run(draw: st.DrawFn) -> tuple[Batch, list[Part], list[Any]]:
    """A batch, mutations that the host repeats for some of what they write, and each one's offsets."""
    batch = draw(batches())
    if draw(st.booleans()):  # no page table in use before a test activates one
        batch = dataclasses.replace(batch, pages_active=(False,) * batch.pools)
    names = batch.make()._input_buffer.tensor_names
    parts, offsets = [], []
    for mutation in draw(st.lists(st.sampled_from([OFFSET, SWITCH_NAME]), min_size=1, max_size=3)):
        spec = MUTATIONS[mutation]
        able = [name for name in spec.written(None, (), {}, names) or () if spec.replay_inputs(name) is not None]
        short = [name for name in able if name.startswith(SHORT)]
        replays = draw(st.lists(st.sampled_from(draw(st.sampled_from([able, short]))), min_size=1, unique=True))
        one = st.integers(-TOKENS_PER_BLOCK + 1, TOKENS_PER_BLOCK)
        number = draw(one) if mutation == OFFSET else None
        per_row = draw(st.none() | st.lists(one, min_size=len(batch.rows), max_size=len(batch.rows)))
        offsets.append(number if per_row is None or number is None else per_row)
        known = TICKET if isinstance(offsets[-1], list) else number
        parts.append(Part(mutation, active_args=(), replays=tuple(sorted(replays)), host_operand=known))
    return batch, parts, offsets


TABLES = ("cu_num_pages", "last_page_len", "seq_len_with_cache")
UNUSED = Batch((Row("decode", 1, 13), Row("decode", 1, 16)), 1, (False,))


@settings(max_examples=60)
@example((UNUSED, [Part(OFFSET, active_args=(), replays=TABLES, host_operand=1)], [1]), True, "both")
@given(steps_of_a_run(), st.booleans(), st.sampled_from(["nothing", "activates", "replaces", "both"]))
def test_a_run_does_what_its_mutations_do_whatever_happens_between_its_calls(
    run: tuple[Batch, list[Part], list[Any]], on_the_host_alone: bool, between: str
) -> None:
    """What was prepared at the first call must not outlive what it was prepared for."""
    batch, parts, offsets = run
    infos = batch.make(), batch.make()
    constants = tuple(map(tuple, parts))  # the same object at each call, as in compiled code
    for call in range(3):
        if call == 1:
            for info in infos:
                if between in ("activates", "both"):
                    for suffix in info._pool_suffixes:
                        info.activate_arg("last_page_len" + suffix)
                if between in ("replaces", "both"):
                    vars(info)[OFFSET] = MethodType(getattr(type(info), OFFSET), info)
        operands: list[Any] = []
        for offset in offsets:
            if offset is not None:
                rows = len(batch.rows)
                operands.append(torch.tensor(offset if isinstance(offset, list) else [offset] * rows))
            if isinstance(offset, list):
                operands.append(OperandTicket(Transfer((), 0, False, ""), operands[-1].to(torch.int32)))
        info, other = infos
        (fused_mutations.host_side if on_the_host_alone else fused_mutations.mutate_all)(info, constants, operands)
        given = fused_mutations._run_of(other, constants)._matched(operands)
        if on_the_host_alone:
            for part, (operand, ticket) in zip(parts, given, strict=True):
                rows, generating = other.num_sequences, other.batch_info.is_generate_only()
                fused_mutations._host_side(other, part, operand, ticket, rows, generating)
        else:
            fused_mutations._one_by_one(other, parts, given)
        assert values(info, "host") == values(other, "host")
        assert info._input_buffer.device_version == other._input_buffer.device_version
        assert info._input_buffer.mirror_version == other._input_buffer.mirror_version


DECODES = Batch((Row("decode", 1, 13), Row("decode", 1, 15)), 1, (True,))
OFFSETS = (tuple(Part(OFFSET, active_args=(), replays=TABLES, host_operand=1)),)


def ones(batch: Batch) -> list[Any]:
    return [torch.ones(len(batch.rows), dtype=torch.int32)]


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The buffers of each replay that went the long way."""
    found: list[tuple[str, ...]] = []
    repeat = replay._repeat

    def noted(info: Any, mutation: str, written: tuple[str, ...], operand: Any) -> None:
        found.append(written)
        repeat(info, mutation, written, operand)

    monkeypatch.setattr(replay, "_repeat", noted)
    return found


@pytest.mark.parametrize("run", [fused_mutations.mutate_all, fused_mutations.host_side])
def test_what_drafts_need_goes_the_short_way(run: Any, long_ways: list[tuple[str, ...]]) -> None:
    info = DECODES.make()
    run(info, OFFSETS, ones(DECODES))
    assert long_ways == []
    assert info._input_buffer.get_host_memory("seq_len_with_cache")[:2].tolist() == [15, 17]
    with_pages = (tuple(Part(OFFSET, active_args=(), replays=("cache_loc", "input_pos"), host_operand=1)),)
    run(info, with_pages, ones(DECODES))
    assert long_ways == [("cache_loc", "input_pos")]


@pytest.mark.parametrize("run", [fused_mutations.mutate_all, fused_mutations.host_side])
def test_what_becomes_active_is_replayed_from_then_on(run: Any, long_ways: list[tuple[str, ...]]) -> None:
    info = dataclasses.replace(DECODES, pages_active=(False,)).make()
    run(info, OFFSETS, ones(DECODES))
    assert info._input_buffer.get_host_memory("cu_num_pages")[:3].tolist() == [0, 4, 8]
    info.activate_arg("last_page_len")
    info._input_buffer.mark_mirrors(info._input_buffer.tensor_names)
    run(info, OFFSETS, ones(DECODES))
    # The table was left alone before, so it is a token behind: 14 and 16 tokens become 15 and 17.
    assert info._input_buffer.get_host_memory("last_page_len")[:2].tolist() == [3, 1]
    assert info._input_buffer.get_host_memory("cu_num_pages")[:3].tolist() == [0, 4, 9]
    assert "last_page_len" not in host_mirrors.stale_names(info) and long_ways == []


@pytest.mark.parametrize(
    ("value", "dtype", "held"),
    [(5, torch.bool, 1), (-1, torch.uint8, 255), (2**32 + 1, torch.int64, 1), (3, torch.int64, 3)],
)
def test_a_constant_is_what_its_tensor_holds(value: int, dtype: torch.dtype, held: int) -> None:
    info = DECODES.make()
    before = info._input_buffer.get_host_memory("seq_len_with_cache")[:2].clone()
    parts = (tuple(Part(OFFSET, active_args=(), replays=("seq_len_with_cache",), host_operand=value)),)
    fused_mutations.host_side(info, parts, [torch.full((2,), value, dtype=dtype)])
    assert (info._input_buffer.get_host_memory("seq_len_with_cache")[:2] - before).tolist() == [held, held]


def test_other_arguments_that_prepare_attention_change_what_is_written_though_they_are_as_many() -> None:
    info = dataclasses.replace(DECODES, pages_active=(False,)).make()
    info._active_host_prep_args = {"last_page_len_host"}
    fused_mutations.mutate_all(info, OFFSETS, ones(DECODES))
    info._active_host_prep_args = {"cu_seqlen_host"}
    table = info._input_buffer.get_view("last_page_len")[:2].clone()
    fused_mutations.mutate_all(info, OFFSETS, ones(DECODES))
    assert torch.equal(info._input_buffer.get_view("last_page_len")[:2], table)


def test_a_mirror_that_is_newer_than_its_buffer_stays_so() -> None:
    buffer = DECODES.make()._input_buffer
    buffer.mark_mirror("input_pos", 10)
    buffer.mark_mirrors(["input_pos"])
    assert buffer.mirror_version["input_pos"] == 10
