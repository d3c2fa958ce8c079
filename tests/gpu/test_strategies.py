"""Strategies on a GPU: the laws of the CPU, no wait but where a wait stands, and copies under way that harm nobody."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from auto_deploy_ext import record_mirrors
from auto_deploy_ext.effects import mirror_of
from auto_deploy_ext.orchestrator import ops
from auto_deploy_ext.rewriting.scoping import ScopeOptions, scope_graphs
from auto_deploy_ext.runtime.copy_memory import StagingRing
from tests.no_waits import synchronising_is_an_error
from tests.strategy_programs import (
    OFFSET,
    SWITCH,
    WRITABLE,
    Batch,
    Reader,
    active_buffers,
    make_interface,
    run,
    write,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

_CYCLES = 200_000_000  # about a tenth of a second
BATCH = Batch((("prefill", 3, 41), ("extend", 2, 44), ("decode", 1, 47)), (2, -1, 4))
PAGED = ("cu_num_pages_host", "cu_seqlen_host", "last_page_len_host", "seq_len_with_cache_host")
LOOP = [
    *[("fresh",), ("part", 1), ("consume", "draft"), ("switch",), ("offset",), ("consume", "draft")],
    *[("fill", 1), ("switch",), ("offset",), ("consume", "draft")],
]


@pytest.fixture(scope="module")
def cm() -> Any:
    return make_interface(device="cuda")


def busy() -> torch.cuda.Event:
    """Keep the current stream busy; the event comes behind."""
    torch.cuda._sleep(_CYCLES)
    event = torch.cuda.Event()
    event.record()
    return event


def in_use(cm: Any, names: tuple[str, ...], side: str) -> list[list[Any]]:
    buffer = cm.info._input_buffer
    views = buffer.get_host_memory if side == "host" else buffer.get_view
    return [views(name.removesuffix("_host"), truncate=True).tolist() for name in names]


steps = st.lists(
    st.one_of(
        *[st.just(("offset",))] * 3,
        *[st.just(("switch",))] * 2,
        *[st.tuples(st.just("consume"), st.sampled_from("ab"))] * 4,
        st.just(("fresh",)),
        st.tuples(st.sampled_from(["full", "fill", "part"]), st.integers(-1, 4)),
        st.tuples(st.sampled_from(["copy", "inplace"]), st.sampled_from(WRITABLE)),
    ),
    min_size=2,
    max_size=20,
)
reads = st.lists(st.integers(0, 15), min_size=1, max_size=5, unique=True)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps, st.fixed_dictionaries({"a": reads, "b": reads}), st.sampled_from(["auto", "copy", "override", "replay"]))
def test_every_consumer_finds_its_mirrors_as_the_device_has_them(
    cm: Any, steps: Any, reads: dict[str, list[int]], strategy: str
) -> None:
    active = active_buffers(2, True)
    consumers = {n: Reader(sorted({mirror_of(active[i]) for i in chosen})) for n, chosen in reads.items()}
    gm = write(steps, consumers, len(BATCH.rows))
    scope_graphs({"graph": gm}, cm, ScopeOptions(strategy=strategy))
    BATCH.nest(cm)
    for seen in run(gm, consumers, cm, BATCH).seen:
        assert seen.mirrors == seen.device, seen.consumer


@pytest.mark.parametrize("strategy", ["copy", "replay", "auto"])
def test_a_loop_waits_for_the_device_only_where_it_says_so(cm: Any, strategy: str) -> None:
    consumers = {"draft": Reader(PAGED)}
    gm = write(LOOP, consumers, len(BATCH.rows))
    gm.meta["generate_only"] = False
    scope_graphs({"graph": gm}, cm, ScopeOptions(strategy=strategy))
    offset = torch.tensor(BATCH.offset, dtype=torch.int32, device="cuda")
    for _ in range(4):  # kernels loaded, staging slots, landing areas and the side stream made
        BATCH.nest(cm)
        gm(cm, offset)
    torch.cuda.synchronize()
    # Behind the operand comes the draft, which takes long.
    events: list[torch.cuda.Event] = []
    handle = consumers["draft"].register_forward_pre_hook(lambda *_: events.append(busy()))
    torch.cuda._sleep(_CYCLES)
    with record_mirrors(cm) as transfers, synchronising_is_an_error():
        BATCH.nest(cm)
        gm(cm, offset)
    handle.remove()
    ahead = [not event.query() for event in events]
    if strategy == "copy":
        assert ahead == [False, False, True], "each transfer comes behind the draft before it"
        assert [t.waited for t in transfers] == [True, True]
    else:
        assert ahead == [True, True, True], "the operand alone is waited for, and no draft"
        assert [(t.names, t.nbytes, t.waited) for t in transfers] == [((OFFSET,), 12, True)]
    torch.cuda.synchronize()
    assert in_use(cm, PAGED, "host") == in_use(cm, PAGED, "device")


def test_a_snapshot_travels_beside_a_busy_stream_and_later_writes_do_not_reach_it(cm: Any) -> None:
    offset = torch.tensor([2, -1, 4], dtype=torch.int32, device="cuda")
    ops.snapshot_operand(cm, offset, OFFSET).wait()
    torch.cuda.synchronize()
    with synchronising_is_an_error():
        ticket = ops.snapshot_operand(cm, offset, OFFSET)
        event = busy()
        offset.fill_(7)
        # What the caching allocator would hand out next, were the snapshot's memory free.
        others = [torch.full((3,), 9, dtype=torch.int32, device="cuda") for _ in range(8)]
        assert ticket.wait().tolist() == [2, -1, 4]
        assert not event.query(), "it did not wait for what came later on the stream"
    torch.cuda.synchronize()
    assert [other.tolist() for other in others] == [[9, 9, 9]] * 8


def test_an_abandoned_snapshot_harms_nobody(cm: Any) -> None:
    offset = torch.tensor([2, -1, 4], dtype=torch.int32, device="cuda")
    for _ in range(50):
        torch.cuda._sleep(1_000_000)
        ops.snapshot_operand(cm, offset, OFFSET)
    assert ops.snapshot_operand(cm, offset, OFFSET).wait().tolist() == [2, -1, 4]


def test_a_transfer_overtaken_by_a_newer_batch_is_dropped_without_a_wait(cm: Any) -> None:
    """Hazard 1."""
    BATCH.nest(cm)
    event = busy()
    cm.info.switch_to_generate_(active_args_override=set())
    ticket = ops.start_mirrors(cm, ("cu_seqlen_host", "input_pos_host"), SWITCH)
    with synchronising_is_an_error():
        BATCH.nest(cm)
        ops.wait_mirrors(cm, ticket)
        assert not event.query()
    torch.cuda.synchronize()
    assert in_use(cm, ("cu_seqlen_host", "input_pos_host"), "host") == [[0, 3, 5, 6], [41, 44, 47]]


def _straight_from_the_mirrors(self: StagingRing, pairs: Any) -> None:
    for source, target in pairs:
        target.copy_(source, non_blocking=True)


@pytest.mark.parametrize("protected", [True, False])
def test_replay_may_write_mirrors_while_their_upload_is_pending(
    cm: Any, protected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hazard 2: the device gets what was staged, not what the host computes while the upload waits its turn."""
    consumers = {"draft": Reader(("cu_seqlen_host",))}
    gm = write([("switch",), ("consume", "draft")], consumers, len(BATCH.rows))
    gm.meta["generate_only"] = False
    scope_graphs({"graph": gm}, cm, ScopeOptions(strategy="replay"))
    if not protected:
        monkeypatch.setattr(StagingRing, "upload", _straight_from_the_mirrors)
    uploaded = torch.empty(4, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    event = busy()
    BATCH.nest(cm)
    uploaded.copy_(cm.info._input_buffer.get_view("cu_seqlen")[:4])
    gm(cm, None)
    assert not event.query(), "the upload is still to come"
    torch.cuda.synchronize()
    assert (uploaded.tolist() == [0, 3, 5, 6]) is protected
