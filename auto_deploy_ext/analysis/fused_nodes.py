"""The node that stands for a run of mutations, and the mutations that it stands for: one form into the other.

Whatever analyses an orchestrator graph looks at mutations one by one, so it is given the graph with each fused node
taken apart; whatever rewrites one takes it apart in place.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from torch.fx import Graph, GraphModule, Node

from auto_deploy_ext.analysis.interface_nodes import is_orchestrator_graph, submodule_at
from auto_deploy_ext.orchestrator import ops
from auto_deploy_ext.runtime.fused_mutations import COPY_NAME, SWITCH_NAME, TICKET, Part

#: `node.meta` key of a fused node: name and meta of each node that it stands for.
FUSED_KEY = "fused"


def is_fused(node: Node) -> bool:
    """Whether a node stands for a run of mutations."""
    return node.op == "call_function" and node.target is ops.mutate_all


def has_fused(gm: GraphModule) -> bool:
    """Whether a graph has such a node."""
    return bool(gm.graph.find_nodes(op="call_function", target=ops.mutate_all, sort=False))


def part_of(node: Node) -> tuple[Part, tuple[Any, ...]] | None:
    """What a mutation's node asks for as a part and its operands; None: it says so in a way that no part can hold."""
    if node.op != "call_function" or node.target is not ops.mutate or node.users:
        return None
    name = str(node.args[1])
    operands: tuple[Any, ...] = node.args[2:]
    kwargs: dict[str, Any] = dict(node.kwargs)
    active_args, replays = kwargs.pop("active_args", None), kwargs.pop("replays", ())
    host_operand = kwargs.pop("host_operand", None)
    if isinstance(active_args, list):
        active_args = tuple(active_args)
    if not (active_args is None or isinstance(active_args, tuple)):
        return None
    ticket: tuple[Any, ...] = ()
    if isinstance(host_operand, Node):
        host_operand, ticket = TICKET, (host_operand,)
    buffer: Any = ""
    strict: Any = True
    if name == COPY_NAME:
        bound = dict(zip(("name", "src", "strict"), operands, strict=False)) | kwargs
        buffer, operand, strict = bound.pop("name", None), bound.pop("src", None), bound.pop("strict", True)
        if bound or not isinstance(buffer, str) or not isinstance(strict, bool) or active_args:
            return None
        operands = (operand,)
    elif name == SWITCH_NAME:
        if operands or kwargs:
            return None
    else:
        operands = (*operands, *(kwargs.pop("offset", None),)) if "offset" in kwargs else operands
        if kwargs or len(operands) != 1:
            return None
    if not all(isinstance(operand, Node) for operand in operands):
        return None
    return Part(name, buffer, strict, active_args, tuple(replays), host_operand), (*operands, *ticket)


def fuse_nodes(nodes: Sequence[Node]) -> Node:
    """Put one fused node in the place of the last of some mutations, which all go.

    Args:
        nodes: mutations of one SequenceInfo, in program order, each with a `part_of`.
    """
    graph = nodes[-1].graph
    parts: list[tuple[Any, ...]] = []
    operands: list[Any] = []
    for node in nodes:
        known = part_of(node)
        assert known is not None
        parts.append(tuple(known[0]))
        operands += known[1]
    with graph.inserting_before(nodes[-1]):
        fused = graph.call_function(ops.mutate_all, (nodes[0].args[0], tuple(parts), *operands))
    fused.meta[FUSED_KEY] = tuple((node.name, _kept(node.meta)) for node in nodes)
    sources = [node.meta["source"] for node in nodes if "source" in node.meta]
    if sources:
        fused.meta["source"] = sources[0]
    for node in nodes:
        graph.erase_node(node)
    return fused


def _kept(meta: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in meta.items() if key in _KEPT}


#: of a mutation's `meta`, what is about the mutation itself.
_KEPT = frozenset({"active_args", "generate_only", "hand_written", "scoped", "source"})


def take_apart(graph: Graph) -> int:
    """Put the mutations that fused nodes stand for back into their places; how many fused nodes there were."""
    fused_nodes = [node for node in graph.nodes if is_fused(node)]
    for fused in fused_nodes:
        info, parts = fused.args[0], fused.args[1]
        assert isinstance(parts, (tuple, list))
        known: Any = fused.meta.get(FUSED_KEY) or (("mutate", {}),) * len(parts)
        operands = list(fused.args[2:])
        for fields, (name, meta) in zip(parts, known, strict=True):
            part = Part(*fields)  # type: ignore[misc]
            own, operands = operands[: part.num_operands], operands[part.num_operands :]
            with graph.inserting_before(fused):
                node = graph.call_function(ops.mutate, *_call(info, part, own))
            _rename(node, name)
            node.meta.update(meta)
        graph.erase_node(fused)
    return len(fused_nodes)


def take_apart_graphs(graphs: Iterable[GraphModule]) -> int:
    """Do that in some orchestrator graphs and those that they call; in how many there were fused nodes."""
    taken = 0
    for gm in with_nested(graphs):
        if take_apart(gm.graph):
            taken += 1
            gm.recompile()
    return taken


def with_nested(graphs: Iterable[GraphModule]) -> list[GraphModule]:
    """Some orchestrator graphs and those that they call, each once."""
    found: dict[int, GraphModule] = {}
    pending = list(graphs)
    while pending:
        gm = pending.pop(0)
        if id(gm) in found:
            continue
        found[id(gm)] = gm
        for node in gm.graph.nodes:
            if node.op in ("call_module", "get_attr"):
                module = submodule_at(gm, str(node.target))
                if is_orchestrator_graph(module):
                    pending.append(module)
    return list(found.values())


def _call(info: Any, part: Part, operands: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `ops.mutate` for a part."""
    kwargs: dict[str, Any] = {}
    if part.name == COPY_NAME:
        args = (info, part.name, part.buffer, operands[0])
        if not part.strict:
            kwargs["strict"] = False
    else:
        args = (info, part.name, *operands[: part.name != SWITCH_NAME])
    if part.active_args is not None:
        kwargs["active_args"] = part.active_args
    if part.replays:
        kwargs["replays"] = part.replays
    if part.host_operand is not None:
        kwargs["host_operand"] = operands[-1] if part.host_operand == TICKET else part.host_operand
    return args, kwargs


def _rename(node: Node, name: str) -> None:
    """Give a node the name that it had, unless another has it now."""
    if any(other.name == name for other in node.graph.nodes if other is not node):
        return
    node.name = name
    node.graph._graph_namespace._rename_object(node, name)


def taken_apart(gm: GraphModule) -> GraphModule:
    """A graph without fused nodes: the graph itself, or a copy of it to look at, whose submodules are its own."""
    if not has_fused(gm):
        return gm
    graph = copy.deepcopy(gm.graph)
    take_apart(graph)
    result = GraphModule(gm, graph, class_name="TakenApart")
    result.meta = gm.meta
    return result
