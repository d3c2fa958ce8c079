"""Plans FlashInfer's paged attention from host mirrors, for eager runs and for device graphs, without waiting.

A planner belongs to one consumer graph. What a run needs beside q and the cache is a function of the plan alone: the
ranges and lengths that the kernels read on the device are copies of the host values that the plan was made from. So
a stale mirror makes for wrong numbers, but for consistent ones, and since every value is brought into range, not for
faults.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from .plan_ops import current_graph, on_forget
from .torch_attention import batch_counts

KNOWN_VERSION = "0.6.4"
"""The FlashInfer whose wrappers' inner state is known here."""

_INT_WORKSPACE_BYTES = 1 << 19
"""FlashInfer's own 8 MiB are far more than a plan takes: some 20 bytes a tile, and 4 a token of rows that are split."""
_LEAST_FLOAT_WORKSPACE_BYTES = 128 << 20
_ALIGNMENT = 4  # elements; 16 bytes
_KEPT_ARRAYS = 64

_NO_WINDOW = _NO_FIXED_SPLIT = -1


def load_flashinfer() -> ModuleType:
    """Import FlashInfer.

    Raises:
        ImportError: it is not installed; the message names the extra that brings it.
    """
    try:
        import flashinfer
    except ImportError as error:
        raise ImportError(
            f"the attention backend flashinfer needs FlashInfer, which cannot be imported ({error}): "
            "pip install 'auto_deploy_ext[gpu]', or set attn_backend (draft_attn_backend) to triton or torch_paged"
        ) from error
    return flashinfer


class PlanGeometry(NamedTuple):
    """What all layers of one consumer have in common."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    tokens_per_block: int
    dtype: torch.dtype


class Mirrors(NamedTuple):
    """What is planned from; host tensors, see `plan_rows` of the backend `torch_paged`."""

    batch_info: torch.Tensor
    cu_seqlen: torch.Tensor
    cu_num_pages: torch.Tensor
    last_page_len: torch.Tensor
    seq_len_with_cache: torch.Tensor


# -- memory ------------------------------------------------------------------------------------------------------------


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


class TableLayout:
    """Where a plan table, one int32 tensor, has its four parts, for up to `max_rows` rows.

    Attributes:
        starts: first elements of the query ranges, the page ranges, the last pages' lengths and the rows' ends.
        size: elements of a table.
    """

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        boundaries, lengths = _aligned(max_rows + 1), _aligned(max_rows)
        self.starts = (0, boundaries, 2 * boundaries, 2 * boundaries + lengths)
        self.size = 2 * (boundaries + lengths)

    def parts(self, table: Any, rows: int) -> tuple[Any, Any, Any, Any]:
        """Views of a table's parts (tensor or array): [rows + 1], [rows + 1], [rows], [rows]."""
        queries, pages, last, ends = self.starts
        return (
            table[queries : queries + rows + 1],
            table[pages : pages + rows + 1],
            table[last : last + rows],
            table[ends : ends + rows],
        )


class _Slot:
    """Host memory that the copies of one plan read from: a table, and FlashInfer's own workspace."""

    def __init__(self, memory: torch.Tensor, layout: TableLayout) -> None:
        self.table = memory[: 4 * layout.size].view(torch.int32)
        self.workspace = memory[4 * layout.size :]
        self.copied: torch.cuda.Event | None = None
        self._layout = layout
        self._array: np.ndarray = self.table.numpy()
        self._parts: dict[int, tuple[tuple[np.ndarray, ...], tuple[torch.Tensor, ...]]] = {}

    def parts(self, rows: int) -> tuple[tuple[np.ndarray, ...], tuple[torch.Tensor, ...]]:
        """The table's parts for that many rows, as arrays and as tensors; the views are kept."""
        parts = self._parts.get(rows)
        if parts is None:
            parts = self._parts[rows] = (self._layout.parts(self._array, rows), self._layout.parts(self.table, rows))
        return parts


