"""SegmentedForward: an orchestrator's extend-only batches as a few device graphs with the host's work in between."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ...orchestrator import (
    Dispatcher,
    OrchestratorError,
    UntraceableError,
    bind_variants,
    dispatcher_of,
    find_interface_arg,
    find_orchestrator,
    own_forward,
    rebound_of,
    trace_variants,
)
from ...reports.capture import CaptureError
from ...runtime import fused_mutations, host_mirrors, sanitizer
from ...runtime.fused_mutations import COPY_NAME, FUSIBLE, SWITCH_NAME, Part
from ...runtime.hooks import HookedForward, has_other_hooks
from ...runtime.refresh import is_placed
from ..custom_ops.plan_ops import plan_for_graph
from ..graph_runner import GraphRunner
from .captured_forward import CapturedForward, HostState, captured_objects, consumer_modules, parameter_addresses
from .captured_module import CapturedModule, forget_all
from .layers import owner_for
from .plan_calls import update_plan
from .segments import Role, is_python, parts_of, reason_against_segments, role_of

logger = logging.getLogger("auto_deploy_ext")

#: one step of a replay, which is given the interface.
Step = Callable[[Any], object]

#: called before and after a launch.
Watch = tuple[Callable[[], None], Callable[[], None]]
#: called when a step is about to draft, with those of its results that are final and stay as they are; None: whatever
#: it has computed by then.
Told = Callable[["tuple[torch.Tensor, ...] | None"], None]

_numbers = itertools.count(1)
_NOTHING: Mapping[int, torch.Tensor] = MappingProxyType({})
_HOOKED = "_told_of_hooks"
_REASON = "_reason_against_segments"


@dataclass(frozen=True)
class _Given:
    """Stands in the arguments of a host call for something that is looked up at every replay.

    Attributes:
        cell: where an earlier host call's result is kept; negative: none.
        info: the interface's SequenceInfo rather than the interface itself.
    """

    cell: int = -1
    info: bool = False


@dataclass
class _Entry:
    """A captured forward.

    Attributes:
        steps: what a replay does, in order.
        leaves: of the result; the tensors among them are overwritten by the next replay.
        launches: how many of the steps launch a device graph.
        with_consumers: which of the steps launch one that contains a consumer.
        drafting: the second of these, before which the first consumer's answer is known; None: there is one at most.
        early: which of the result's tensors are final when that step begins.
        objects: see `captured_objects`, and what else tells that mirrors have moved; not kept alive.
        addresses: parameters, and where they lay.
    """

    steps: list[Step]
    leaves: list[Any]
    spec: Any
    launches: int
    with_consumers: frozenset[int]
    drafting: int | None
    early: tuple[int, ...]
    objects: list[weakref.ref[Any]]
    addresses: list[tuple[torch.Tensor, int]]
    tensors: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        """Pick the tensors."""
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def run(self, interface: Any) -> Any:
        """Replay it."""
        for step in self.steps:
            step(interface)
        return self.result()

    def run_observed(self, interface: Any, watch: Watch | None, told: Told | None) -> Any:
        """Replay it, with calls around each launch of a graph that contains a consumer, or when drafts begin."""
        early: dict[int, torch.Tensor] = {}
        for place, step in enumerate(self.steps):
            if told is not None and place == self.drafting:
                early = self._copied(self.early)
                told(tuple(early.values()))
            if watch is not None and place in self.with_consumers:
                watch[0]()
                step(interface)
                watch[1]()
            else:
                step(interface)
        return self.result(early)

    def result(self, early: Mapping[int, torch.Tensor] = _NOTHING) -> Any:
        """A copy of what the last replay left behind; of some tensors it has been made already."""
        if early:
            late = [i for i in range(len(self.tensors)) if i not in early]
            made = {**early, **self._copied(late)}
            copies = [made[i] for i in range(len(self.tensors))]
        else:
            copies = _copies(self.tensors)
        given = iter(copies)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)

    def _copied(self, which: Sequence[int]) -> dict[int, torch.Tensor]:
        return dict(zip(which, _copies([self.tensors[i] for i in which]), strict=True))

    def is_current(self, variant: Any, interface: Any) -> bool:
        """Whether everything still lies where it did when this was captured."""
        objects = _objects(variant, interface)
        same = len(objects) == len(self.objects) and all(r() is o for r, o in zip(self.objects, objects, strict=True))
        return same and all(tensor.data_ptr() == address for tensor, address in self.addresses)


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in one launch."""
    copies = [torch.empty_like(tensor) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, tensors)
    return copies


