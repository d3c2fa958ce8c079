"""host_mirrors on the bound host: exact transfers, none of them lost on a newer batch, and what is stale is known."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from auto_deploy_ext import host, record_mirrors
from auto_deploy_ext.orchestrator import ops
from auto_deploy_ext.orchestrator.interface_state import preserved
from auto_deploy_ext.runtime import host_mirrors
from auto_deploy_ext.runtime.refresh import ensure_fresh
from auto_deploy_ext.runtime.tracked_mirrors import switch_writes_mirrors

from .harness import make_interface, nest

SWITCHED = ("cu_seqlen", "input_ids", "input_pos", "position_ids", "seq_len", "use_initial_states")


@pytest.fixture
def info() -> Any:
    cm = make_interface(3)
    host_mirrors.mirrors_of(cm)
    nest(cm, [], 2, 3)
    return cm.info


def test_one_call_moves_exactly_these_at_their_current_lengths(info: Any) -> None:
    ops.mutate(info, "switch_to_generate_", active_args=())
    with record_mirrors(info) as transfers:
        host_mirrors.move(info, ("seq_len_host", "cu_seqlen"), "test")
        host_mirrors.move(info, ())
    (transfer,) = transfers
    assert (transfer.names, transfer.waited, transfer.trigger) == (("cu_seqlen_host", "seq_len_host"), True, "test")
    assert transfer.nbytes == 3 * 4 + info._input_buffer.get_current_length("seq_len") * 4
    assert info.get_arg("cu_seqlen_host")[:3].tolist() == [0, 1, 2]
    assert info.get_arg("seq_len_host")[:2].tolist() == [1, 1]


def test_what_calls_wrote_is_stale_until_it_is_moved_or_staged(info: Any) -> None:
    assert host_mirrors.stale_names(info) == ()
    ops.mutate(info, "switch_to_generate_", active_args=())
    assert host_mirrors.stale_names(info) == SWITCHED
    host_mirrors.move(info, ("cu_seqlen",))
    assert host_mirrors.stale_names(info) == SWITCHED[1:]
    info.copy_("slot_idx", torch.tensor([1, 0]))
    assert "slot_idx" in host_mirrors.stale_names(info)
    host_mirrors.mark_fresh(info, ("slot_idx_host",))
    assert "slot_idx" not in host_mirrors.stale_names(info)
    info.set_capture_batch(3, 2)
    assert host_mirrors.stale_names(info) == ()


@pytest.mark.parametrize("active_args", [(), ("cu_seqlen_host",), ("input_ids_host", "cu_num_pages_host")])
def test_a_mutation_that_does_nothing_moves_nothing(info: Any, active_args: tuple[str, ...]) -> None:
    for name in ("input_ids_host", "cu_num_pages_host"):
        info.activate_arg(name)
    ops.mutate(info, "switch_to_generate_", active_args=())
    with record_mirrors(info) as transfers:
        if host.features["exact_copies"] or not host.takes_override:
            ops.mutate(info, "switch_to_generate_", active_args=active_args)
        ops.mutate(info, "offset_pos_and_cache_", torch.tensor([1, 1], dtype=torch.int32), active_args=())
    assert transfers == []


def test_an_unnarrowed_mutation_makes_everything_fresh(info: Any) -> None:
    info.copy_("slot_idx", torch.tensor([1, 0]))
    with record_mirrors(info) as transfers:
        ops.mutate(info, "switch_to_generate_")
    (transfer,) = transfers
    assert set(transfer.names) == {f"{name}_host" for name in info._input_buffer.tensor_names}
    assert transfer.trigger == "switch_to_generate_"
    assert host_mirrors.stale_names(info) == ()
    assert info.get_arg("slot_idx_host")[:2].tolist() == [1, 0]


def test_a_transfer_lands_aside_until_it_is_waited_for(info: Any) -> None:
    before = info.get_arg("cu_seqlen_host")[:3].tolist()
    ops.mutate(info, "switch_to_generate_", active_args=())
    with record_mirrors(info) as transfers:
        ticket = host_mirrors.start(info, ("cu_seqlen_host",), "draft")
        assert [t.waited for t in transfers] == [False]
        if not switch_writes_mirrors(type(info)):
            assert info.get_arg("cu_seqlen_host")[:3].tolist() == before
        assert ticket.wait() == ("cu_seqlen_host",)
        assert ticket.wait() == ()
    assert [t.waited for t in transfers] == [True]
    assert info.get_arg("cu_seqlen_host")[:3].tolist() == [0, 1, 2]


def test_a_transfer_that_a_newer_batch_overtook_is_dropped(info: Any) -> None:
    """Hazard 1: what was in flight may not overwrite what the next batch staged."""
    ops.mutate(info, "switch_to_generate_", active_args=())
    ticket = host_mirrors.start(info, ("cu_seqlen_host",))
    info.set_capture_batch(3, 2)
    staged = info.get_arg("cu_seqlen_host")[:3].tolist()
    assert ticket.wait() == ()
    assert ticket.transfer.waited is False
    assert info.get_arg("cu_seqlen_host")[:3].tolist() == staged == [0, 4, 8]


def test_an_older_transfer_does_not_overwrite_a_newer_one(info: Any) -> None:
    first = host_mirrors.start(info, ("input_pos_host",))
    ops.mutate(info, "offset_pos_and_cache_", torch.tensor([1, 1], dtype=torch.int32), active_args=())
    second = host_mirrors.start(info, ("input_pos_host",))
    second.wait()
    first.wait()
    assert info.get_arg("input_pos_host")[:2].tolist() == [10, 12]


def test_a_page_table_moves_up_to_the_pages_that_offsets_may_have_added(info: Any) -> None:
    one = torch.tensor([3, 3], dtype=torch.int32)
    for _ in range(2):
        ops.mutate(info, "offset_pos_and_cache_", one, active_args=())
    host_mirrors.move(info, ("cache_loc", "cu_num_pages"))
    pages = int(info.get_arg("cu_num_pages")[2])
    assert pages == 9
    assert info.get_arg("cache_loc_host")[:pages].tolist() == info.get_arg("cache_loc")[:pages].tolist()


def test_what_tracing_does_to_an_interface_is_forgotten_with_it(info: Any) -> None:
    info.copy_("slot_idx", torch.tensor([1, 0]))
    cm = type("Holder", (), {})()
    cm.info = info
    with preserved(cm):
        info.set_capture_batch(3, 2)
        assert host_mirrors.stale_names(info) == ()
    assert host_mirrors.stale_names(info) == ("slot_idx",)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_an_interface_is_tracked_by_itself(info: Any, how: Any) -> None:
    twin = how(info)
    ops.mutate(twin, "switch_to_generate_", active_args=())
    assert host_mirrors.stale_names(twin) == SWITCHED
    assert host_mirrors.stale_names(info) == ()
    assert info.get_arg("seq_len")[:2].tolist() == [4, 4]
    with record_mirrors(info) as of_the_original:
        host_mirrors.move(twin, ("seq_len",))
    assert of_the_original == []


def test_overlap_scheduling_leaves_mirrors_that_are_fetched_before_they_are_read(info: Any) -> None:
    info.copy_("_gather_slot_idx", torch.tensor([0, 1]), strict=False)
    with host_mirrors.quiet(info):
        info.offset_with_new_lens_(torch.tensor([2, 3], dtype=torch.int32))
    assert "seq_len_with_cache" in host_mirrors.stale_names(info)
    with record_mirrors(info) as transfers:
        ensure_fresh(info, ("seq_len_with_cache_host", "slot_idx_host"))
        ensure_fresh(info, ("seq_len_with_cache_host",))
    assert [t.names for t in transfers] == [("seq_len_with_cache_host",)]
    assert info.get_arg("seq_len_with_cache_host")[:2].tolist() == [14, 17]


@pytest.mark.skipif(not host.has_window_groups, reason="this host has one pool")
def test_the_twins_of_other_pools_are_stale_too() -> None:
    cm = make_interface(3)
    cm.info.register_window_groups([64, 64])
    for name in ("seq_len_with_cache_g1_host", "last_page_len_g1_host"):
        cm.info.activate_arg(name)
    nest(cm, [], 2, 3)
    host_mirrors.mirrors_of(cm)
    nest(cm, [], 2, 3)
    ops.mutate(cm.info, "offset_pos_and_cache_", torch.tensor([1, 1], dtype=torch.int32), active_args=())
    stale = host_mirrors.stale_names(cm)
    assert {"seq_len_with_cache_g1", "last_page_len_g1", "cache_loc_g1"} <= set(stale)
    host_mirrors.move(cm, ("seq_len_with_cache_g1_host",))
    assert cm.info.get_arg("seq_len_with_cache_g1_host")[:2].tolist() == [14, 16]
