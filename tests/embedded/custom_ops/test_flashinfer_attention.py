"""Backend `flashinfer` on a double of FlashInfer's wrappers: what it plans from, when, and into which memory."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from auto_deploy_ext.embedded.custom_ops import flashinfer_attention, flashinfer_planner
from auto_deploy_ext.embedded.custom_ops.attention_interface import AttentionRegistry
from auto_deploy_ext.embedded.custom_ops.flashinfer_planner import PlanGeometry, SlotRing, TableLayout
from auto_deploy_ext.embedded.custom_ops.plan_ops import forget_graph, is_plan_op, plan_for_graph
from auto_deploy_ext.embedded.shim.interface import KvCacheConfig
from tests.double import flashinfer as double
from tests.paged_batches import PagedBatch, batches, make_batch

OPS = torch.ops.auto_deploy_ext
FLASHINFER = AttentionRegistry.get("flashinfer")


@pytest.fixture(autouse=True)
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The double in the place of the package, without planners from other tests."""
    monkeypatch.setitem(sys.modules, "flashinfer", double)
    monkeypatch.setattr(flashinfer_planner, "_planners", {})
    double.calls.clear()
    yield double


def plan(batch: PagedBatch, handle: int = 1, **stale: torch.Tensor) -> torch.Tensor:
    """Run the plan op; `stale` replaces mirrors."""
    names = ("batch_info", "cu_seqlen", "cu_num_pages", "last_page_len", "seq_len_with_cache")
    mirrors = [stale.get(name, mirror) for name, mirror in zip(names, batch.mirrors(), strict=True)]
    heads, dim = batch.q.shape[2:]
    kv_heads, page_size = batch.kv_cache.shape[2:4]
    sizes = (handle, heads, kv_heads, dim, str(batch.q.dtype).removeprefix("torch."))
    return OPS.flashinfer_plan(*mirrors, batch.cache_loc, page_size, *sizes)


def attend(batch: PagedBatch, table: torch.Tensor, handle: int = 1, scale: float | None = 0.3) -> Any:
    """Run the attention op on a copy of the cache; gives the output and that copy."""
    cache = batch.kv_cache.clone()
    out = OPS.flashinfer_cached_attention(batch.q, batch.k, batch.v, batch.cache_loc, table, cache, scale, handle)
    return out, cache


def extend_batch(rows: int = 2, past: int = 5, seed: int = 0) -> PagedBatch:
    return make_batch(
        ([3] * rows, 0, rows), [past] * rows, (2, 1, 64), 4, dtype=torch.bfloat16, max_rows=4, entries=16, seed=seed
    )


# -- results -----------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches(dims=(64,), dtypes=(torch.bfloat16, torch.float16)), st.booleans())
def test_every_kind_of_batch_gives_the_reference(batch: PagedBatch, for_graph: bool) -> None:
    expected, expected_cache = batch.reference(scale=0.3)
    flashinfer_planner._planners.clear()
    for _ in range(2):  # the second plan skips FlashInfer's front door
        if for_graph:
            with plan_for_graph("graph"):
                table = plan(batch)
        else:
            table = plan(batch)
        out, cache = attend(batch, table)
        torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)
        assert torch.equal(cache, expected_cache)


def test_one_plan_serves_all_layers_and_its_table_never_moves() -> None:
    first, second = extend_batch(rows=2), extend_batch(rows=3, seed=1)
    table = plan(first)
    for scale in (0.3, None):  # a scale of its own per layer
        torch.testing.assert_close(attend(first, table, scale=scale)[0], first.reference(scale)[0])
    again = plan(second)
    assert again.data_ptr() == table.data_ptr()
    torch.testing.assert_close(attend(second, again)[0], second.reference(0.3)[0])
    assert double.calls == [("plan", False, 2), ("again", False, 3)]


def test_target_and_draft_plan_apart() -> None:
    target, draft = extend_batch(rows=2), extend_batch(rows=3, seed=1)
    tables = plan(target, handle=1), plan(draft, handle=2)
    torch.testing.assert_close(attend(target, tables[0], handle=1)[0], target.reference(0.3)[0])
    torch.testing.assert_close(attend(draft, tables[1], handle=2)[0], draft.reference(0.3)[0])


