"""Puts the pass's own nodes (transfers, waits, refreshes, operand snapshots) where a strategy wants them in graphs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from torch.fx import Graph, GraphModule, Node

from auto_deploy_ext.active_args import META_KEY
from auto_deploy_ext.analysis.operands import Known, Snapshot
from auto_deploy_ext.orchestrator import ops
from auto_deploy_ext.rewriting.strategies import Edits
from auto_deploy_ext.runtime.refresh import PLACED, bring_up_to_date, ensure_fresh, is_placed


@dataclass(eq=False)
class _Wanted:
    """A node to be placed.

    Attributes:
        target: what it calls.
        at: the node of the orchestrator that it is placed at.
        behind: whether right after it, else right before it.
        arguments: gives its arguments once what comes before it is placed.
        names: what goes into its `meta["active_args"]`.
    """

    target: Callable[..., Any]
    at: Node
    behind: bool
    arguments: Callable[[], tuple[Any, ...]]
    names: tuple[str, ...] = ()
    node: Node | None = None

    def placed(self) -> Node:
        """Its node."""
        assert self.node is not None
        return self.node


@dataclass
class _Pool:
    """The nodes that an earlier run placed in a graph, by what they call, in program order; they are used again."""

    nodes: dict[Any, deque[Node]] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph) -> _Pool:
        pool = cls()
        for target in PLACED:
            found = list(graph.find_nodes(op="call_function", target=target))
            if found:
                pool.nodes[target] = deque(found)
        return pool

    def take(self, target: Any) -> Node | None:
        return self.nodes[target].popleft() if self.nodes.get(target) else None

    def rest(self) -> list[Node]:
        return [node for nodes in self.nodes.values() for node in nodes]


class Placement:
    """Places what `edits` asks for. Nodes of an earlier run are moved and used again, and what is left over goes.

    The result does not depend on what was there: the same nodes in the same places under the same names.

    Args:
        graphs: the graphs, with their modules.
        edits: what is wanted.

    Attributes:
        touched: the graphs whose code changed.
    """

    def __init__(self, graphs: Mapping[Graph, GraphModule], edits: Edits) -> None:
        self.touched: dict[Graph, None] = {}
        self._edits = edits
        self._tickets: dict[tuple[Node, Node], _Wanted] = {}
        self._pools = {graph: _Pool.of(graph) for graph in graphs}
        wanted: dict[Graph, list[_Wanted]] = {}
        for item in self._wanted():
            wanted.setdefault(item.at.graph, []).append(item)
        for graph, items in wanted.items():
            self._place(graph, items)

    def replay_arguments(self, mutation: Node) -> dict[str, Any]:
        """The keyword arguments with which a mutation node is told what the host repeats of it."""
        replay = self._edits.replays.get(mutation)
        if replay is None:
            return {}
        operand: Any = None
        if isinstance(replay.operand, Known):
            operand = replay.operand.value
        elif isinstance(replay.operand, Snapshot):
            operand = self._tickets[replay.operand.operand, replay.operand.after].placed()
        return {"replays": replay.names} if operand is None else {"replays": replay.names, "host_operand": operand}

    def finish(self) -> None:
        """Erase what is left over, once nothing uses it any more, and name what stays."""
        for graph, pool in self._pools.items():
            # Waits use starts, and nothing uses a wait.
            for node in sorted(pool.rest(), key=lambda node: node.target is not ops.wait_mirrors):
                graph.erase_node(node)
                self.touched[graph] = None
        for graph in self.touched:
            _name_in_order(graph)

    # -- what is wanted ----------------------------------------------------------------------------------------------

    def _wanted(self) -> Iterable[_Wanted]:
        edits = self._edits
        for mutation, replay in edits.replays.items():
            operand = replay.operand
            if isinstance(operand, Snapshot) and (operand.operand, operand.after) not in self._tickets:
                item = self._snapshot(mutation, operand)
                self._tickets[operand.operand, operand.after] = item
                yield item
        for start in edits.starts.values():
            arguments: tuple[Any, ...] = (start.interface, start.names, start.trigger)
            arguments += (start.unless_fresh,) if start.unless_fresh else ()
            started = _Wanted(ops.start_mirrors, start.after, True, _constant(arguments), start.names)
            yield started
            yield _Wanted(ops.wait_mirrors, start.anchor, False, _ticket_of(start.interface, started), start.names)
        for (anchor, if_stale), refresh in edits.insertions.items():
            target = ensure_fresh if if_stale else bring_up_to_date
            yield _Wanted(target, anchor, False, _constant((refresh.interface, refresh.names)), refresh.names)

    def _snapshot(self, mutation: Node, operand: Snapshot) -> _Wanted:
        arguments = (self._edits.interfaces[mutation], operand.operand, self._edits.mutations[mutation])
        return _Wanted(ops.snapshot_operand, operand.after, True, _constant(arguments))

    # -- placing -----------------------------------------------------------------------------------------------------

    def _place(self, graph: Graph, items: list[_Wanted]) -> None:
        places = {node: index for index, node in enumerate(graph.nodes)}
        items.sort(key=lambda item: (places[item.at], item.behind))
        group: list[_Wanted] = []
        for item, following in zip(items, [*items[1:], None], strict=True):
            group.append(item)
            if following is None or following.at is not item.at or following.behind != item.behind:
                self._place_group(graph, group)
                group = []

    def _place_group(self, graph: Graph, group: list[_Wanted]) -> None:
        """Place nodes that stand together."""
        at, behind = group[0].at, group[0].behind
        nodes = [self._node(graph, item) for item in group]
        around = [at, *nodes] if behind else [*nodes, at]
        if any(b.prev is not a for a, b in pairwise(around)):
            self.touched[graph] = None
            for node in nodes if not behind else reversed(nodes):
                if behind:
                    at.append(node)
                else:
                    at.prepend(node)

    def _node(self, graph: Graph, item: _Wanted) -> Node:
        arguments = item.arguments()
        node = self._pools[graph].take(item.target)
        if node is None:
            with graph.inserting_before(item.at):
                node = graph.call_function(item.target, arguments)
            self.touched[graph] = None
        elif node.args != arguments:
            node.args = arguments
            self.touched[graph] = None
        if item.names:
            node.meta[META_KEY] = item.names
        item.node = node
        return node


def _constant(arguments: tuple[Any, ...]) -> Callable[[], tuple[Any, ...]]:
    return lambda: arguments


def _ticket_of(interface: Node, started: _Wanted) -> Callable[[], tuple[Any, ...]]:
    return lambda: (interface, started.placed())


def _name_in_order(graph: Graph) -> None:
    """Name the placed nodes after what they call, numbered in program order."""
    placed = [node for node in graph.nodes if is_placed(node)]
    taken = {node.name for node in graph.nodes if not is_placed(node)}
    counts: dict[str, int] = {}
    for node in placed:
        assert callable(node.target)
        base = node.target.__name__
        while True:
            number = counts.get(base, 0)
            counts[base] = number + 1
            name = f"{base}_{number}" if number else base
            if name not in taken:
                break
        if node.name != name:
            node.name = name
            graph._graph_namespace._rename_object(node, name)