def _objects(variant: Any, interface: Any) -> list[Any]:
    info = interface.info
    mirrors = info._input_buffer._mirror_regions.values()
    return [*captured_objects(variant, interface), info, info.batch_info, *mirrors]


class SegmentedForward(CapturedForward):
    """Runs the variants of an orchestrator; what a `Dispatcher` has as its `runner`.

    1. A rewritten orchestrator is cut where the host is needed: before a consumer that plans, and around transfers,
       waits, snapshots and mutations that copy to the host. All between two cuts, consumers included, is one device
       graph. A replay runs the host's calls as they are, with one launch for each graph in between.
    2. What a captured mutation does on the host (counts, lengths, versions, arithmetic on mirrors) is done after the
       launch of its graph, so that the host calls that follow find what they would find in an eager run.
    3. Rules 1 to 6 of `CapturedForward` hold. Batches that run eagerly run the captured consumers, except the first of
       a size.
    4. An orchestrator that cannot be split, one that is being sanitized or whose consumers have hooks, runs as with
       `capture: consumers`; the log says why.
    """

    _warm: set[Hashable]
    _plan_keys: list[Hashable]

    def __init__(self, batch_sizes: Iterable[int], max_draft_len: int) -> None:
        super().__init__(batch_sizes, max_draft_len)
        self._watch: Watch | None = None
        self._drafter: tuple[nn.Module, Told] | None = None
        self._segmented: dict[Hashable, _Entry] = {}
        self._warm = set()
        self._plan_keys = []
        weakref.finalize(self, forget_all, self._plan_keys).atexit = False

    def __deepcopy__(self, memo: dict[int, Any]) -> SegmentedForward:
        return SegmentedForward(self.batch_sizes, self.max_draft_len)

    def __reduce__(self) -> tuple[Any, ...]:
        return SegmentedForward, (self.batch_sizes, self.max_draft_len)

    @property
    def launches_per_step(self) -> list[int]:
        """For each captured forward, how many device graphs a replay launches."""
        return [entry.launches for entry in self._segmented.values()]

    @contextlib.contextmanager
    def watched(self, before: Callable[[], None], after: Callable[[], None]) -> Iterator[None]:
        """While active, replays make these calls around each launch of a graph that contains a consumer."""
        previous, self._watch = self._watch, (before, after)
        try:
            yield
        finally:
            self._watch = previous

    @contextlib.contextmanager
    def telling(self, drafter: nn.Module, told: Told) -> Iterator[None]:
        """While active, `told` is called when a batch begins to draft: a hook would keep it from being replayed.

        A replay calls it before the second launch of a graph that contains a consumer, with copies of the results that
        are final by then, which are what it returns later on; not at all, where there is no such launch. A batch that
        runs eagerly calls it with None before each call of the drafter.
        """
        previous, self._drafter = self._drafter, (drafter, told)
        try:
            yield
        finally:
            self._drafter = previous

    # ---------------------------------------------------------------- calls

    def __call__(self, variant: Any, interface: Any) -> Any:
        """Run a variant on the batch that the interface holds, which it fits."""
        key = None if _must_stay_whole(variant, interface) else self._key(variant, interface)
        if key is None:
            return self._run_eagerly(variant, interface)
        entry = self._segmented.get(key)
        if entry is not None and entry.is_current(variant, interface):
            self.stats.replays += 1
            if self._watch is None and self._drafter is None:
                return entry.run(interface)
            return entry.run_observed(interface, self._watch, None if self._drafter is None else self._drafter[1])
        if entry is not None:
            self.forget_graphs()
        if key not in self._warm:
            self._warm.add(key)
            with _eager_consumers(variant):
                return self._run_eagerly(variant, interface)
        return self._capture_segments(key, variant, interface)

    def _run_eagerly(self, variant: Any, interface: Any) -> Any:
        self.stats.eager += 1
        if self._drafter is None:
            return variant(interface)
        drafter, told = self._drafter
        handle = drafter.register_forward_pre_hook(lambda *_: told(None))
        try:
            return variant(interface)
        finally:
            handle.remove()

    def _capture_segments(self, key: Hashable, variant: Any, interface: Any) -> Any:
        info = interface.info
        if self._runner is None:
            self._runner = GraphRunner(owner_for(info._input_buffer.get_view("input_ids").device))
            self._pool = self._runner.owner.layer.new_pool()
        cutter = _Cutter(self._runner, self._pool, variant, interface, self._plan_keys)
        try:
            leaves, spec = cutter.run()
        except Exception as error:
            raise CaptureError(
                f"the forward of {type(variant.owner).__name__} cannot be captured in segments for "
                f"{info.num_sequences} rows: {type(error).__name__}: {error}\n"
                "capture: consumers leaves the orchestrator outside of graphs"
            ) from error
        objects = [weakref.ref(found) for found in _objects(variant, interface)]
        entry = _Entry(
            cutter.steps,
            leaves,
            spec,
            cutter.launches,
            frozenset(cutter.with_consumers),
            *cutter.drafting(leaves),
            objects,
            parameter_addresses(variant),
        )
        self._segmented[key] = entry
        self.stats.captures += 1
        logger.info(
            "captured the forward of %s for %d rows in %d graphs",
            type(variant.owner).__name__,
            info.num_sequences,
            cutter.launches,
        )
        return entry.result()

    def forget_graphs(self) -> None:
        """Free all graphs; they are captured anew when batches come."""
        super().forget_graphs()
        forget_all(self._plan_keys)
        self._segmented, self._warm = {}, set()