class SlotRing:
    """Slots in turn. One whose copies are still under way is not written: the ring grows, up to a limit, then waits.

    Args:
        layout: of the tables.
        device: that is copied to; slots are pinned where it is a CUDA device.
        first: slots that are made at the start, at once, because pinning memory takes long: a draft loop and more.
        limit: most slots.

    Attributes:
        waits: how often the host had to wait for the device.
    """

    def __init__(self, layout: TableLayout, device: torch.device, first: int = 16, limit: int = 64) -> None:
        self._layout = layout
        self._on_cuda = device.type == "cuda"
        self._index = device.index
        self._limit = limit
        self._slots = self._make(first)
        self._next = 0
        self.waits = 0

    def __len__(self) -> int:
        return len(self._slots)

    def _make(self, count: int) -> list[_Slot]:
        nbytes = 4 * self._layout.size + _INT_WORKSPACE_BYTES
        memory = torch.empty(count, nbytes, dtype=torch.uint8, pin_memory=self._on_cuda)
        return [_Slot(piece, self._layout) for piece in memory]

    def take(self) -> _Slot:
        """The oldest slot if it is free, else a new one."""
        slot = self._slots[self._next]
        copied = slot.copied
        if copied is not None and not copied.query():
            if len(self._slots) < self._limit:
                (slot,) = self._make(1)
                self._slots.insert(self._next, slot)
            else:
                self.waits += 1
                copied.synchronize()
        self._next = (self._next + 1) % len(self._slots)
        return slot

    def copies_started(self, slot: _Slot) -> None:
        """Note that all copies from a slot are on the device's current stream."""
        if self._on_cuda:
            if slot.copied is None:
                slot.copied = torch.cuda.Event()
            slot.copied.record(torch.cuda.current_stream(self._index))


_float_workspaces: dict[torch.device, torch.Tensor] = {}


