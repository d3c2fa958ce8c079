"""Which nodes of a graph stand for the interface, and how a call's arguments meet a graph's placeholders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.fx import Graph, GraphModule, Node

from auto_deploy_ext.effects import HOST_READERS, MUTATIONS
from auto_deploy_ext.orchestrator import ops
from auto_deploy_ext.runtime.refresh import is_placed

#: names by which a parameter is taken for the interface.
INTERFACE_NAMES = ("cache_seq_interface", "csi", "cm")

#: mutations whose name other objects' methods have too.
AMBIGUOUS_MUTATIONS = frozenset({"copy_", "reset"})


def interface_roots(gm: GraphModule, interface_arg: str | None = None) -> tuple[Node, ...]:
    """Return the nodes of a graph that stand for the interface or its SequenceInfo.

    These are: the placeholder that `interface_arg` names; one annotated with, or called like, the interface; and any
    placeholder or attribute on which a registered mutation or a reader of mirrors is called, here or in a
    GraphModule that the graph calls with it.
    """
    return tuple(_roots(gm, interface_arg, {}))


def is_orchestrator_graph(module: Any) -> bool:
    """Whether a module is a GraphModule that works on the interface rather than a consumer of its tensors."""
    return isinstance(module, GraphModule) and bool(interface_roots(module))


def _roots(gm: GraphModule, interface_arg: str | None, memo: dict[int, list[Node]]) -> list[Node]:
    if id(gm) in memo:
        return memo[id(gm)]
    memo[id(gm)] = []
    found: dict[Node, None] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            if node.target == interface_arg or _looks_like_interface(node):
                found[node] = None
        elif node.op == "call_module":
            for argument in _nested_interface_arguments(gm, node, memo):
                _climb(argument, found)
        elif node.op in ("call_function", "call_method"):
            receiver = _receiver_of_interface_call(node)
            if receiver is not None:
                _climb(receiver, found)
    memo[id(gm)] = list(found)
    return memo[id(gm)]


def _looks_like_interface(node: Node) -> bool:
    name = getattr(node.type, "__name__", node.type)
    return node.target in INTERFACE_NAMES or (isinstance(name, str) and "CachedSequenceInterface" in name)


def _nested_interface_arguments(gm: GraphModule, node: Node, memo: dict[int, list[Node]]) -> Iterator[Node]:
    module = submodule_at(gm, str(node.target))
    if not isinstance(module, GraphModule):
        return
    roots = _roots(module, None, memo)
    bound = bind_arguments(module.graph, node.args, node.kwargs) if roots else {}
    for root in roots:
        if isinstance(bound.get(root), Node):
            yield bound[root]


def _receiver_of_interface_call(node: Node) -> Any:
    """The object that a node calls a metadata mutation, or a mirror reader, on."""
    args = node.args
    if not args or not (isinstance(args[0], Node) or node.target is ops.call):
        return None
    receiver = args[0]
    if node.target in (ops.mutate, ops.mutate_all):
        return receiver
    if is_placed(node):
        return receiver
    if node.op == "call_method":
        name, operands = str(node.target), args[1:]
    elif node.target is ops.invoke:
        name, operands = str(args[1]), args[2:]
    elif node.target is ops.call:
        name, operands = str(args[0]).rpartition(".")[2], args[1:]
        receiver = operands[0] if operands else None
    elif node.target is getattr:
        return receiver if args[1] in ("named_args", "batch_info") else None
    else:
        name, operands = getattr(node.target, "__name__", ""), args[1:]
    if name == "copy_":
        return receiver if operands and isinstance(operands[0], str) else None
    if name in MUTATIONS or name in HOST_READERS:
        return receiver if name not in AMBIGUOUS_MUTATIONS else None
    return None


def _climb(node: Any, found: dict[Node, None]) -> None:
    while isinstance(node, Node) and node.op == "call_function" and node.target is getattr:
        node = node.args[0]
    if isinstance(node, Node) and node.op in ("placeholder", "get_attr"):
        found[node] = None


def submodule_at(gm: GraphModule, target: str) -> Any:
    """Return the module that a call_module node of that target calls, None without one."""
    try:
        return gm.get_submodule(target)
    except AttributeError:
        return getattr(gm, target, None)


def bind_arguments(graph: Graph, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[Node, Any]:
    """Match a call's arguments to a graph's placeholders."""
    placeholders = list(graph.find_nodes(op="placeholder"))
    bound = dict(zip(placeholders, args, strict=False))
    bound.update((p, kwargs[str(p.target)]) for p in placeholders if str(p.target) in kwargs)
    return bound
