"""Small orchestrators written as lists of steps, their FX graphs, and a brute-force machine that runs those graphs.

A program is a list of steps:

* ``"switch"``, ``"offset"``, ``"rescatter"``: that mutation; a tuple ``("switch", {names})`` is narrowed by hand;
* ``("copy", buffer)``: ``copy_`` of a buffer; ``("inplace", buffer)``: a write through a view that may be partial;
* ``("fill", buffer)``: a write through a view that replaces everything;
* ``("get", mirror)``: ``get_arg`` of a mirror; ``"prepare"``: ``run_host_prepare_for_attention_forward``;
* ``("consume", name)``: a call of that consumer;
* ``"unknown"``: a method of the interface that nobody registered;
* ``("branch", steps, steps)``: `torch.cond` over two graphs; ``("nested", steps)``: a GraphModule given the interface.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from auto_deploy_ext import CachedSequenceInterface
from auto_deploy_ext.effects import MUTATIONS, buffer_of, is_mirror, mirror_of
from auto_deploy_ext.orchestrator import ops
from auto_deploy_ext.runtime.refresh import bring_up_to_date, ensure_fresh

Step = Any
SWITCH = "switch_to_generate_"
OFFSET = "offset_pos_and_cache_"


def make_interface(active: Iterable[str] = (), pools: int = 1, prepared: Iterable[str] = ()) -> CachedSequenceInterface:
    """A small interface on the CPU with these args active and these registered for a host-prepare function."""
    cm = CachedSequenceInterface(max_seq_len=64, max_batch_size=4, max_num_tokens=64, device="cpu")
    if pools > 1:
        cm.info.register_window_groups([64] * pools)
    for name in active:
        cm.info.activate_arg(name)
    if prepared:
        cm.info.register_host_prepare_for_attention_forward(lambda **args: None, sorted(prepared))
    return cm


def consumer(*names: str) -> GraphModule:
    """A graph that reads all its arguments: it returns the sum of each."""
    graph = Graph()
    arguments = [graph.placeholder(name) for name in names]
    graph.output([graph.call_method("sum", (a,)) for a in arguments])
    return GraphModule(nn.Module(), graph)


@dataclass
class Builder:
    """Writes one orchestrator graph, in plain FX as a person at a notebook would."""

    consumers: Mapping[str, GraphModule]
    graph: Graph = field(default_factory=Graph)
    root: nn.Module = field(default_factory=nn.Module)
    results: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.csi = self.graph.placeholder("csi")
        self.offset = self.graph.placeholder("offset")
        self.tokens = self.graph.placeholder("tokens")
        self.info = self.graph.call_function(getattr, (self.csi, "info"))
        self.bodies = 0

    def add(self, steps: Sequence[Step]) -> None:
        for step in steps:
            kind, *rest = (step,) if isinstance(step, str) else step
            getattr(self, f"_{kind}")(*rest)

    def _mutation(self, name: str, *operands: Any, override: set[str] | None = None) -> None:
        kwargs = {} if override is None else {"active_args_override": override}
        self.graph.call_method(name, (self.info, *operands), kwargs)

    def _switch(self, override: set[str] | None = None) -> None:
        self._mutation(SWITCH, override=override)

    def _offset(self, override: set[str] | None = None) -> None:
        self._mutation(OFFSET, self.offset, override=override)

    def _rescatter(self) -> None:
        self._mutation("rescatter_input_ids_", self.tokens)

    def _copy(self, buffer: str) -> None:
        self._mutation("copy_", buffer, self.tokens)

    def _inplace(self, buffer: str) -> None:
        view = self.graph.call_method("get_arg", (self.info, buffer))
        self.graph.call_method("add_", (self.graph.call_function(operator.getitem, (view, slice(0, 1))), 1))

    def _fill(self, buffer: str) -> None:
        self.graph.call_method("fill_", (self.graph.call_method("get_arg", (self.info, buffer)), 7))

    def _get(self, mirror: str) -> None:
        self.graph.call_method("get_arg", (self.info, mirror))

    def _prepare(self) -> None:
        self.graph.call_method("run_host_prepare_for_attention_forward", (self.info,))

    def _unknown(self) -> None:
        self.graph.call_method("frobnicate", (self.info,))

    def _consume(self, name: str) -> None:
        module = self.consumers[name]
        self.root.add_module(name, module)
        named = self.graph.call_function(getattr, (self.csi, "named_args"))
        targets = [str(n.target) for n in module.graph.find_nodes(op="placeholder")]
        kwargs = {t: self.graph.call_function(operator.getitem, (named, t)) for t in targets}
        self.results.append(self.graph.call_module(name, (), kwargs))

    def _body(self, steps: Sequence[Step]) -> tuple[str, GraphModule]:
        inner = Builder(self.consumers)
        inner.add(steps)
        name = f"body_{self.bodies}"
        self.bodies += 1
        return name, inner.finish()

    def _branch(self, *alternatives: Sequence[Step]) -> None:
        bodies = []
        for steps in alternatives:
            name, body = self._body(steps)
            self.root.add_module(name, body)
            bodies.append(self.graph.get_attr(name))
        self.graph.call_function(torch.cond, (True, *bodies, (self.csi, self.offset, self.tokens)))

    def _nested(self, steps: Sequence[Step]) -> None:
        name, body = self._body(steps)
        self.root.add_module(name, body)
        self.graph.call_module(name, (self.csi, self.offset, self.tokens))

    def finish(self) -> GraphModule:
        self.graph.output(tuple(self.results))
        return GraphModule(self.root, self.graph)


def build(steps: Sequence[Step], consumers: Mapping[str, Sequence[str]]) -> GraphModule:
    """The FX graph of a program; `consumers` are the argument names of each consumer."""
    builder = Builder({name: consumer(*names) for name, names in consumers.items()})
    builder.add(steps)
    return builder.finish()


def overrides(gm: GraphModule) -> list[tuple[str, tuple[str, ...] | None]]:
    """Name and override of each narrowable mutation of a rewritten graph, nested ones in place."""
    return [
        (str(node.args[1]), node.kwargs.get("active_args"))
        for node in walk(gm)
        if node.target is ops.mutate and node.args[1] in (SWITCH, OFFSET)
    ]


def refreshed(gm: GraphModule) -> list[tuple[str, ...]]:
    """The mirrors of each unconditional refresh in a rewritten graph."""
    return [node.args[1] for node in walk(gm) if node.target is bring_up_to_date]


def walk(gm: GraphModule) -> Iterator[Node]:
    """The nodes of a graph, those of nested GraphModules with the interface in place."""
    for node in gm.graph.nodes:
        yield node
        for body in bodies_of(gm, node):
            yield from walk(body)


def bodies_of(gm: GraphModule, node: Node) -> list[GraphModule]:
    """The orchestrator graphs that a node runs: the sides of a branch, or a nested one."""
    if node.op == "call_function" and node.target is torch.cond:
        return [getattr(gm, n.target) for n in node.args[1:3]]
    if node.op == "call_module" and str(node.target).startswith("body_"):
        return [gm.get_submodule(str(node.target))]
    return []


# -- the machine ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """What a program cannot know.

    Attributes:
        generating: whether the batch is generate-only at entry.
        stale_entry: whether every mirror is stale at entry, and the interface's versions say so.
        acts: whether calls that may do nothing for other reasons, `rescatter_input_ids_` and unknown ones, do.
        sides: which side each branch takes, in the order in which the graph has them.
    """

    generating: bool
    stale_entry: bool
    acts: bool
    sides: tuple[int, ...]


def worlds(gm: GraphModule) -> list[World]:
    """Every world that matters to a graph."""
    branches = sum(node.target is torch.cond for node in walk(gm))
    flags = itertools.product((False, True), repeat=3)
    return [World(*f, s) for f in flags for s in itertools.product((0, 1), repeat=branches)]


class Machine:
    """Runs a rewritten graph on tokens instead of numbers: each write of a buffer gives it a new token.

    It knows nothing of liveness: it moves what the graph says, and notes every consumer that finds, for a mirror it
    reads, another token than the device has. `ensure_fresh` is only trusted with what was stale at entry: that it
    would also repair a mutation's omission, by its version, is no excuse for the omission.
    """

    def __init__(self, cm: CachedSequenceInterface, world: World) -> None:
        self.info = cm.info
        self.world = world
        self.names = list(cm.info._input_buffer.tensor_names)
        self.active = {buffer_of(n) for n in cm.info._active_args if is_mirror(n)}
        self.watched = self.active | {buffer_of(n) for n in cm.info._active_host_prep_args if is_mirror(n)}
        self.generating = world.generating
        self.tokens = 0
        self.device: dict[str, int] = dict.fromkeys(self.names, 0)
        self.mirror: dict[str, int] = dict.fromkeys(self.names, -1 if world.stale_entry else 0)
        self.stale_since_entry = set(self.names) if world.stale_entry else set()
        self.stale_by_version = set(self.stale_since_entry)
        self.tickets: dict[Node, dict[str, int]] = {}
        self.stale_reads: list[tuple[str, str]] = []

    def run(self, gm: GraphModule, drop: tuple[Node, str] | None = None) -> Machine:
        """Run a graph; `drop` leaves one name out of one node's transfer."""
        self.drop = drop
        self.branches = [node for node in walk(gm) if node.target is torch.cond]
        self._graph(gm)
        return self

    def _graph(self, gm: GraphModule) -> None:
        for node in gm.graph.nodes:
            if node.op == "call_function":
                self._function(gm, node)
            elif node.op == "call_module":
                self._module(gm, node)

    def _module(self, gm: GraphModule, node: Node) -> None:
        for body in bodies_of(gm, node):
            self._graph(body)
            return
        module = gm.get_submodule(str(node.target))
        self._read(str(node.target), [str(p.target) for p in module.graph.find_nodes(op="placeholder")])

    def _function(self, gm: GraphModule, node: Node) -> None:
        target = node.target
        if target is torch.cond:
            self._graph(bodies_of(gm, node)[self.world.sides[self.branches.index(node)]])
        elif target is ops.mutate:
            self._mutate(node)
        elif target is ops.invoke:
            self._invoke(node)
        elif target is ops.call_inplace:
            self._write(self._viewed(node.args[0]))
        elif target is bring_up_to_date:
            self._move(node, node.args[1])
        elif target is ensure_fresh:
            self._move(node, [n for n in node.args[1] if buffer_of(n) in self.stale_since_entry])
        elif target is ops.start_mirrors:
            self._start(node)
        elif target is ops.wait_mirrors:
            for buffer, token in self.tickets.pop(node.args[1]).items():
                self._arrive(buffer, token)

    def _viewed(self, node: Any) -> list[str]:
        while node.target is operator.getitem:
            node = node.args[0]
        return [node.args[2]]

    def _mutate(self, node: Node) -> None:
        name = node.args[1]
        if name == SWITCH:
            if self.generating:
                return
            self.generating = True
        if name == "rescatter_input_ids_" and not self.world.acts:
            return
        spec = MUTATIONS[name]
        kwargs = {k: v for k, v in node.kwargs.items() if k not in ("replays", "host_operand")}
        written = list(spec.written(self.info, node.args[2:], kwargs, self.names))
        repeated = [n for n in node.kwargs.get("replays", ()) if (node, n) != self.drop]
        right = {n: all(self._is_fresh(i) for i in spec.replay_inputs(n)) for n in repeated}
        self._write(written)
        self.stale_by_version.update(written)
        for buffer in repeated:
            # Arithmetic on a stale mirror gives what nobody has.
            self._arrive(buffer, self.device[buffer] if right[buffer] else -2)
        if spec.mirrors == "none":
            return
        names = node.kwargs.get("active_args")
        if names is None:
            if self.watched.intersection(written):
                self._move(node, map(mirror_of, self.names))
        else:
            self._move(node, [n for n in names if buffer_of(n) in written])

    def _invoke(self, node: Node) -> None:
        method = node.args[1]
        if method == "get_arg" and is_mirror(node.args[2]):
            self._read(f"get_arg({node.args[2]})", [node.args[2]])
        elif method == "run_host_prepare_for_attention_forward":
            self._read(method, self.info._active_host_prep_args)
        elif method == "frobnicate":
            self._read(method, list(map(mirror_of, self.names)))
            if self.world.acts:
                self._write(self.names)

    def _write(self, buffers: Iterable[str]) -> None:
        for buffer in buffers:
            self.tokens += 1
            self.device[buffer] = self.tokens

    def _move(self, node: Node, names: Iterable[str]) -> None:
        for name in names:
            if (node, name) != self.drop:
                self._arrive(buffer_of(name), self.device[buffer_of(name)])

    def _arrive(self, buffer: str, token: int) -> None:
        self.mirror[buffer] = token
        self.stale_since_entry.discard(buffer)
        self.stale_by_version.discard(buffer)

    def _start(self, node: Node) -> None:
        names, unless_fresh = node.args[1], node.args[3] if len(node.args) > 3 else ()
        moved = [n for n in names if n not in unless_fresh or buffer_of(n) in self.stale_by_version]
        self.tickets[node] = {buffer_of(n): self.device[buffer_of(n)] for n in moved if (node, n) != self.drop}

    def _is_fresh(self, buffer: str) -> bool:
        return self.mirror[buffer] == self.device[buffer]

    def _read(self, who: str, names: Iterable[str]) -> None:
        for name in names:
            if is_mirror(name) and self.mirror[buffer_of(name)] != self.device[buffer_of(name)]:
                self.stale_reads.append((who, name))


def stale_reads(gm: GraphModule, cm: CachedSequenceInterface, drop: tuple[Node, str] | None = None) -> Iterator[Any]:
    """The stale reads of a rewritten graph in any world, one after the other."""
    return ((world, *read) for world in worlds(gm) for read in Machine(cm, world).run(gm, drop).stale_reads)


def branches_of(steps: Iterable[Step]) -> int:
    """How many branches a program has."""
    nested = [step for step in steps if isinstance(step, tuple) and step[0] in ("branch", "nested")]
    return sum((step[0] == "branch") + sum(map(branches_of, step[1:])) for step in nested)


def moved_names(gm: GraphModule) -> list[tuple[Node, str]]:
    """Every name that a rewritten graph moves by name."""
    moved: list[tuple[Node, str]] = []
    for node in dict.fromkeys(walk(gm)):
        if node.target is ops.mutate:
            moved += [(node, name) for name in node.kwargs.get("active_args") or ()]
        elif node.target in (bring_up_to_date, ensure_fresh, ops.start_mirrors):
            moved += [(node, name) for name in node.args[1]]
    return moved