def bind_segments(mod: nn.Module, cm: Any, batch_sizes: Iterable[int], max_draft_len: int) -> SegmentedForward | None:
    """Have a wrapper's dispatcher run segments; one that no pass has rewritten gets one.

    Returns:
        What it runs; None: it is left as it is, and the log says why.
    """
    dispatcher = dispatcher_of(mod)
    if dispatcher is None:
        try:
            dispatcher = _new_dispatcher(mod, cm)
        except (OrchestratorError, UntraceableError) as error:
            logger.warning("capture: segments is not possible, so consumers are captured instead: %s", error)
            return None
    runner = SegmentedForward(batch_sizes, max_draft_len)
    dispatcher.runner = runner
    for variant in dispatcher.variants:
        _why_not(variant)
    return runner


def _new_dispatcher(mod: nn.Module, cm: Any) -> Dispatcher:
    if isinstance(rebound_of(mod), HookedForward):
        raise UntraceableError("mirrors are brought up to date on demand (mode: hooks), by calls that nothing traces")
    owner = find_orchestrator(mod)
    return bind_variants(owner, find_interface_arg(own_forward(owner)), trace_variants(owner, cm))


def _why_not(variant: Any) -> str | None:
    """Why a variant cannot be split, which is told once."""
    if _REASON not in variant.__dict__:
        reason = variant.__dict__[_REASON] = reason_against_segments(variant)
        if reason is not None:
            logger.warning("%r cannot be split, so consumers are captured instead: %s", variant.variant, reason)
    return variant.__dict__[_REASON]


def _must_stay_whole(variant: Any, interface: Any) -> bool:
    """Whether somebody looks on who must see each call, or the variant cannot be split."""
    if _why_not(variant) is not None or sanitizer.is_watched(interface.info._input_buffer):
        return True
    own = vars(interface.info)
    if not FUSIBLE.isdisjoint(own):
        return True
    return _are_hooked(variant)