def test_tokens_beyond_the_plan_are_zero_and_an_empty_batch_is_all_zeros() -> None:
    batch = make_batch(([2, 1], 1, 0), [3, 6], (2, 1, 64), 8, dtype=torch.bfloat16)
    batch.batch_info[:6] = torch.tensor([1, 2, 0, 0, 0, 0])
    out, _ = attend(batch, plan(batch))
    assert out[0, 2].abs().max() == 0 and out[0, :2].abs().max() > 0
    batch.batch_info.zero_()
    assert attend(batch, plan(batch))[0].abs().max() == 0


@pytest.mark.parametrize(
    ("mirror", "stale"),
    [
        ("cu_seqlen", [0, 2, 6, 0, 0]),
        ("cu_num_pages", [0, 1, 3, 0, 0]),
        ("last_page_len", [1, 1, 0, 0]),
        ("seq_len_with_cache", [6, 7, 0, 0]),
    ],
)
def test_each_mirror_is_believed(mirror: str, stale: list[int]) -> None:
    batch = extend_batch()
    fresh, fresh_cache = attend(batch, plan(batch))
    wrong, wrong_cache = attend(batch, plan(batch, **{mirror: torch.tensor(stale, dtype=torch.int32)}))
    assert not torch.equal(fresh, wrong) or not torch.equal(fresh_cache, wrong_cache)


@pytest.mark.parametrize("value", [-(2**31), -1, 2**31 - 1])
@pytest.mark.parametrize("mirror", ["cu_seqlen", "cu_num_pages", "last_page_len", "seq_len_with_cache"])
def test_a_mirror_of_nonsense_makes_wrong_numbers_and_no_fault(mirror: str, value: int) -> None:
    # The double fails where a kernel would leave its memory.
    batch = extend_batch()
    batch.cache_loc[-1] = -1
    nonsense = torch.full_like(getattr(batch, mirror), value)
    with plan_for_graph("graph"):
        graph = plan(batch, **{mirror: nonsense})
        assert attend(batch, graph)[0].shape == batch.q.shape
    assert attend(batch, plan(batch, **{mirror: nonsense}))[0].shape == batch.q.shape


def test_mirrors_of_the_batch_before_make_no_fault_either() -> None:
    # What the policy `none` leaves: counts of a decode batch, mirrors of the extend batch before it.
    extend = extend_batch(rows=3)
    plan(extend)
    decode = make_batch(([1, 1, 1], 0, 0), [9, 2, 5], (2, 1, 64), 4, dtype=torch.bfloat16, max_rows=4, entries=16)
    decode.cache_loc = extend.cache_loc
    stale = {name: getattr(extend, name) for name in ("cu_seqlen", "cu_num_pages", "last_page_len")}
    decode.kv_cache = extend.kv_cache
    assert attend(decode, plan(decode, **stale))[0].shape == decode.q.shape


# -- device graphs -----------------------------------------------------------------------------------------------------


def test_plans_for_a_device_graph_use_a_wrapper_and_memory_of_fixed_address() -> None:
    first, second = extend_batch(past=5), extend_batch(past=9, seed=3)
    with plan_for_graph("a"):
        plan(first)
        own = flashinfer_planner.planner(1)
        wrapper = own.current.wrapper
        addresses = [x.data_ptr() for x in (wrapper._qo_indptr_buf, wrapper._paged_kv_indices_buf, wrapper._last)]
        workspace = wrapper._int_workspace_buffer.data_ptr()
    plan(second)
    assert own.current.wrapper is not wrapper, "an eager run between replays has its own"
    with plan_for_graph("a"):
        plan(second)
    assert own.current.wrapper is wrapper
    assert addresses == [x.data_ptr() for x in (wrapper._qo_indptr_buf, wrapper._paged_kv_indices_buf, wrapper._last)]
    assert workspace == wrapper._int_workspace_buffer.data_ptr()
    with plan_for_graph("b"):
        plan(second)
    assert own.current.wrapper is not wrapper


