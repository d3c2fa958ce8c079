"""What a node may share memory with and what it writes in place, told from operator schemas."""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from auto_deploy_ext.orchestrator import ops

#: operators whose result is a view whatever the arguments: they read no element.
_PURE_VIEWS = frozenset(
    (
        *("alias", "as_strided", "chunk", "detach", "diagonal", "expand", "expand_as", "mH", "mT", "movedim", "narrow"),
        *("permute", "select", "slice", "split", "split_with_sizes", "squeeze", "swapaxes", "swapdims", "t"),
        *("tensor_split", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as"),
    )
)

#: composite functions that may return their argument's memory although no schema says so.
_UNDECLARED_ALIASES = frozenset(
    (
        *(
            "alpha_dropout",
            "atleast_1d",
            "atleast_2d",
            "atleast_3d",
            "broadcast_tensors",
            "cartesian_prod",
            "dequantize",
        ),
        *("dropout", "einsum", "feature_alpha_dropout", "feature_dropout", "meshgrid", "sum_to_size", "type_as"),
        *("unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"),
    )
)

#: attributes of a tensor that say nothing about its elements.
_METADATA_ATTRIBUTES = frozenset({"device", "dtype", "is_cuda", "layout", "ndim", "requires_grad", "shape"})

#: torch.nn layers whose result is a new tensor.
_FRESH_LAYERS = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.modules.conv._ConvNd, nn.GELU, nn.SiLU)

#: methods that overwrite their whole tensor without reading it.
_OVERWRITES = frozenset({"copy_", "fill_", "zero_"})


def is_metadata(attribute: Any) -> bool:
    """Whether an attribute of a tensor says nothing about its elements."""
    return attribute in _METADATA_ATTRIBUTES