def _are_hooked(variant: Any) -> bool:
    """Whether consumers have hooks, which must see each call; it is told once."""
    if not any(map(has_other_hooks, consumer_modules(variant))):
        return False
    if _HOOKED not in variant.__dict__:
        variant.__dict__[_HOOKED] = True
        logger.warning(
            "%r runs with consumers captured instead of segments, as long as consumers have forward hooks",
            variant.variant,
        )
    return True


@contextlib.contextmanager
def _eager_consumers(variant: Any) -> Iterator[None]:
    """While active, captured consumers run as they are: what they captured now, nobody would replay."""
    found = set(consumer_modules(variant))
    captured = [(module, module._sizes) for module in found if isinstance(module, CapturedModule)]
    for module, _ in captured:
        module._sizes = frozenset()
    try:
        yield
    finally:
        for module, sizes in captured:
            module._sizes = sizes


# -- capturing ---------------------------------------------------------------------------------------------------------


class _Cutter:
    """Captures a variant for one batch and runs it on the way, segment by segment.

    Args:
        runner: captures.
        pool: memory of the graphs. What crosses from one to a later one is kept until all are captured; graphs of other
            batches may be given it then, because a replay computes all of it anew.
        variant: the orchestrator graph.
        interface: it holds the batch.
        plan_keys: how planners know the graphs; each is added before anything is planned for it.

    Attributes:
        steps: what a replay does.
        launches: how many graphs there are.
        with_consumers: the steps that launch one with a consumer.
    """

    def __init__(self, runner: GraphRunner, pool: Any, variant: Any, interface: Any, plan_keys: list[Hashable]) -> None:
        self.steps: list[Step] = []
        self.launches = 0
        self.with_consumers: list[int] = []
        self._plan_keys = plan_keys
        self._key_of: dict[Hashable, Hashable] = {}
        self._runner = runner
        self._pool = pool
        self._variant = variant
        self._owner = variant.owner
        self._interface = interface
        self._values: dict[Node, Any] = {}
        self._cells: list[Any] = []
        self._cell_of: dict[Node, int] = {}
        self._plans: dict[Node, dict[str, Any]] = {}
        self._pending: list[Node] = []
        self._has_effects = False
        #: of the tensors that are there before the second graph with a consumer: how often each had been written.
        self._versions: dict[int, int] = {}

    def run(self) -> tuple[list[Any], Any]:
        """Do it; gives the leaves of the result, where replays leave them, and its form."""
        output: Any = None
        for node in self._variant.graph.nodes:
            if node.op == "placeholder":
                self._values[node] = self._interface
            elif node.op == "output":
                output = node
            else:
                self._take(node)
        self._flush()
        return tree_flatten(map_arg(output.args[0], self._values.__getitem__))

    def drafting(self, leaves: Sequence[Any]) -> tuple[int | None, tuple[int, ...]]:
        """The step that launches the second graph with a consumer; which tensors among the leaves are final then."""
        if len(self.with_consumers) < 2:
            return None, ()
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        owned = {
            _memory(value) for value in _objects(self._variant, self._interface) if isinstance(value, torch.Tensor)
        }
        final = [
            i
            for i, tensor in enumerate(tensors)
            if id(tensor) in self._versions
            and self._versions[id(tensor)] == tensor._version
            and _memory(tensor) not in owned
        ]
        return self.with_consumers[1], tuple(final)

    def _take(self, node: Node) -> None:
        role = role_of(node, self._owner)
        if role is Role.MUTATION:
            parts, _ = parts_of(node) or ((), ())
            role = Role.HOST if fused_mutations.copies_to_host(self._interface.info, parts) else role
        if role is Role.HOST:
            self._call_on_host(node)
            return
        if role is Role.PLAIN and not self._has_effects and self._is_known_now(node):
            with _whole_tables(self._interface.info):
                self._values[node] = _call(node, self._values.__getitem__)
            return
        if role is Role.CONSUMER:
            self._plan(node)
        self._pending.append(node)
        self._has_effects |= role is not Role.PLAIN

    def _is_known_now(self, node: Node) -> bool:
        """Whether a node merely looks something up, or computes with numbers, and may do so outside of a graph."""
        if not is_python(node) or not all(inner in self._values for inner in node.all_input_nodes):
            return False
        on_tensors = any(isinstance(self._values[inner], torch.Tensor) for inner in node.all_input_nodes)
        return not on_tensors or node.target is getattr

    def _is_free(self, nodes: Sequence[Node]) -> bool:
        """Whether a host call that takes these values may go before what is pending, which changes no metadata."""
        return not self._has_effects and all(node in self._values for node in nodes)

    # ---------------------------------------------------------------- the host's calls

    def _call_on_host(self, node: Node) -> None:
        if not is_placed(node) or not self._is_free(node.all_input_nodes):
            self._flush()
        cell = -1
        if node.users:
            cell = self._cell_of[node] = len(self._cells)
            self._cells.append(None)
        args = tuple(map(self._template, node.args))
        kwargs = {name: self._template(value) for name, value in node.kwargs.items()}
        step = _host_step(node.target, args, kwargs, self._cells, cell)
        self._do(step)
        self._values[node] = self._cells[cell] if node.users else None

    def _template(self, argument: Any) -> Any:
        """What stands for an argument until it is looked up."""
        if isinstance(argument, Node):
            if argument in self._cell_of:
                return _Given(self._cell_of[argument])
            value = self._values[argument]
            if value is self._interface:
                return _Given()
            return _Given(info=True) if value is self._interface.info else value
        return argument

    def _do(self, step: Step) -> None:
        step(self._interface)
        self.steps.append(step)

    def _plan(self, node: Node) -> None:
        """Have a consumer's plans made before the graph that it will be part of."""
        module = self._owner.get_submodule(str(node.target))
        if not isinstance(module, CapturedModule) or not module._plan_calls:
            return
        arguments = {**dict(zip(module._names, node.args, strict=False)), **node.kwargs}
        names = {a.name for call in module._plan_calls for a in tree_leaves((call.args, call.kwargs)) if _has_name(a)}
        taken = [value for name, value in arguments.items() if name in names and isinstance(value, Node)]
        if not self._is_free(taken):
            self._flush()
        given = {name: map_arg(arguments[name], self._values.__getitem__) for name in names}
        info = self._interface.info
        kind = id(module), tuple(info.batch_info.serialize().tolist())
        key = self._key_of.get(kind)
        if key is None:
            key = self._key_of[kind] = ("segments", next(_numbers))
            self._plan_keys.append(key)
        made: list[Any] = []
        step = _plan_step(key, [_bound(call, given) for call in module._plan_calls], made)
        self._do(step)
        self._plans[node] = {call.name: plan for call, plan in zip(module._plan_calls, made, strict=True)}

    # ---------------------------------------------------------------- graphs

    def _flush(self) -> None:
        """Capture what is pending, launch it, and do on the host what belongs to it."""
        nodes, self._pending, self._has_effects = self._pending, [], False
        if not nodes:
            return
        inside = set(nodes)
        kept = {node for node in nodes if not inside.issuperset(node.users)}
        for node in nodes:
            if role_of(node, self._owner) in (Role.MUTATION, Role.COUNTS):
                kept |= inside.intersection(node.all_input_nodes)
        with_consumer = any(role_of(node, self._owner) is Role.CONSUMER for node in nodes)
        if with_consumer and len(self.with_consumers) == 1:
            known = tree_leaves(list(self._values.values()))
            counted = [leaf for leaf in known if isinstance(leaf, torch.Tensor) and not leaf.is_inference()]
            self._versions = {id(tensor): tensor._version for tensor in counted}
        segment = _Segment(self._variant, self._interface, nodes, kept, self._values, self._plans)
        number = next(_numbers)
        self._interface.info._input_buffer.settle()
        # What is captured refers to the wrapper, so the runner, which the wrapper owns, must not keep it alive.
        alive = weakref.ref(segment)
        self._runner.capture(number, lambda: _run_alive(alive), self._pool)
        replay = self._runner.replayer(number)
        runs = self._runner.owner.layer.capture_runs
        if not runs:
            replay()
        if with_consumer:
            self.with_consumers.append(len(self.steps))
        self.steps.append(_launch_step(replay, segment if runs else None))
        self.launches += 1
        for node in nodes:
            role = role_of(node, self._owner)
            if role is Role.MUTATION:
                mutation = parts_of(node)
                assert mutation is not None
                self._do(_note_step(mutation[0], [self._template(operand) for operand in mutation[1]], self._cells))
            elif role is Role.COUNTS:
                args = map_arg(node.args[2:], self._values.__getitem__)
                kwargs = map_arg(node.kwargs, self._values.__getitem__)
                self._do(_counts_step(str(node.args[1]), args, kwargs))