def test_a_graph_that_is_replayed_for_another_batch_is_an_error() -> None:
    with plan_for_graph("a"):
        plan(extend_batch(rows=2))
        with pytest.raises(ValueError, match=r"captured for 2 rows of 6 tokens, and is to be replayed for 3 rows of 9"):
            plan(extend_batch(rows=3))


def test_a_plan_of_another_layout_than_the_captured_one_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with plan_for_graph("a"):
        plan(extend_batch())
        monkeypatch.setattr(double._Module, "plan", lambda *args: [6, 2, 99])
        with pytest.raises(RuntimeError, match="another layout"):
            plan(extend_batch(past=9))


@pytest.mark.parametrize("graph", [False, True])
def test_a_batch_with_the_tokens_and_pages_of_the_last_one_is_not_planned_again(graph: bool) -> None:
    # Of pages of 4 tokens: rows of 8 tokens, of 7, of 9 and of 8 again; what is read of the last page follows them.
    for past, again in ((5, 1), (4, 1), (6, 2), (5, 3)):
        batch = extend_batch(past=past, seed=past)
        if graph:
            with plan_for_graph("a"):
                table = plan(batch)
        else:
            table = plan(batch)
        assert torch.equal(attend(batch, table)[0], batch.reference(0.3)[0])
        assert len(double.calls) == again + graph
        with plan_for_graph("another"):  # between two plans of this one
            plan(extend_batch(past=past, rows=3))
        double.calls[:] = [call for call in double.calls if call[2] == 2]