@cache
def aten_result_aliases(name: str) -> bool | None:
    """Whether a torch function or method of that name may return memory of its arguments; None: unknown name."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return None
    if name in _UNDECLARED_ALIASES:
        return True
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    # `sum.out` and its like return what they were given to write: that is the call with `out=`.
    functional = [o for o in overloads if not any(a.is_out for a in o._schema.arguments)]
    return any(map(_result_aliases, functional))


#: an operator as a graph may hold it: one overload, or the packet of all that go by its name.
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def _overloads(target: Any) -> list[Any]:
    return [target] if isinstance(target, torch._ops.OpOverload) else [getattr(target, n) for n in target.overloads()]


@cache
def _result_aliases(target: Any) -> bool:
    schemas = [overload._schema for overload in _overloads(target)]
    undeclared = any(schema.name.rpartition("::")[2] in _UNDECLARED_ALIASES for schema in schemas)
    return undeclared or any(result.alias_info is not None for schema in schemas for result in schema.returns)


@cache
def _written_arguments(target: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of each argument that an operator writes, in any of its overloads."""
    arguments = [pair for overload in _overloads(target) for pair in enumerate(overload._schema.arguments)]
    written = ((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)
    return tuple(dict.fromkeys(written))


def _function_name(node: Node) -> str:
    return str(node.target) if node.op == "call_method" else str(getattr(node.target, "__name__", ""))


def result_may_alias(node: Node) -> bool:
    """Whether a call_function or call_method node may return memory of its arguments; unknown ones may."""
    target = node.target
    if isinstance(target, _OPERATORS):
        return _result_aliases(target)
    if target is getattr:
        return node.args[1] not in _METADATA_ATTRIBUTES
    if target is operator.getitem or target in ops.EFFECTS:
        return True
    if node.kwargs.get("out") is not None:
        return True
    name = _function_name(node)
    if node.op == "call_function" and getattr(target, "__module__", None) == "_operator":
        return name.startswith("i") and name not in ("index", "invert", "is_", "is_not", "inv")
    return aten_result_aliases(name) is not False


def is_known(node: Node) -> bool:
    """Whether a call_function or call_method node is of an operator that torch knows, so that schemas tell the rest."""
    if isinstance(node.target, _OPERATORS) or node.target in (getattr, operator.getitem):
        return True
    return aten_result_aliases(_function_name(node)) is not None


def is_view(node: Node) -> bool:
    """Whether a node is known to give a view, without reading an element."""
    if node.op == "call_function" and node.target is operator.getitem:
        return not nodes_in(node.args[1]) and not _indexes_by_list(node.args[1])
    if node.op == "call_function" and node.target is getattr:
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.rpartition("::")[2] in _PURE_VIEWS
    if any(isinstance(value, torch.dtype) for value in (*node.args, *node.kwargs.values())):
        return False  # `view(dtype)`: the same memory, other elements
    return node.op in ("call_function", "call_method") and _function_name(node) in _PURE_VIEWS


def _indexes_by_list(index: Any) -> bool:
    """Whether an index picks elements, which copies them, rather than a part."""
    return isinstance(index, list) or (isinstance(index, tuple) and any(map(_indexes_by_list, index)))


def written_inputs(node: Node) -> tuple[Node, ...]:
    """Return the nodes whose tensors a node writes in place (not: what a mutation of the interface writes)."""
    target = node.target
    if isinstance(target, _OPERATORS):
        values = [
            node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in _written_arguments(target)
        ]
    elif target in (ops.call_inplace, ops.setitem, operator.setitem):
        values = [node.args[0]]
    elif node.op == "call_method":
        values = [node.args[0]] if ops.is_inplace_name(str(target)) else []
    elif node.op == "call_function":
        values = _written_by_function(node)
    else:
        values = []
    return tuple(found for value in values for found in nodes_in(value))


@cache
def writes_only_by_keyword(target: Any) -> bool:
    """Whether a function writes none of its arguments unless a keyword argument (`out`, `inplace`) says so."""
    if target is getattr or target is operator.getitem:
        return True
    name = str(getattr(target, "__name__", ""))
    return target is not ops.call and getattr(target, "__module__", None) != "_operator" and not name.endswith("_")


def _written_by_function(node: Node) -> list[Any]:
    """What `torch.relu_(x)`, `torch.add(x, y, out=z)`, `operator.iadd(x, y)` and `ops.call` of such a name write."""
    if not node.kwargs and writes_only_by_keyword(node.target):
        return []
    written = [node.kwargs["out"]] if node.kwargs.get("out") is not None else []
    args = node.args
    if node.target is ops.call:
        name, args = str(args[0]).rpartition(".")[2], args[1:]
    else:
        name = _function_name(node)
        if getattr(node.target, "__module__", None) == "_operator" and result_may_alias(node):
            name = name + "_"
    inplace = (ops.is_inplace_name(name) and name not in ("and_", "or_", "not_", "is_")) or node.kwargs.get("inplace")
    if inplace and args and node.target is not operator.getitem:
        written.append(args[0])
    return written


def overwrites(node: Node) -> bool:
    """Whether an in-place node replaces every element of its tensor without reading any."""
    if node.target is ops.call_inplace:
        return node.args[1] in _OVERWRITES
    return node.op == "call_method" and node.target in _OVERWRITES


def nodes_in(value: Any) -> list[Node]:
    """The nodes among an argument, those in containers and slices included."""
    if isinstance(value, Node):
        return [value]
    if isinstance(value, (list, tuple)):
        return [node for item in value for node in nodes_in(item)]
    if isinstance(value, dict):
        return [node for item in value.values() for node in nodes_in(item)]
    if isinstance(value, slice):
        return [node for item in (value.start, value.stop, value.step) for node in nodes_in(item)]
    return []


class ModuleEffects:
    """What a consumer does with the tensors it is given: which it may write, and which its result may alias."""

    def __init__(self, written: frozenset[str], returned: frozenset[str]) -> None:
        self.written = written
        self.returned = returned


def module_effects(module: Any) -> ModuleEffects | None:
    """Return a GraphModule's effects by placeholder name.

    None when the module is no GraphModule: then it is taken to write nothing, and its result may alias anything
    unless it is a torch.nn layer that makes new tensors (see `makes_new_tensors`).
    """
    if not isinstance(module, GraphModule):
        return None
    return _effects_of_graph(module)


def makes_new_tensors(module: Any) -> bool:
    """Whether a module is a torch.nn layer whose result shares no memory with its arguments."""
    return isinstance(module, _FRESH_LAYERS)


def _written_by_module(module: Any, node: Node) -> list[Node]:
    """The nodes among a module call's arguments that the module, a GraphModule, writes."""
    effects = module_effects(module)
    if effects is None or not effects.written:
        return []
    names = [str(p.target) for p in module.graph.find_nodes(op="placeholder")]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return [n for name in sorted(effects.written) if name in given for n in nodes_in(given[name])]


def _effects_of_graph(gm: GraphModule) -> ModuleEffects:
    reach: dict[Node, frozenset[str]] = {}
    written: set[str] = set()
    returned: frozenset[str] = frozenset()
    nothing: frozenset[str] = frozenset()
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            reach[node] = frozenset({str(node.target)})
            continue
        sources = [n for n in node.all_input_nodes if n in reach]
        if not sources:
            continue
        if node.op == "output":
            returned = nothing.union(*(reach[n] for n in sources))
            continue
        for target in written_inputs(node):
            written |= reach.get(target, nothing)
        if node.op == "call_module":
            inner = gm.get_submodule(str(node.target))
            for target in _written_by_module(inner, node):
                written |= reach.get(target, nothing)
            aliases = not makes_new_tensors(inner)
        else:
            aliases = result_may_alias(node)
        if aliases:
            reach[node] = nothing.union(*(reach[n] for n in sources))
    return ModuleEffects(frozenset(written), returned)