class _Segment:
    """The nodes of one graph as a function, which leaves the host's state as it was.

    Where ordered calls take the place of graphs it is called again and again; what others take from it stays in the
    same memory, as in a graph.
    """

    def __init__(
        self,
        variant: Any,
        interface: Any,
        nodes: list[Node],
        kept: set[Node],
        values: dict[Node, Any],
        plans: dict[Node, dict[str, Any]],
    ) -> None:
        self._owner = variant.owner
        self._interface = interface
        self._nodes = nodes
        self._kept = kept
        self._values = values
        self._plans = plans
        last: dict[Node, Node] = {}
        for node in nodes:
            last.update(dict.fromkeys([*node.all_input_nodes, node], node))
        self._done: dict[Node, list[Node]] = {}
        for node, user in last.items():
            if node not in kept:
                self._done.setdefault(user, []).append(node)

    def __call__(self) -> None:
        """Run the nodes."""
        info = self._interface.info
        before = HostState.of(info)
        try:
            with _whole_tables(info):
                self._run()
        finally:
            before.restore(info)

    def _run(self) -> None:
        values, own = self._values, dict[Node, Any]()

        def value(node: Node) -> Any:
            return own[node] if node in own else values[node]

        for node in self._nodes:
            own[node] = self._node(node, value)
            for done in self._done.get(node, ()):
                own.pop(done, None)
        for node in self._kept:
            if node not in values:
                values[node] = own[node]
                continue
            for static, new in zip(tree_leaves(values[node]), tree_leaves(own[node]), strict=True):
                if isinstance(static, torch.Tensor) and static.data_ptr() != new.data_ptr():
                    static.copy_(new)

    def _node(self, node: Node, value: Callable[[Node], Any]) -> Any:
        role = role_of(node, self._owner)
        if role is Role.MUTATION:
            known = parts_of(node)
            assert known is not None
            info = map_arg(node.args[0], value)
            _mutate_quietly(info, known[0], [map_arg(operand, value) for operand in known[1]])
            return None
        if role is Role.CONSUMER:
            module = self._owner.get_submodule(str(node.target))
            if isinstance(module, CapturedModule):
                given = {**dict(zip(module._names, node.args, strict=False)), **node.kwargs}
                return module._body(**map_arg(given, value), **self._plans.get(node, {}))
        return _call(node, value, self._owner)


