"""Where a mutation's operand gets its final value, and whether the host knows that value without a copy."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from auto_deploy_ext.active_args import COPIES_RESULTS, wrapped_graph
from auto_deploy_ext.analysis import aliasing
from auto_deploy_ext.analysis.interface_nodes import bind_arguments, submodule_at
from auto_deploy_ext.effects import HOST_READERS, MUTATIONS, NEUTRAL_METHODS
from auto_deploy_ext.orchestrator import ops
from auto_deploy_ext.runtime.refresh import is_placed

#: functions that make a tensor of one value, by name: that value, or None where it is an argument.
_FILLED = {"ones": 1, "ones_like": 1, "zeros": 0, "zeros_like": 0, "new_ones": 1, "new_zeros": 0}
#: position of the value among the arguments of functions that are given it.
_VALUE_POSITION = {"full": 1, "full_like": 1, "new_full": 2}

#: torch functions whose results may share memory with any of their arguments, not only with the first.
_ALIAS_ALL = frozenset({"atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors", "meshgrid"})


@dataclass(frozen=True)
class Known:
    """An operand whose elements are all one number that the graph shows."""

    value: int


@dataclass(frozen=True)
class Snapshot:
    """An operand that only the device knows.

    Attributes:
        operand: its node.
        after: the node right after which it has its final value and the interface can be reached.
    """

    operand: Node
    after: Node


class OperandFinder:
    """Answers for the mutations of some graphs; each graph is read once, when it is first asked about.

    Args:
        owners: the module of each graph.
    """

    def __init__(self, owners: Mapping[Graph, GraphModule]) -> None:
        self._owners = owners
        self._memories: dict[Graph, Memory] = {}
        self._written: dict[int, frozenset[str]] = {}
        self._modules: dict[tuple[Graph, str], tuple[Any, aliasing.ModuleEffects | None]] = {}

    def find(self, mutation: Node, operand: Any, interface: Node) -> Known | Snapshot | None:
        """Tell how the host gets to know the operand of a mutation.

        Args:
            mutation: the mutation's node.
            operand: its operand, a node or a constant.
            interface: a node of the same graph that stands for the interface.

        Returns:
            None when neither is possible: the operand is no node, or its memory may be the interface's.
        """
        if not isinstance(operand, Node) or operand.graph is not mutation.graph:
            return None
        memory = self.memory(mutation.graph)
        if memory.root(operand) is memory.root(interface):
            return None
        last = memory.last_write(operand, mutation, interface)
        value = memory.known_value(operand, last)
        if value is not None:
            return Known(value)
        after = operand if last is None or memory.index[last] < memory.index[operand] else last
        if after.op == "placeholder":
            after = memory.placeholders[-1]
        if memory.index[interface] > memory.index[after]:
            after = interface
        return Snapshot(operand, after)

    def memory(self, graph: Graph) -> Memory:
        """Which nodes of a graph may share memory, and what writes it."""
        if graph not in self._memories:
            memory = self._memories[graph] = Memory()
            for index, node in enumerate(graph.nodes):
                memory.index[node] = index
                if not is_placed(node):
                    self._add(memory, node)
            memory.sort()
        return self._memories[graph]

    def _add(self, memory: Memory, node: Node) -> None:
        if node.op == "placeholder":
            memory.placeholders.append(node)
            return
        if node.op == "get_attr":
            memory.unite(node, memory.attributes.setdefault(str(node.target), node))
            return
        plain = _plain_source(node)
        if plain is not None:
            if node.users:
                for source in plain:
                    memory.unite(node, source)
            return
        for target in (*aliasing.written_inputs(node), *self._written_by_call(node)):
            memory.writes.append((node, target))
        if node.op == "call_module" and self._may_return_its_own(node):
            memory.unite(node, memory.results.setdefault(id(self._module(node)[0]), node))
            memory.writes.append((node, node))
        if node.users:
            for source in self._aliased_by_call(node) if node.op == "call_module" else _aliased_inputs(node):
                memory.unite(node, source)

    def _aliased_by_call(self, node: Node) -> list[Node]:
        module, effects = self._module(node)
        if aliasing.makes_new_tensors(module):
            return []
        if effects is None:
            return list(node.all_input_nodes)
        if not effects.returned:
            return []
        bound = bind_arguments(module.graph, node.args, node.kwargs)
        return [v for p, v in bound.items() if str(p.target) in effects.returned and isinstance(v, Node)]

    def _may_return_its_own(self, node: Node) -> bool:
        """Whether a call may return memory of the module's own, which its next call overwrites: a compiled one may."""
        module, _ = self._module(node)
        return not isinstance(module, GraphModule) and not type(module).__module__.startswith("torch.nn.")

    def _module(self, node: Node) -> tuple[Any, aliasing.ModuleEffects | None]:
        """The module that a call_module node calls, and its effects."""
        key = (node.graph, str(node.target))
        if key not in self._modules:
            module = submodule_at(self._owners[node.graph], key[1])
            if COPIES_RESULTS in getattr(module, "__dict__", ()):
                module = wrapped_graph(module)
            self._modules[key] = (module, aliasing.module_effects(module))
        return self._modules[key]

    def _written_by_call(self, node: Node) -> Iterator[Node]:
        """What a call may write whose name does not say so."""
        if node.op == "call_module":
            module, _ = self._module(node)
            if isinstance(module, GraphModule):
                yield from self._written_arguments(module, node.args, node.kwargs)
        elif node.op == "call_function" and _is_branch(node):
            bodies = [n for n in node.all_input_nodes if n.op == "get_attr"]
            operands: Any = node.args[3] if len(node.args) > 3 else node.kwargs.get("operands", ())
            for body in bodies:
                module = submodule_at(self._owners[node.graph], str(body.target))
                if isinstance(module, GraphModule):
                    yield from self._written_arguments(module, tuple(operands), {})
                else:
                    yield from node.all_input_nodes
        elif _may_write(node):
            yield from node.all_input_nodes

    def _written_arguments(self, module: GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Node]:
        written = self._written_placeholders(module)
        if not written:
            return []
        bound = bind_arguments(module.graph, args, kwargs)
        return [v for p, v in bound.items() if str(p.target) in written and isinstance(v, Node)]

    def _written_placeholders(self, module: GraphModule) -> frozenset[str]:
        if id(module) not in self._written:
            self._written[id(module)] = frozenset()
            inner = OperandFinder({module.graph: module})
            inner._written = self._written
            memory = inner.memory(module.graph)
            touched = {memory.root(target) for _, target in memory.writes}
            written = frozenset(str(p.target) for p in memory.placeholders if memory.root(p) in touched)
            self._written[id(module)] = written
        return self._written[id(module)]


