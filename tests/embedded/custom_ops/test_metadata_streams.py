"""Metadata on a busy GPU: nothing stalls the host, and copies under way harm nobody."""

from __future__ import annotations

import pytest
import torch

from auto_deploy_ext.embedded.custom_ops.attention_interface import HostCopyTicket, SequenceInfo
from auto_deploy_ext.runtime.copy_memory import LandingPool
from auto_deploy_ext.runtime.mirrors import record_mirrors
from tests.no_waits import synchronising_is_an_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

_CYCLES = 200_000_000  # about a tenth of a second


@pytest.fixture
def info() -> SequenceInfo:
    info = SequenceInfo(max_seq_len=32, max_batch_size=4, max_num_tokens=24, tokens_per_block=4)
    info.register_window_groups([32, 8])
    info.to("cuda")
    for name in ("cache_loc", "cache_loc_g1", "cu_seqlen_host", "input_pos_host"):
        info.activate_arg(name)
    nest(info, 0)
    # Warm: memory is allocated by now.
    info.switch_to_generate_()
    info.offset_pos_and_cache_(torch.ones(3, dtype=torch.int32, device="cuda"))
    torch.cuda.synchronize()
    return info


def nest(info: SequenceInfo, start: int) -> None:
    """Nest a prefill of 3, an extend of 3 and a decode, with ``start`` cached tokens and tokens start + 1, .."""
    rows = [[start + 1, start + 2, start + 3], [start + 4, start + 5, start + 6], [start + 7]]
    info.set_example_sequence(rows, input_pos=start, batch_info=[1, 3, 1, 3, 1, 1])


def busy() -> torch.cuda.Event:
    """Keep the current stream busy; the event comes behind."""
    torch.cuda._sleep(_CYCLES)
    event = torch.cuda.Event()
    event.record()
    return event


def draft_step(info: SequenceInfo, offset: torch.Tensor) -> HostCopyTicket:
    nest(info, 5)
    info.offset_pos_and_cache_(offset, active_args_override=set())
    info.switch_to_generate_(active_args_override=set())
    info.copy_("input_ids", torch.ones(3, dtype=torch.int32, device="cuda"))
    info.maybe_gather_and_squeeze(torch.zeros(3, 1, 2, device="cuda"))
    return info._input_buffer.start_copy_to_host(["cu_seqlen", "cache_loc", "position_ids"])


def test_mutations_and_copies_do_not_wait_for_the_device(info: SequenceInfo) -> None:
    offset = torch.tensor([2, -1, 1], dtype=torch.int32, device="cuda")
    for _ in range(4):  # kernels loaded, all staging slots and a landing area allocated
        draft_step(info, offset).wait()
    torch.cuda.synchronize()
    event = busy()
    with synchronising_is_an_error():
        ticket = draft_step(info, offset)
    assert not event.query(), "the host ran ahead of the device"
    assert ticket.wait() == ("cache_loc_host", "cu_seqlen_host", "position_ids_host")
    assert event.query()
    assert info.get_arg("position_ids_host", truncate=True).tolist() == [9, 6, 6]
    assert info.get_arg("cu_seqlen_host", truncate=True).tolist() == [0, 1, 2, 3]


def test_overlap_inputs_do_not_wait_for_the_device(info: SequenceInfo) -> None:
    info._active_args = ("input_ids", "position_ids", "cache_loc")
    tokens = torch.tensor([70, 71], dtype=torch.int32, device="cuda")
    new_lens = torch.tensor([2, 3], dtype=torch.int32, device="cuda")
    with synchronising_is_an_error():
        info.set_example_sequence(
            [[1, 2], [3, 4, 5]],
            input_pos=4,
            batch_info=[1, 2, 1, 3, 0, 0],
            _gather_idx=[1],
            _mask_scatter_indices=[2],
            _ungathered_input_ids=tokens,
            _gather_slot_idx=[1],
            _ungathered_new_lens=new_lens,
        )
    assert info.get_arg("input_ids", unflatten=False).tolist() == [1, 2, 71, 4, 5]
    assert info.get_arg("input_pos", truncate=True).tolist() == [4, 6]


def test_a_copy_in_flight_does_not_reach_the_next_batch(info: SequenceInfo) -> None:
    nest(info, 0)
    busy()
    info.offset_pos_and_cache_(torch.ones(3, dtype=torch.int32, device="cuda"), active_args_override=set())
    with record_mirrors(info) as transfers:
        ticket = info._input_buffer.start_copy_to_host(["input_pos"])
        unclaimed = info._input_buffer.copy_to_host(non_blocking=True)
        nest(info, 9)
        assert info.get_arg("input_pos_host", truncate=True).tolist() == [9, 9, 9]
        torch.cuda.synchronize()
        assert ticket.wait() == () and unclaimed is not None and unclaimed.wait() == ()
    assert info.get_arg("input_pos_host", truncate=True).tolist() == [9, 9, 9]
    assert info.get_arg("input_pos", truncate=True).tolist() == [9, 9, 9]
    assert [transfer.waited for transfer in transfers] == [False, False]


def test_mirrors_may_be_written_while_they_travel_to_the_device(info: SequenceInfo) -> None:
    snapshots = []
    busy()
    for start in range(2):  # as many batches as there are staging slots would wait for the first one's event
        nest(info, start)
        snapshots.append(info.get_arg("input_ids", unflatten=False).clone())
        info.get_arg("input_ids_host").fill_(-1)
    assert [snapshot.tolist() for snapshot in snapshots] == [[1, 2, 3, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7, 8]]


def test_staging_slots_are_reused_only_after_their_event(info: SequenceInfo) -> None:
    for _ in range(4):
        nest(info, 0)
    torch.cuda.synchronize()
    snapshots = []
    for start in range(8):
        torch.cuda._sleep(_CYCLES // 10)
        nest(info, start)
        snapshots.append(info.get_arg("input_ids", unflatten=False).clone())
    for start, snapshot in enumerate(snapshots):
        assert snapshot.tolist() == list(range(start + 1, start + 8))


def test_landing_memory_is_free_only_after_its_event() -> None:
    pool = LandingPool()
    memory = pool.take(100, pinned=True)
    event = busy()
    pool.give_back(memory, event)
    assert pool.take(100, pinned=True).data_ptr() != memory.data_ptr()
    event.synchronize()
    assert pool.take(100, pinned=True) is memory


def test_many_copies_in_flight_land_apart(info: SequenceInfo) -> None:
    tickets = []
    busy()
    for step in range(6):
        info.copy_("seq_len", torch.full((3,), step, dtype=torch.int32, device="cuda"), strict=False)
        tickets.append(info._input_buffer.start_copy_to_host(["seq_len", "cu_seqlen"]))
        info._input_buffer.start_copy_to_host(["seq_len", "input_ids"])  # nobody waits for this one
    for step, ticket in enumerate(tickets):
        ticket.wait()
        assert info.get_arg("seq_len_host", truncate=True).tolist() == [step] * 3


def test_mutations_can_be_captured_in_a_graph(info: SequenceInfo) -> None:
    offset = torch.tensor([1, 1, 1], dtype=torch.int32, device="cuda")
    nest(info, 5)
    info.switch_to_generate_(active_args_override=set())
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        info.offset_pos_and_cache_(offset, active_args_override=set())
    before = info.get_arg("input_pos", truncate=True).tolist()
    graph.replay()
    graph.replay()
    assert info.get_arg("input_pos", truncate=True).tolist() == [pos + 2 for pos in before]