@contextlib.contextmanager
def _whole_tables(info: Any) -> Iterator[None]:
    """While active, page tables are as long as their memory, so that what is captured serves tables of any length."""
    buffer = info._input_buffer
    lengths = {name: buffer.get_current_length(name) for name in buffer.tensor_names if buffer.is_truncatable(name)}
    for name in lengths:
        buffer.set_current_length(name, buffer.get_capacity(name))
    try:
        yield
    finally:
        for name, length in lengths.items():
            buffer.set_current_length(name, length)


def _call(node: Node, value: Callable[[Node], Any], owner: nn.Module | None = None) -> Any:
    """Run a node as FX would."""
    args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
    if node.op == "call_function":
        return node.target(*args, **kwargs)  # type: ignore[operator]
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert owner is not None
    if node.op == "call_module":
        return owner.get_submodule(str(node.target))(*args, **kwargs)
    path, _, name = str(node.target).rpartition(".")
    return getattr(owner.get_submodule(path), name)


def _mutate_quietly(info: Any, parts: tuple[tuple[Any, ...], ...], operands: Sequence[Any]) -> None:
    """The device's side of mutations, and that the host takes note; nothing is copied and no mirror computed."""
    steps, left = [Part(*part) for part in parts], list(operands)
    own = []
    for part in steps:
        own += left[: part.name != SWITCH_NAME]
        left = left[part.num_operands :]
    if len(steps) > 1:
        fused_mutations.mutate_all(info, _quiet_parts(parts), own)
    elif steps[0].name == COPY_NAME:
        strict: dict[str, Any] = {} if steps[0].strict else {"strict": False}
        host_mirrors.mutate(info, COPY_NAME, steps[0].buffer, *own, **strict)
    else:
        host_mirrors.mutate(info, steps[0].name, *own, active_args=())