Write = tuple[int, Node, Node]


@dataclass
class Memory:
    """Which nodes of one graph may share memory, and what writes it: `(index, node, node of the tensor)` per write."""

    placeholders: list[Node] = field(default_factory=list)
    index: dict[Node, int] = field(default_factory=dict)
    attributes: dict[str, Node] = field(default_factory=dict)
    results: dict[int, Node] = field(default_factory=dict)
    writes: list[tuple[Node, Node]] = field(default_factory=list)
    _parents: dict[Node, Node] = field(default_factory=dict)
    _by_root: dict[Node, list[Write]] = field(default_factory=dict)
    _arguments: list[Write] | None = None

    def root(self, node: Node) -> Node:
        """The node that stands for all that may share memory with `node`."""
        parents = self._parents
        path = []
        while node in parents:
            path.append(node)
            node = parents[node]
        for passed in path[:-1]:
            parents[passed] = node
        return node

    def unite(self, a: Node, b: Node) -> None:
        """Note that two nodes may share memory."""
        a, b = self.root(a), self.root(b)
        if a is not b:
            self._parents[a] = b

    def sort(self) -> None:
        """Group the writes by the memory that they write, in program order."""
        for node, target in self.writes:
            self._by_root.setdefault(self.root(target), []).append((self.index[node], node, target))

    def last_write(self, operand: Node, before: Node, interface: Node) -> Node | None:
        """The last node before `before` that may write the operand's memory in place."""
        writes = self._writes_of(operand, interface)
        found = bisect_left(writes, self.index[before], key=lambda write: write[0])
        return writes[found - 1][1] if found else None

    def _writes_of(self, operand: Node, interface: Node) -> list[Write]:
        root = self.root(operand)
        arguments = {self.root(p) for p in self.placeholders}
        if root not in arguments:
            return self._by_root.get(root, [])
        if self._arguments is None:
            # Two arguments may be views of one tensor; the interface holds its own.
            arguments.discard(self.root(interface))
            writes = [w for a in arguments for w in self._by_root.get(a, [])]
            self._arguments = sorted(writes, key=lambda write: write[0])
        return self._arguments

    @staticmethod
    def known_value(operand: Node, last: Node | None) -> int | None:
        """The number that all elements of an operand are, given the last node that wrote it in place."""
        origins = list(_origins(operand))
        if last is None:
            return _made_of(origins[-1])
        value = _filled_with(last)
        # A write of all of what the operand is, or is a view of.
        return value if value is not None and _same_tensor(last.args[0]) in origins else None