def test_a_failed_plan_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, other = extend_batch(), extend_batch(past=9)
    plan(batch)
    with monkeypatch.context() as broken:
        broken.setattr(double._Module, "plan", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            plan(other)
    assert torch.equal(attend(other, plan(other))[0], other.reference(0.3)[0])


def test_a_freed_graphs_wrapper_is_let_go() -> None:
    with plan_for_graph("a"):
        plan(extend_batch())
    own = flashinfer_planner.planner(1)
    assert set(own._graphs) == {"a"}
    forget_graph("a")
    assert not own._graphs


def test_a_planner_whose_graphs_are_freed_goes_when_another_is_made() -> None:
    def known() -> set[int]:
        return set(flashinfer_planner._planners)

    with plan_for_graph("a"):
        plan(extend_batch(), handle=1)
    plan(extend_batch(), handle=2)
    forget_graph("a")
    plan(extend_batch(), handle=1)
    plan(extend_batch(), handle=3)
    assert known() == {1, 2, 3}, "it is in use again"
    with plan_for_graph("b"):
        plan(extend_batch(), handle=1)
    ring = weakref.ref(flashinfer_planner.planner(1).ring)
    forget_graph("b")
    assert known() == {1, 2, 3}, "somebody's attention may be about to run with it"
    plan(extend_batch(), handle=4)
    gc.collect()
    assert known() == {2, 3, 4} and ring() is None
    plan(extend_batch(), handle=1)


# -- copies of a consumer, which have its planner's number -------------------------------------------------------------


def sized(max_rows: int = 4, entries: int = 16, kv_heads: int = 1, page: int = 4, past: int = 5) -> PagedBatch:
    shape = (2, kv_heads, 64)
    return make_batch(
        ([3, 3], 0, 2), [past, past], shape, page, dtype=torch.bfloat16, max_rows=max_rows, entries=entries
    )


@pytest.mark.parametrize("other", [{"max_rows": 8}, {"entries": 32}, {"kv_heads": 2}, {"page": 8}])
@pytest.mark.parametrize("graphs", [False, True])
def test_copies_of_different_size_leave_each_others_planner_alone(other: dict[str, int], graphs: bool) -> None:
    copies = {"original": {}, "copy": other}
    tables, wrappers, planned = {}, {}, []
    for past in (5, 9, 5):
        for name, sizes in copies.items():
            batch = sized(**sizes, past=past)
            with plan_for_graph(name) if graphs else contextlib.nullcontext():
                table = plan(batch)
            own = flashinfer_planner.planner(1)
            assert own.table is tables.setdefault(name, own.table) and table.data_ptr() == own.table.data_ptr()
            assert own.current.wrapper is wrappers.setdefault(name, own.current.wrapper)
            assert torch.equal(attend(batch, table)[0], batch.reference(0.3)[0])
        planned.append(sum(how == "plan" for how, *_ in double.calls))
    assert wrappers["original"] is not wrappers["copy"]
    assert planned == [2, 2, 2], "each has gone through FlashInfer's front door once"
    forget_graph("copy")
    serving = [sorted(own._graphs) for own in flashinfer_planner._planners[1]]
    assert sorted(serving) == ([[], ["original"]] if graphs else [[], []])


def test_copies_of_equal_size_share_a_planner_and_each_has_its_graphs() -> None:
    for name in ("original", "copy"):
        with plan_for_graph(name):
            plan(sized())
    (own,) = flashinfer_planner._planners[1]
    assert set(own._graphs) == {"original", "copy"}


def test_a_capture_takes_the_planner_of_its_sizes() -> None:
    first, second = sized(), sized(entries=32)
    tables = [plan(batch) for batch in (first, second)]
    known = [flashinfer_planner._planners[1][place] for place in (0, 1)]
    for own, table in zip(known, tables, strict=True):
        sizes = (own.geometry, own.layout.max_rows, own.num_entries, own.device)
        assert flashinfer_planner.known_planner(1, *sizes) is flashinfer_planner.planner(1) is own
        assert own.table.data_ptr() == table.data_ptr()
    with pytest.raises(RuntimeError, match="planner 1 is to be captured before anything of these sizes was planned"):
        flashinfer_planner.known_planner(1, known[0].geometry, 5, 16, known[0].device)


def test_of_sizes_that_no_graph_needs_a_few_are_kept() -> None:
    with plan_for_graph("a"):
        plan(sized(entries=16))
    for entries in range(20, 30):
        plan(sized(entries=entries))
    kept = [own.num_entries for own in flashinfer_planner._planners[1]]
    assert kept == [16, 26, 27, 28, 29]


def test_kernels_are_loaded_before_a_capture() -> None:
    with plan_for_graph("a"):
        plan(extend_batch())
    # Once on nothing, which runs, and once for the batch.
    assert double.calls == [("plan", True, 2), ("again", True, 2)]


# -- host memory -------------------------------------------------------------------------------------------------------


class Event:
    """An event that the test lets happen."""

    def __init__(self) -> None:
        self.happened = False
        self.waited = 0

    def query(self) -> bool:
        return self.happened

    def synchronize(self) -> None:
        self.waited += 1
        self.happened = True


def test_host_memory_is_reused_only_after_its_copies() -> None:
    ring = SlotRing(TableLayout(4), torch.device("cpu"), first=2, limit=3)
    events = []

    def take() -> Any:
        slot = ring.take()
        slot.copied = Event()  # type: ignore[assignment]
        events.append(slot.copied)
        return slot

    slots = [take() for _ in range(3)]
    assert len({id(slot) for slot in slots}) == 3, "none is written while its copies are under way"
    events[0].happened = True
    assert take() is slots[0] and ring.waits == 0
    assert take() is slots[1] and ring.waits == 1 and events[1].waited == 1, (
        "at the limit the host waits for the oldest"
    )


def test_a_ring_does_not_grow_while_its_slots_are_free() -> None:
    batch = extend_batch()
    plan(batch)
    size = len(flashinfer_planner.planner(1).ring)
    for _ in range(2 * size):
        plan(batch)
    assert len(flashinfer_planner.planner(1).ring) == size


def test_partial_results_get_the_room_that_flashinfers_scheduler_asks_for() -> None:
    geometry = PlanGeometry(32, 8, 128, 32, torch.bfloat16)
    room = flashinfer_planner.float_workspace_bytes
    assert room(geometry, 1, 1, False, 132) == 128 << 20
    # 64 rows of 7 tokens as a graph: ceil(64 * 7 * 4 / 128) + 63 = 77 tiles of 128 rows, 32 heads, 128 + 1 floats.
    assert room(geometry, 64, 448, True, 132) == 4 * 32 * 77 * 128 * 129 + (1 << 20)


# -- building a model --------------------------------------------------------------------------------------------------


class FakeGraph(SimpleNamespace):
    __hash__ = object.__hash__


def source_node(dtype: torch.dtype, dim: int = 64, role: str = "target", others: tuple[Any, ...] = ()) -> Any:
    arguments = [SimpleNamespace(meta={"val": torch.empty(1, 2, heads, dim, dtype=dtype)}) for heads in (4, 2, 2)]
    node = SimpleNamespace(args=[*arguments, 0.5], kwargs={}, target="attention")
    node.graph = FakeGraph(owning_module=SimpleNamespace(role=role), nodes=[node, *others])
    return node


def test_float32_is_refused_by_the_name_of_the_option_and_of_the_type() -> None:
    with pytest.raises(ValueError, match=r"^attn_backend: flashinfer computes in bfloat16 or float16, but the model's"):
        FLASHINFER.get_prepare_extra_metadata_info(source_node(torch.float32))
    with pytest.raises(
        ValueError, match=r"^draft_attn_backend: .* dtype is float32: set dtype: bfloat16, or draft_attn"
    ):
        FLASHINFER.get_prepare_extra_metadata_info(source_node(torch.float32, role="draft"))


def test_heads_that_flashinfer_has_no_kernel_for_are_refused() -> None:
    with pytest.raises(ValueError, match=r"width 64, 128, 256, but the model's are 16 wide"):
        FLASHINFER.get_prepare_extra_metadata_info(source_node(torch.bfloat16, dim=16))


def test_layers_that_one_plan_cannot_serve_are_refused() -> None:
    other = source_node(torch.bfloat16, dim=128)
    with pytest.raises(ValueError, match="plans once per forward"):
        FLASHINFER.get_prepare_extra_metadata_info(source_node(torch.bfloat16, others=(other,)))


def test_a_cache_of_another_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_config.dtype is float16: set it to auto"):
        FLASHINFER.get_cache_initializers(source_node(torch.bfloat16), KvCacheConfig(dtype="float16"))


def test_without_flashinfer_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ImportError, match=r"pip install 'auto_deploy_ext\[gpu\]'"):
        FLASHINFER.get_prepare_extra_metadata_info(source_node(torch.bfloat16))