@functools.lru_cache(maxsize=256)
def _quiet_parts(parts: tuple[tuple[Any, ...], ...]) -> tuple[tuple[Any, ...], ...]:
    """The same mutations, narrowed to nothing; equal parts give the same object, by which runs are known."""
    steps = [Part(*part) for part in parts]
    return tuple(
        tuple(p._replace(active_args=None if p.name == COPY_NAME else (), replays=(), host_operand=None)) for p in steps
    )


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _has_name(argument: Any) -> bool:
    return hasattr(argument, "name")


# -- the steps of a replay ---------------------------------------------------------------------------------------------


def _looked_up(argument: Any, interface: Any, cells: list[Any]) -> Any:
    if type(argument) is not _Given:
        return argument
    if argument.cell >= 0:
        return cells[argument.cell]
    return interface.info if argument.info else interface


def _run_alive(segment: weakref.ref[_Segment]) -> None:
    found = segment()
    assert found is not None
    found()


def _launch_step(replay: Callable[[], object], ordered: _Segment | None) -> Step:
    """Launches a graph; where ordered calls take its place, keeps what they run."""

    def step(interface: Any, kept: _Segment | None = ordered) -> None:
        replay()

    return step


def _host_step(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], cells: list[Any], cell: int) -> Step:
    def step(interface: Any) -> None:
        given = [_looked_up(argument, interface, cells) for argument in args]
        named = {name: _looked_up(argument, interface, cells) for name, argument in kwargs.items()}
        result = target(*given, **named)
        if cell >= 0:
            cells[cell] = result

    return step


def _note_step(parts: tuple[tuple[Any, ...], ...], operands: list[Any], cells: list[Any]) -> Step:
    def step(interface: Any) -> None:
        given = [_looked_up(operand, interface, cells) for operand in operands]
        fused_mutations.host_side(interface.info, parts, given)

    return step


def _counts_step(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
    def step(interface: Any) -> None:
        getattr(interface.info.batch_info, name)(*args, **kwargs)

    return step


def _bound(call: Any, given: dict[str, Any]) -> Callable[[], Any]:
    return lambda: call(given)


def _plan_step(key: Hashable, calls: list[Callable[[], Any]], made: list[Any]) -> Step:
    """Plans; `made` is what the first plans returned, which graphs are given."""

    def step(interface: Any) -> None:
        interface.info._input_buffer.settle()
        with plan_for_graph(key):
            plans = [call() for call in calls]
        if not made:
            made.extend(plans)
            return
        for static, new in zip(made, plans, strict=True):
            if static is not new:
                update_plan(static, new)

    return step
