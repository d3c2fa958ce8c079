"""A prepared replay gives mirrors the values of the device, touches no other, and counts versions like `replay`."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from auto_deploy_ext import host_mirrors, replay
from auto_deploy_ext.effects import MUTATIONS
from auto_deploy_ext.embedded.custom_ops.attention_interface import SequenceInfo
from auto_deploy_ext.mirrors import Transfer
from auto_deploy_ext.replay import OperandTicket, PreparedReplay
from tests.metadata_runs import TOKENS_PER_BLOCK, Batch, batches

OFFSET = "offset_pos_and_cache_"


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
    short = [n for n in able if n.startswith(("last_page", "cu_num", "seq_len_w", "input_pos", "cu_seqlen", "seq_len"))]
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
    PreparedReplay(info, mutation, written)(info, rows, operands[0] if operands else None, known)

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