def _float_workspace(device: torch.device, nbytes: int) -> torch.Tensor:
    """Memory for partial results, shared by all wrappers of a device, which run one after the other on its stream.

    A larger demand makes a new one; who has the smaller keeps it.
    """
    known = _float_workspaces.get(device)
    if known is None or known.numel() < nbytes:
        known = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        _float_workspaces[device] = known
    return known


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def float_workspace_bytes(geometry: PlanGeometry, rows: int, tokens: int, for_graph: bool, processors: int) -> int:
    """What FlashInfer's scheduler (`PrefillPlan`) allocates for partial results, at most.

    Only as many tiles as fit the device twice are split; in a device graph, where the lengths may change from replay to
    replay, there is room for partial results of every tile that rows of these counts can have.
    """
    group = geometry.num_heads // geometry.num_kv_heads
    longest = (tokens - rows + 1) * group
    tile = 128 if longest > 64 and geometry.head_dim < 256 else 64 if longest > 16 else 16
    tiles = 2 * processors // geometry.num_kv_heads
    if for_graph:
        tiles = max(tiles, -(-tokens * group // tile) + rows - 1)
    else:
        tile = 128
    partial = 4 * geometry.num_heads * tiles * tile * (geometry.head_dim + 1)
    return max(_LEAST_FLOAT_WORKSPACE_BYTES, partial + (1 << 20))


# -- plans -------------------------------------------------------------------------------------------------------------


@dataclass
class Planned:
    """A wrapper, and the batch that it is planned for.

    Attributes:
        wrapper: FlashInfer's.
        rows: of the batch.
        tokens: of the batch.
        parts: the plan table's parts on the device, for these rows.
        causal: whether a row may have several tokens.
        graph: the device graph that the wrapper serves; None: eager runs.
        layout: of a graph's plan, which must stay the same: the graph has it as constants.
        ranges: the query and page ranges that the wrapper's last plan was made from; empty: none that can be told.
    """

    wrapper: Any
    rows: int
    tokens: int
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    causal: bool
    graph: Hashable | None
    layout: tuple[int, ...] | None = None
    ranges: bytes = b""


class FlashInferPlanner:
    """Plans for one consumer.

    What FlashInfer's scheduler decides follows from the query and the page ranges alone, and it stays in a wrapper's
    workspace on the device. So a batch whose rows have as many tokens and pages as those of the wrapper's last plan,
    which is what most steps of a draft loop are, only needs its plan table brought to the device.

    Args:
        geometry: of its layers.
        max_rows: most rows of a batch.
        num_entries: capacity of `cache_loc`.
        device: where the consumer runs.

    Attributes:
        indices: int32 [num_entries] on the device: page numbers, which the attention operator writes.
        table: the plan table on the device, see `TableLayout`.
        current: what the next attention runs with.
        ring: host memory that plans are copied from.
        is_done_with: it has served device graphs, all of which are freed, and nothing was planned since.
    """

    def __init__(self, geometry: PlanGeometry, max_rows: int, num_entries: int, device: torch.device) -> None:
        self.geometry = geometry
        self.num_entries = num_entries
        self.device = device
        self.layout = TableLayout(max_rows)
        self.indices = torch.zeros(num_entries, dtype=torch.int32, device=device)
        self.table = torch.zeros(self.layout.size, dtype=torch.int32, device=device)
        self.ring = SlotRing(self.layout, device)
        self.current: Planned | None = None
        self.is_done_with = False
        self._flashinfer = load_flashinfer()
        self._is_known = getattr(self._flashinfer, "__version__", "") == KNOWN_VERSION
        self._eager: dict[bool, Planned] = {}
        self._graphs: dict[Hashable, Planned] = {}
        self._parts: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._arrays: dict[int, tuple[torch.Tensor, np.ndarray]] = {}
        self._one_each = np.arange(max_rows + 1, dtype=np.int32)

    def fits(self, geometry: PlanGeometry, max_rows: int, num_entries: int, device: torch.device) -> bool:
        """Whether the planner was made for these."""
        own = (self.geometry, self.layout.max_rows, self.num_entries, self.device)
        return own == (geometry, max_rows, num_entries, device)

    @property
    def serves_graphs(self) -> bool:
        """Whether a device graph has the planner's memory as constants."""
        return bool(self._graphs)

    def plan(self, mirrors: Mirrors) -> torch.Tensor:
        """Plan the batch that the mirrors describe; gives the table, always the same tensor."""
        self.is_done_with = False
        counts = batch_counts(mirrors.batch_info)
        rows, tokens = sum(counts[0::2]), sum(counts[1::2])
        if tokens == 0:
            self.current = None
            return self.table
        planned = self._planned(rows, tokens, causal=counts[4] != rows)
        slot = self.ring.take()
        self._fill(slot.parts(rows)[0], mirrors, planned)
        self._start(planned, slot)
        self.current = planned
        return self.table

    def forget(self, graph: Hashable) -> None:
        """Let go of a device graph's wrapper."""
        if self._graphs.pop(graph, None) is not None and not self._graphs:
            self.is_done_with = True

    # ---------------------------------------------------------------- wrappers

    def _planned(self, rows: int, tokens: int, causal: bool) -> Planned:
        graph = current_graph()
        if graph is None:
            before = self._eager.get(causal)
            if before is None:
                wrapper, ranges = self._new_wrapper(rows, tokens, causal, for_graph=False), b""
            else:
                wrapper, ranges = before.wrapper, before.ranges if before.tokens == tokens else b""
            planned = Planned(wrapper, rows, tokens, self._parts_for(rows), causal, None, ranges=ranges)
            self._eager[causal] = planned
            return planned
        known = self._graphs.get(graph)
        if known is None:
            wrapper = self._new_wrapper(rows, tokens, causal, for_graph=True)
            planned = Planned(wrapper, rows, tokens, self._parts_for(rows), causal, graph)
            self._load_kernels(planned)
            self._graphs[graph] = planned
            return planned
        planned = known
        if (planned.rows, planned.tokens, planned.causal) != (rows, tokens, causal):
            raise ValueError(
                f"the device graph {graph!r} was captured for {planned.rows} rows of {planned.tokens} tokens, "
                f"and is to be replayed for {rows} rows of {tokens}"
            )
        return planned

    def _parts_for(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        parts = self._parts.get(rows)
        if parts is None:
            parts = self._parts[rows] = self.layout.parts(self.table, rows)
        return parts

    def _new_wrapper(self, rows: int, tokens: int, causal: bool, for_graph: bool) -> Any:
        """A wrapper of FlashInfer's: for rows of several tokens, or of one.

        Both use the same kernels (backend fa2, tensor cores), so a token counts the same in a verification and in plain
        decoding, as far as splitting allows.

        Raises:
            ImportError: a FlashInfer that keeps the host side of its plans elsewhere.
        """
        nbytes = float_workspace_bytes(self.geometry, rows, tokens, for_graph, _processors(self.device))
        floats = _float_workspace(self.device, nbytes)
        queries, pages, last, _ = self._parts_for(rows)
        if causal:
            buffers = {
                "qo_indptr_buf": queries,
                "paged_kv_indptr_buf": pages,
                "paged_kv_indices_buf": self.indices,
                "paged_kv_last_page_len_buf": last,
            }
            wrapper = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(
                floats, "HND", use_cuda_graph=for_graph, backend="fa2", **(buffers if for_graph else {})
            )
        else:
            buffers = {
                "paged_kv_indptr_buffer": pages,
                "paged_kv_indices_buffer": self.indices,
                "paged_kv_last_page_len_buffer": last,
            }
            wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                floats,
                "HND",
                use_cuda_graph=for_graph,
                use_tensor_cores=True,
                backend="fa2",
                **(buffers if for_graph else {}),
            )
        if not hasattr(wrapper, "_pin_memory_int_workspace_buffer"):
            raise ImportError(
                f"FlashInfer {getattr(self._flashinfer, '__version__', '?')} keeps the host side of its plans in "
                f"another place than {KNOWN_VERSION}, which is known here: pip install "
                f"flashinfer-python=={KNOWN_VERSION}"
            )
        wrapper._int_workspace_buffer = torch.zeros(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        return wrapper

    def _load_kernels(self, planned: Planned) -> None:
        """Run a wrapper once on nothing: what a kernel needs at its first launch may not happen in a capture."""
        rows, tokens, geometry = planned.rows, planned.tokens, self.geometry
        slot = self.ring.take()
        queries, pages, last, ends = slot.parts(rows)[0]
        queries[:] = np.arange(rows + 1) * tokens // rows
        pages[:] = np.arange(rows + 1)
        last[:] = ends[:] = geometry.tokens_per_block
        self._start(planned, slot)
        q = torch.zeros(tokens, geometry.num_heads, geometry.head_dim, dtype=geometry.dtype, device=self.device)
        page = q.new_zeros(1, 2, geometry.num_kv_heads, geometry.tokens_per_block, geometry.head_dim)
        planned.wrapper._paged_kv_indices_buf = torch.zeros_like(self.indices)
        run(planned, q, page, 1.0)
        planned.wrapper._paged_kv_indices_buf = self.indices

    # ---------------------------------------------------------------- one plan

    def _array_of(self, mirror: torch.Tensor) -> np.ndarray:
        """A mirror's memory; who passes the same tensor again finds the array that was made of it."""
        known = self._arrays.get(id(mirror))
        if known is None or known[0] is not mirror:
            if len(self._arrays) >= _KEPT_ARRAYS:
                self._arrays.clear()
            known = self._arrays[id(mirror)] = (mirror, mirror.numpy())
        return known[1]

    def _fill(self, parts: tuple[np.ndarray, ...], mirrors: Mirrors, planned: Planned) -> None:
        """Write the host's table, with every value in the range that it has in a batch of these counts."""
        rows, tokens = planned.rows, planned.tokens
        queries, pages, last, ends = parts
        if planned.causal:
            np.minimum(self._array_of(mirrors.cu_seqlen)[: rows + 1], tokens, out=queries)
            np.maximum(queries, 0, out=queries)
            queries[0], queries[rows] = 0, tokens
            np.maximum.accumulate(queries, out=queries)
        else:
            queries[:] = self._one_each[: rows + 1]
        np.minimum(self._array_of(mirrors.cu_num_pages)[: rows + 1], self.num_entries, out=pages)
        np.maximum(pages, 0, out=pages)
        np.maximum.accumulate(pages, out=pages)
        np.minimum(self._array_of(mirrors.last_page_len)[:rows], self.geometry.tokens_per_block, out=last)
        np.maximum(last, 1, out=last)
        ends[:] = self._array_of(mirrors.seq_len_with_cache)[:rows]

    def _start(self, planned: Planned, slot: _Slot) -> None:
        """Plan, unless the wrapper's last plan is the batch's too, and start the copies to the device."""
        self.table.copy_(slot.table, non_blocking=True)
        (queries, pages, *_), host = slot.parts(planned.rows)
        ranges = queries.tobytes() + pages.tobytes() if self._is_known else b""
        if ranges and ranges == planned.ranges:
            self._use_table(planned)
            self.ring.copies_started(slot)
            return
        planned.ranges = b""
        planned.wrapper._pin_memory_int_workspace_buffer = slot.workspace
        if self._is_known and getattr(planned.wrapper, "_cached_module", None) is not None:
            self._plan_again(planned, host)
        else:
            self._plan_first(planned, host)
        planned.ranges = ranges
        self.ring.copies_started(slot)
        if planned.graph is not None:
            layout = tuple(planned.wrapper._plan_info)
            if planned.layout not in (None, layout):
                raise RuntimeError(
                    f"FlashInfer's plan for the device graph {planned.graph!r} has another layout than the one that "
                    f"was captured: {layout} after {planned.layout}"
                )
            planned.layout = layout

    def _plan_first(self, planned: Planned, host: tuple[torch.Tensor, ...]) -> None:
        """Through FlashInfer's front door, which also compiles and loads the kernels."""
        queries, pages, last, _ = host
        geometry, wrapper = self.geometry, planned.wrapper
        sizes = (geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, geometry.tokens_per_block)
        options = {"sm_scale": 1.0, "q_data_type": geometry.dtype, "kv_data_type": geometry.dtype}
        if planned.causal:
            wrapper.plan(queries, pages, self.indices, last, *sizes, causal=True, **options)
        else:
            wrapper.plan(pages, self.indices, last, *sizes, **options)
        self._use_table(planned)

    def _plan_again(self, planned: Planned, host: tuple[torch.Tensor, ...]) -> None:
        """The part of FlashInfer's `plan` that depends on the batch; the rest costs several times as much."""
        queries, pages, _, ends = host
        geometry, wrapper = self.geometry, planned.wrapper
        wrapper._plan_info = wrapper._cached_module.plan(
            wrapper._float_workspace_buffer,
            wrapper._int_workspace_buffer,
            wrapper._pin_memory_int_workspace_buffer,
            queries,
            pages,
            ends,
            planned.tokens,
            planned.rows,
            geometry.num_heads,
            geometry.num_kv_heads,
            geometry.tokens_per_block,
            planned.graph is not None,
            geometry.head_dim,
            geometry.head_dim,
            planned.causal,
            _NO_WINDOW,
            _NO_FIXED_SPLIT,
            False,  # splitting the keys is allowed
            0,  # no other kernel beside this one
        )
        self._use_table(planned)

    def _use_table(self, planned: Planned) -> None:
        """Have the kernels read our table: an eager `plan` made copies of its own, of another batch's size."""
        if planned.graph is None:
            wrapper = planned.wrapper
            wrapper._qo_indptr_buf, wrapper._paged_kv_indptr_buf, wrapper._paged_kv_last_page_len_buf, _ = planned.parts
            wrapper._paged_kv_indices_buf = self.indices


def run(planned: Planned, q: torch.Tensor, kv_cache: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend.

    Args:
        planned: what was planned for the batch.
        q: [tokens, heads, dim].
        kv_cache: [pages, 2, kv_heads, tokens_per_block, dim], the new tokens in it.
        scale: factor on the scores.

    Returns:
        [tokens, heads, dim].
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # Dependent launches need the kernel before to signal; ours does not.
    return planned.wrapper.run(q, kv_cache, q_scale=scale, out=out, enable_pdl=False)


# -- planners ----------------------------------------------------------------------------------------------------------

#: by number: a planner for each size that is known; what was planned last stands at the end.
_planners: dict[int, list[FlashInferPlanner]] = {}
_KEPT_IDLE = 4
"""How many planners of one number are kept that serve no device graph: what they hold can be made again."""


def planner_for(
    handle: int, geometry: PlanGeometry, max_rows: int, num_entries: int, device: torch.device
) -> FlashInferPlanner:
    """The planner that a consumer's graph names by a number, made at its first plan with these sizes.

    Copies of a graph have its number, and so may a graph that was pickled elsewhere. Those of other sizes have planners
    of their own; those of the same sizes share one, because between a plan and the attention that it is for, no other
    plan is made.
    """
    known = _planners.get(handle)
    if known is not None:
        last = known[-1]
        if last.fits(geometry, max_rows, num_entries, device):
            return last
    found = _found(handle, geometry, max_rows, num_entries, device)
    return _new_planner(handle, geometry, max_rows, num_entries, device) if found is None else found


def _found(handle: int, *sizes: Any) -> FlashInferPlanner | None:
    """The planner of that number and these sizes, which goes to the end."""
    known = _planners.get(handle, [])
    for place, candidate in enumerate(known):
        if candidate.fits(*sizes):
            known.append(known.pop(place))
            return candidate
    return None


def _new_planner(handle: int, *sizes: Any) -> FlashInferPlanner:
    _drop_those_done_with()
    made = FlashInferPlanner(*sizes)
    known = _planners.setdefault(handle, [])
    idle = [candidate for candidate in known if not candidate.serves_graphs]
    for oldest in idle[: max(0, len(idle) + 1 - _KEPT_IDLE)]:
        known.remove(oldest)
    known.append(made)
    return made


def _drop_those_done_with() -> None:
    """Free planners of models that are gone.

    Whoever frees a graph may do so at any moment, between another's plan and its attention too, so it only leaves a
    note. Where a planner is made, no attention is waiting for an earlier plan.
    """
    for handle, known in list(_planners.items()):
        left = [candidate for candidate in known if not candidate.is_done_with]
        if left:
            known[:] = left
        else:
            del _planners[handle]


def known_planner(
    handle: int, geometry: PlanGeometry, max_rows: int, num_entries: int, device: torch.device
) -> FlashInferPlanner:
    """The planner of that number and these sizes; the attention that follows runs with it.

    Raises:
        RuntimeError: nothing was planned for it yet.
    """
    found = _found(handle, geometry, max_rows, num_entries, device)
    if found is None:
        raise RuntimeError(f"planner {handle} is to be captured before anything of these sizes was planned for it")
    return found


def planner(handle: int) -> FlashInferPlanner:
    """The planner of that number for which a plan was made last.

    Raises:
        RuntimeError: nothing was planned for it yet.
    """
    try:
        return _planners[handle][-1]
    except KeyError:
        raise RuntimeError(f"the attention of planner {handle} was called before anything was planned for it") from None


def _forget(graph: Hashable) -> None:
    for known in _planners.values():
        for candidate in known:
            candidate.forget(graph)


on_forget(_forget)
