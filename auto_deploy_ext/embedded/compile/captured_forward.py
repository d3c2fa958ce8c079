"""CapturedForward: an orchestrator's extend-only batches as device graphs, the host's part of them included."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...active_args import META_KEY, module_at, wrapped_graph
from ...hostfuncs.drains import LAUNCHES_MARK
from ...orchestrator import bind_variants, find_interface_arg, find_orchestrator, own_forward, trace_variants
from ...orchestrator.dispatch import dispatcher_of
from ...reports.capture import CaptureError
from ..graph_runner import GraphRunner
from .captured_module import CapturedModule, CaptureStats
from .layers import owner_for

logger = logging.getLogger("auto_deploy_ext")

#: buffers that only the set-up of a batch reads: their lengths do not tell graphs apart.
_OVERLAP_BUFFERS = frozenset({"_gather_idx", "_mask_scatter_indices", "_gather_slot_idx"})
_OVERLAP_MUTATIONS = frozenset({"rescatter_input_ids_", "offset_with_new_lens_"})

_numbers = itertools.count(1)


@dataclass(frozen=True)
class HostState:
    """What the host knows of a batch: counts, lengths and versions."""

    batch_info: torch.Tensor
    lengths: dict[str, int]
    device_version: dict[str, int]
    mirror_version: dict[str, int]

    @classmethod
    def of(cls, info: Any) -> HostState:
        """Copy it."""
        buffer = info._input_buffer
        lengths = {name: buffer.get_current_length(name) for name in buffer.tensor_names}
        batch_info = info.batch_info.serialize().clone()
        return cls(batch_info, lengths, dict(buffer.device_version), dict(buffer.mirror_version))

    def restore(self, info: Any) -> None:
        """Put it back."""
        buffer = info._input_buffer
        info.batch_info.serialize().copy_(self.batch_info)
        for name, length in self.lengths.items():
            buffer.set_current_length(name, length)
        buffer.device_version.update(self.device_version)
        buffer.mirror_version.update(self.mirror_version)


@dataclass(frozen=True)
class _HostChange:
    """What a forward changes of it.

    Attributes:
        batch_info: the counts afterwards.
        lengths: of each buffer whose length changes, the new one.
        growth: of each page table, by how much it grows, up to its capacity.
        writes: how often each buffer is written on the device.
    """

    batch_info: torch.Tensor
    lengths: dict[str, int]
    growth: dict[str, tuple[int, int]]
    writes: dict[str, int]

    @classmethod
    def between(cls, info: Any, before: HostState, after: HostState) -> _HostChange | None:
        """The difference; None where it does not tell what another batch's will be."""
        buffer = info._input_buffer
        lengths, growth = {}, {}
        for name, length in after.lengths.items():
            if buffer.is_truncatable(name):
                capacity = buffer.get_capacity(name)
                if length == capacity and length != before.lengths[name]:
                    return None  # it might have grown further
                growth[name] = length - before.lengths[name], capacity
            elif length != before.lengths[name]:
                lengths[name] = length
        writes = {
            name: version - max(before.device_version[name], before.mirror_version[name])
            for name, version in after.device_version.items()
            if version != before.device_version[name]
        }
        return cls(after.batch_info, lengths, growth, writes)

    def applied_to(self, info: Any) -> Callable[[], None]:
        """What sets the state that follows from the present one, whatever happens to that in the meantime."""
        buffer = info._input_buffer
        lengths = {n: min(buffer.get_current_length(n) + more, cap) for n, (more, cap) in self.growth.items()}
        lengths.update(self.lengths)
        versions = {
            name: max(buffer.device_version[name], buffer.mirror_version[name]) + count
            for name, count in self.writes.items()
        }

        def apply() -> None:
            info.batch_info.serialize().copy_(self.batch_info)
            for name, length in lengths.items():
                buffer.set_current_length(name, length)
            buffer.device_version.update(versions)

        return apply


@dataclass
class _Entry:
    """A captured forward.

    Attributes:
        objects: see `captured_objects`; not kept alive, so that an interface that is resized does not need memory
            twice.
        addresses: parameters, and where they lay.
    """

    replay: Callable[[], object]
    tensors: list[torch.Tensor]
    spec: Any
    change: _HostChange
    objects: list[weakref.ref[Any]]
    addresses: list[tuple[torch.Tensor, int]]

    def result(self) -> Any:
        """A copy of what the last replay left behind."""
        return tree_unflatten([tensor.clone() for tensor in self.tensors], self.spec)