def _origins(node: Any) -> Iterator[Node]:
    """A tensor's node, that of which it is a view, that of which this one is, and so on."""
    node = _same_tensor(node)
    while isinstance(node, Node):
        yield node
        is_view = node.op in ("call_function", "call_method") and aliasing.is_view(node) and node.args
        node = _same_tensor(node.args[0]) if is_view else None


def _same_tensor(node: Any) -> Any:
    """The node of a tensor that an in-place method returned as its result."""
    while isinstance(node, Node) and (node.target is ops.call_inplace or _is_inplace_method(node)):
        node = node.args[0]
    return node


def _is_inplace_method(node: Node) -> bool:
    return node.op == "call_method" and ops.is_inplace_name(str(node.target))


def _made_of(node: Node) -> int | None:
    if node.op not in ("call_function", "call_method"):
        return None
    name = str(node.target) if node.op == "call_method" else str(getattr(node.target, "__name__", ""))
    name = name.removesuffix(".default").rpartition("::")[2].rpartition(".")[2]
    if name in _VALUE_POSITION:
        position = _VALUE_POSITION[name]
        value = node.args[position] if len(node.args) > position else node.kwargs.get("fill_value")
    else:
        value = _FILLED.get(name)
    return _integer(value)


def _filled_with(node: Node) -> int | None:
    """The number with which an in-place node fills its tensor."""
    if node.target is ops.call_inplace:
        name, args = str(node.args[1]), node.args[2:]
    elif node.op == "call_method":
        name, args = str(node.target), node.args[1:]
    else:
        return None
    if name == "zero_":
        return 0
    value = args[0] if args else node.kwargs.get("value")
    return _integer(value) if name == "fill_" else None


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _aliased_inputs(node: Node) -> tuple[Node, ...]:
    """The inputs whose memory a node's result may share."""
    if _is_branch(node):
        return tuple(node.all_input_nodes)
    if node.op not in ("call_function", "call_method") or node.target is ops.mutate:
        return ()
    if not aliasing.result_may_alias(node):
        return ()
    if node.target is ops.invoke and node.args[1] in NEUTRAL_METHODS:
        return tuple(n for a in (*node.args[2:], *node.kwargs.values()) for n in aliasing.nodes_in(a))
    name = str(getattr(node.target, "__name__", node.target))
    first_only = node.op == "call_method" or node.target is ops.call_inplace or aliasing.is_known(node)
    if first_only and node.args and name not in _ALIAS_ALL and node.kwargs.get("out") is None:
        return tuple(aliasing.nodes_in(node.args[0]))
    return tuple(node.all_input_nodes)


@cache
def _plain_kind(function: Any) -> str:
    """What a function's result shares memory with, of one that writes nothing: "new", "first" or "unknown" (ask)."""
    if function is operator.getitem:
        return "first"
    name = str(getattr(function, "__name__", ""))
    from_torch = str(getattr(function, "__module__", None) or "torch").partition(".")[0] == "torch"
    operators = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)
    if not from_torch or isinstance(function, operators) or name == "cond" or name in _ALIAS_ALL:
        return "unknown"
    aliases = aliasing.aten_result_aliases(name)
    if aliases is None or not aliasing.writes_only_by_keyword(function):
        return "unknown"
    return "first" if aliases else "new"


def _plain_source(node: Node) -> Sequence[Node] | None:
    """The inputs whose memory the result of a common call may share; None: it may write, or one has to look closer."""
    target = node.target
    if target is ops.mutate:
        return ()
    if node.op != "call_function" or not node.args:
        return None
    if target is getattr:
        return () if aliasing.is_metadata(node.args[1]) else node.all_input_nodes
    kind = _plain_kind(target)
    if kind == "unknown" or (node.kwargs and not node.kwargs.keys().isdisjoint(("out", "inplace"))):
        return None
    return () if kind == "new" else aliasing.nodes_in(node.args[0])


def _is_branch(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "cond"


def _may_write(node: Node) -> bool:
    """Whether a call may write any tensor that it is given, because nobody knows it."""
    if node.target is ops.invoke:
        name = str(node.args[1])
        return not (name in MUTATIONS or name in HOST_READERS or name in NEUTRAL_METHODS or name.startswith("get_"))
    if node.target is ops.call:
        return not str(node.args[0]).startswith(("torch.", "builtins."))
    if node.op != "call_function" or node.target in ops.EFFECTS:
        return False
    module = str(getattr(node.target, "__module__", None) or "torch")
    return not (module.partition(".")[0] in ("torch", "_operator", "builtins", "math") or isinstance(node.target, type))
