"""Operations on the GraphModules inside a model that every transform's run needs: find, clean, extend, undo."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import _PyTreeCodeGen
from torch.fx.passes.fake_tensor_prop import FakeTensorProp


class TransformError(RuntimeError):
    """A transform, or the interface it runs in, met a module that it cannot work on."""


def named_graph_modules(mod: nn.Module | None) -> list[tuple[str, GraphModule]]:
    """Each GraphModule in `mod`, itself included, with its qualified name (``""`` for `mod`), outermost first."""
    if mod is None:
        return []
    return [(name, sub) for name, sub in mod.named_modules() if isinstance(sub, GraphModule)]


def replace_module(mod: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Put `new` wherever `old` is registered in `mod`, under every name it has, and return the resulting root."""
    if new is old:
        return mod
    if old is mod:
        return new
    for parent in list(mod.modules()):
        for name, child in parent._modules.items():
            if child is old:
                setattr(parent, name, new)
    return mod


def clean_graph(gm: GraphModule) -> None:
    """Canonicalise one GraphModule in place: dead-code elimination, recompile, lint.

    FX counts a ``call_method`` whose result is unused as dead; an effect must be a ``call_function`` marked with
    ``torch.fx.node.has_side_effect`` to survive.
    """
    gm.graph.eliminate_dead_code()
    gm.recompile()
    gm.graph.lint()


def placeholders(graph: Graph) -> list[Node]:
    """The graph's placeholders in the order of its arguments."""
    return list(graph.find_nodes(op="placeholder"))


def _is_optional(node: Node) -> bool:
    """Whether a placeholder has a default value or is ``*args`` / ``**kwargs``: a plain one must stand before it."""
    return bool(node.args) or str(node.target).startswith("*")


def add_graph_input(gm: GraphModule, name: str, val: torch.Tensor | None = None) -> Node:
    """Add the argument `name` to a GraphModule, after its last placeholder, and return the new placeholder.

    The placeholder's `target` is `name`; its `node.name` differs when another node has that name already. It is put
    before placeholders with default values, because Python wants those last. `val`, a fake tensor, becomes
    ``meta["val"]``. The caller recompiles.

    Raises:
        TransformError: the graph takes its arguments as a pytree, or has the argument already.
    """
    if isinstance(gm.graph._codegen, _PyTreeCodeGen):
        raise TransformError(
            f"cannot add the argument {name!r}: the graph packs its arguments in a pytree, so the new one would have "
            "no place in it; flatten it first with gm.graph.set_codegen(torch.fx.graph.CodeGen())"
        )
    existing = placeholders(gm.graph)
    if any(node.target == name for node in existing):
        raise TransformError(f"the graph has an argument {name!r} already")
    successor = next((node for node in existing if _is_optional(node)), None)
    if successor is None:
        successor = next(node for node in gm.graph.nodes if node.op != "placeholder")
    with gm.graph.inserting_before(successor):
        node = gm.graph.placeholder(name)
    if val is not None:
        node.meta["val"] = val
    return node


def propagate_shapes(gm: GraphModule) -> None:
    """Recompute ``node.meta["val"]`` of every node by running the graph on its placeholders' fake values.

    Raises:
        TransformError: a placeholder has no ``meta["val"]``.
    """
    nodes = placeholders(gm.graph)
    unknown = [str(node.target) for node in nodes if "val" not in node.meta]
    if unknown:
        raise TransformError(
            f"shapes cannot be propagated: no meta['val'] on the placeholders {', '.join(unknown)}; "
            "give one when adding them, or run the transform without shape propagation"
        )
    values = [node.meta["val"] for node in nodes]
    mode = detect_fake_mode(values) or FakeTensorMode()
    allowed, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*(_as_fake(mode, value) for value in values))
    finally:
        mode.allow_non_fake_inputs = allowed


def _as_fake(mode: FakeTensorMode, value: Any) -> Any:
    return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value


class ModuleSnapshot:
    """What a transform may change about a module's structure, so that a failed transform can be undone.

    It holds, for `mod` and every module in it, the attributes, the registered parameters, buffers and submodules, the
    module's `meta` down to two levels (which holds the transform history), and the graph with each node's `meta`.
    It does not hold the contents of tensors, what the attributes' values refer to, or the state of the interface.
    """

    _COPIED = ("_parameters", "_buffers", "_modules", "meta")

    def __init__(self, mod: nn.Module | None) -> None:
        modules = [] if mod is None else list(mod.modules())
        self._attributes = [(module, self._copy_attributes(module)) for module in modules]
        self._graphs = [(gm, gm.graph, _fingerprint(gm.graph), copy.deepcopy(gm.graph)) for gm in _graph_modules(mod)]

    @classmethod
    def _copy_attributes(cls, module: nn.Module) -> dict[str, Any]:
        attributes = dict(module.__dict__)
        for name in cls._COPIED:
            if isinstance(attributes.get(name), dict):
                attributes[name] = dict(attributes[name])
        if isinstance(attributes.get("meta"), dict):
            attributes["meta"] = {key: _copy_dict(value) for key, value in attributes["meta"].items()}
        return attributes

    def restore(self) -> None:
        """Put everything back. A graph that was not touched stays the same object with the same nodes."""
        for module, attributes in self._attributes:
            module.__dict__.clear()
            module.__dict__.update(attributes)
        for gm, graph, fingerprint, saved in self._graphs:
            gm.graph = graph if _same(fingerprint, _fingerprint(graph)) else saved


def _copy_dict(value: Any) -> Any:
    return dict(value) if type(value) is dict else value


def _graph_modules(mod: nn.Module | None) -> Iterator[GraphModule]:
    return (gm for _, gm in named_graph_modules(mod))


_Fingerprint = list[tuple[Any, ...]]


def _fingerprint(graph: Graph) -> _Fingerprint:
    """The parts of every node; FX replaces `args` and `kwargs` as a whole, so identity tells whether they changed."""
    return [
        (node, node.op, node.target, node.args, node.kwargs, *(part for item in node.meta.items() for part in item))
        for node in graph.nodes
    ]


def _same(before: _Fingerprint, after: _Fingerprint) -> bool:
    return len(before) == len(after) and all(
        len(old) == len(new) and all(a is b for a, b in zip(old, new, strict=True))
        for old, new in zip(before, after, strict=True)
    )