class CapturedForward:
    """Runs the variants of an orchestrator; what a `Dispatcher` has as its `runner`.

    1. The first extend-only batch of a size runs eagerly, and what it changes of the host's state is noted; the second
       is captured; all later ones are replays, after which the host's state is what an eager run would have left.
    2. All other batches run eagerly, and so does whatever is called while gradients are recorded.
    3. A captured forward takes page tables of any length: it is captured with tables as long as their memory.
    4. Results are copies: they may be kept while the next batch runs.
    5. If the interface's memory, a consumer or a parameter has moved, all graphs are dropped and captured anew.
    6. A copy, also a pickled one, starts without graphs.

    Of the parameters, only the memory of the first and of the last is looked at, because that of all would take the
    host some 20 us a step: after `param.data = other` on one of the others, or after parameters were replaced by new
    ones (`load_state_dict(assign=True)`), call `forget_graphs`.

    Args:
        batch_sizes: numbers of rows that are captured.
        max_draft_len: drafts in an extend row.

    Attributes:
        stats: how batches ran.
    """

    def __init__(self, batch_sizes: Iterable[int], max_draft_len: int) -> None:
        self.batch_sizes = tuple(sorted(set(batch_sizes)))
        self.max_draft_len = max_draft_len
        self.stats = CaptureStats()
        self._runner: GraphRunner | None = None
        self._pool: Any = None
        self._entries: dict[Hashable, _Entry] = {}
        self._changes: dict[Hashable, _HostChange] = {}

    @classmethod
    def bind(cls, mod: nn.Module, cm: Any, batch_sizes: Iterable[int], max_draft_len: int) -> CapturedForward:
        """Have a wrapper's dispatcher run captured forwards; one that no pass has rewritten gets one.

        Raises:
            CaptureError: a submodule launches host functions, whose arguments differ from batch to batch.
        """
        launching = [name for name, module in mod.named_modules() if getattr(module, LAUNCHES_MARK, False)]
        if launching:
            raise CaptureError(
                f"capture: full, but {', '.join(launching)} launches host functions with arguments of each batch's "
                "own: use capture: consumers, or let the engine of such a model capture its forward itself"
            )
        dispatcher = dispatcher_of(mod)
        if dispatcher is None:
            owner = find_orchestrator(mod)
            dispatcher = bind_variants(owner, find_interface_arg(own_forward(owner)), trace_variants(owner, cm))
        runner = cls(batch_sizes, max_draft_len)
        dispatcher.runner = runner
        return runner

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedForward:
        return CapturedForward(self.batch_sizes, self.max_draft_len)

    def __reduce__(self) -> tuple[Any, ...]:
        return CapturedForward, (self.batch_sizes, self.max_draft_len)

    # ---------------------------------------------------------------- calls

    def __call__(self, variant: Any, interface: Any) -> Any:
        """Run a variant on the batch that the interface holds, which it fits."""
        key = self._key(variant, interface)
        if key is None:
            self.stats.eager += 1
            return variant(interface)
        entry = self._entries.get(key)
        if entry is None:
            return self._first_calls(key, variant, interface)
        if not _is_current(entry, variant, interface):
            self.forget_graphs()
            return self._first_calls(key, variant, interface)
        apply = entry.change.applied_to(interface.info)
        entry.replay()
        apply()
        self.stats.replays += 1
        return entry.result()

    def _key(self, variant: Any, interface: Any) -> Hashable | None:
        """All host state that a forward depends on; None: run eagerly."""
        info = interface.info
        counts = tuple(info.batch_info.serialize().tolist())
        prefill, _, extend, extend_tokens, decode = counts[:5]
        if prefill or decode or extend not in self.batch_sizes or extend_tokens != extend * (1 + self.max_draft_len):
            return None
        if torch.is_grad_enabled() or info._extra_args:
            return None
        if info.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        lengths = info._input_buffer._lengths
        names = _telling_names(variant, info._input_buffer)
        inference = torch.is_inference_mode_enabled()
        # By weak references: of a freed one the `id` may be another's, and its reference equals no other.
        owners = weakref.ref(variant), weakref.ref(interface)
        return *owners, inference, info.activity, counts, tuple([lengths[name] for name in names])

    # ---------------------------------------------------------------- capturing

    def _first_calls(self, key: Hashable, variant: Any, interface: Any) -> Any:
        """Note what an eager run changes on the host, or capture and replay."""
        info = interface.info
        before = HostState.of(info)
        change = self._changes.get(key)
        if change is None:
            self.stats.eager += 1
            result = variant(interface)
            noted = _HostChange.between(info, before, HostState.of(info))
            if noted is not None:
                self._changes[key] = noted
            return result
        entry = self._capture(key, variant, interface, before, change)
        self._entries[key] = entry
        return entry.result()

    def _capture(self, key: Hashable, variant: Any, interface: Any, before: HostState, change: _HostChange) -> _Entry:
        info = interface.info
        apply = change.applied_to(info)
        if self._runner is None:
            self._runner = GraphRunner(owner_for(info._input_buffer.get_view("input_ids").device))
            self._pool = self._runner.owner.layer.new_pool()
        number = next(_numbers)
        for name, (_, capacity) in change.growth.items():
            info._input_buffer.set_current_length(name, capacity)
        try:
            result = self._runner.capture(number, lambda: variant(interface), self._pool)
        except Exception as error:
            before.restore(info)
            raise CaptureError(
                f"the forward of {type(variant.owner).__name__} cannot be captured for {info.num_sequences} rows: "
                f"{type(error).__name__}: {error}\ncapture: consumers leaves the orchestrator outside of graphs"
            ) from error
        apply()
        self.stats.captures += 1
        logger.info("captured the forward of %s for %d rows", type(variant.owner).__name__, info.num_sequences)
        tensors, spec = tree_flatten(result)
        replay = self._runner.replayer(number)
        objects = [weakref.ref(found) for found in captured_objects(variant, interface)]
        entry = _Entry(replay, tensors, spec, change, objects, parameter_addresses(variant))
        if not self._runner.owner.layer.capture_runs:
            replay()
        return entry

    def forget_graphs(self) -> None:
        """Free all graphs; they are captured anew when batches come."""
        if self._runner is not None:
            self._runner.owner.layer.synchronize()
            self._runner.release()
        self._runner, self._pool = None, None
        self._entries, self._changes = {}, {}