def test_a_flashinfer_that_plans_into_other_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(double.BatchPrefillWithPagedKVCacheWrapper):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            del self._pin_memory_int_workspace_buffer

    monkeypatch.setattr(double, "BatchPrefillWithPagedKVCacheWrapper", Other)
    with pytest.raises(ImportError, match=r"flashinfer-python==0\.6\.4"):
        plan(extend_batch())


def test_another_version_is_planned_through_its_front_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(double, "__version__", "0.7.0")
    batch = extend_batch()
    for _ in range(2):
        torch.testing.assert_close(attend(batch, plan(batch))[0], batch.reference(0.3)[0])
    assert [how for how, *_ in double.calls] == ["plan", "plan"]


def test_what_it_reads_on_the_host_goes_to_the_plan_alone() -> None:
    assert FLASHINFER.plans_before_capture()
    assert not any(name.endswith("_host") for name in FLASHINFER.get_standard_metadata_args())
    op, outputs, constants = FLASHINFER.get_prepare_extra_metadata_info(source_node(torch.bfloat16))
    assert is_plan_op(op) and outputs == 1 and constants[1:] == [4, 2, 64, "bfloat16"]
    names = [argument.name for argument in op._schema.arguments]
    assert [name for name in names if name.endswith("_host")] == [
        "batch_info_host",
        "cu_seqlen_host",
        "cu_num_pages_host",
        "last_page_len_host",
        "seq_len_with_cache_host",
    ]


def test_each_graph_has_a_planner_and_all_its_layers_the_same() -> None:
    one, other = torch.fx.Graph(), torch.fx.Graph()
    handle = flashinfer_attention.planner_handle
    assert handle(one) == handle(one) != handle(other)


def test_attention_before_any_plan_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="planner 77 was called before anything was planned"):
        attend(extend_batch(), torch.zeros(1, dtype=torch.int32), handle=77)