def _telling_names(variant: Any, buffer: Any) -> tuple[str, ...]:
    """The buffers whose lengths may decide what a variant does; page tables may be of any length."""
    known = variant.__dict__.get("_telling_names")
    if known is None or known[0] != len(buffer.tensor_names):
        called = {node.args[1] for node in variant.graph.nodes if len(node.args) > 1 and isinstance(node.args[1], str)}
        left_out = frozenset() if called & _OVERLAP_MUTATIONS else _OVERLAP_BUFFERS
        names = [n for n in buffer.tensor_names if n not in left_out and not buffer.is_truncatable(n)]
        known = variant.__dict__["_telling_names"] = (len(buffer.tensor_names), tuple(names))
    return known[1]


def captured_objects(variant: Any, interface: Any) -> list[Any]:
    """What is replaced as a whole when memory that a graph knows moves, or when what it was captured of changes."""
    buffer = interface.info._input_buffer
    modules = consumer_modules(variant)
    graphs = [graph for graph in map(_graph_of, modules) if graph is not None]
    memory = (*interface._caches.values(), *buffer._device_regions.values())
    return [variant, interface, *memory, *modules, *(type(graph).forward for graph in graphs)]


def _graph_of(module: nn.Module) -> nn.Module | None:
    """The graph that a consumer is or wraps; of a captured one it is known where, and that is asked at every replay."""
    return module.graph_module if isinstance(module, CapturedModule) else wrapped_graph(module)


def consumers_of(variant: Any) -> tuple[str, ...]:
    """Qualified names of the consumers that an orchestrator graph calls."""
    known = variant.__dict__.get("_consumers")
    if known is None:
        nodes = variant.graph.find_nodes(op="call_module")
        consumers = [node for node in nodes if META_KEY in node.meta] or nodes
        paths = dict.fromkeys(str(node.target) for node in consumers)
        known = variant.__dict__["_consumers"] = tuple(paths)
    return known


def consumer_modules(variant: Any) -> list[nn.Module]:
    """The consumers themselves, as they are now."""
    return [module_at(variant.owner, path) for path in consumers_of(variant)]


def parameter_addresses(variant: Any) -> list[tuple[torch.Tensor, int]]:
    """The first and the last parameter: a module that is moved keeps its parameters and changes their memory."""
    parameters = list(variant.owner.parameters())
    return [(parameter, parameter.data_ptr()) for parameter in (*parameters[:1], *parameters[-1:])]


def _is_current(entry: _Entry, variant: Any, interface: Any) -> bool:
    objects = captured_objects(variant, interface)
    same = len(objects) == len(entry.objects) and all(ref() is o for ref, o in zip(entry.objects, objects, strict=True))
    return same and all(tensor.data_ptr() == address for tensor, address in entry.addresses)
