"""Active args: the placeholder names of a consumer, on the GraphModule and on whatever replaces it later."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule

META_KEY = "active_args"

#: attribute of a module that replays device graphs: whether it returns copies. It is false only while an orchestrator
#: runs that is done with every result before the next call, so a result is as good as new (see `lent_results`).
COPIES_RESULTS = "copies_results"

#: where wrappers of compiled callables keep the module they stand for, in the order in which they are looked at.
_WRAPPED_ATTRIBUTES = ("_orig_mod", "gm", "graph_module", "module", "model")


def module_at(root: nn.Module, path: str) -> nn.Module:
    """Return `root.get_submodule(path)` in a tenth of its time, for what is looked up in every step.

    Raises:
        AttributeError: there is none.
    """
    module: nn.Module | None = root
    try:
        for name in path.split("."):
            module = module._modules[name]  # type: ignore[union-attr]
    except (AttributeError, KeyError):
        module = None
    return root.get_submodule(path) if module is None else module


def placeholder_names(gm: GraphModule) -> tuple[str, ...]:
    """Return the argument names of a GraphModule, sorted.

    A placeholder's name is its `target`; FX may have given its node another name.
    """
    return tuple(sorted(_targets(gm.graph)))


def takes_variadic(gm: GraphModule) -> bool:
    """Whether a GraphModule takes `*args` or `**kwargs`, so that its placeholders do not say what it reads."""
    return any(name.startswith("*") for name in _targets(gm.graph))


def annotate(gm: GraphModule) -> bool:
    """Write `gm.meta["active_args"]`, a sorted tuple; return whether that changed anything."""
    names = placeholder_names(gm)
    changed = gm.meta.get(META_KEY) != names
    gm.meta[META_KEY] = names
    return changed


def annotated_args(module: Any) -> tuple[str, ...] | None:
    """Return the annotation that a module, or what it wraps, carries; None without one."""
    for candidate in _with_wrapped(module):
        meta = getattr(candidate, "meta", None)
        if isinstance(meta, dict) and META_KEY in meta:
            return tuple(meta[META_KEY])
    return None


def consumer_args(module: Any) -> tuple[str, ...] | None:
    """Return the argument names of a consumer, sorted.

    Args:
        module: a GraphModule, or a compiled replacement of one that keeps its `meta["active_args"]` or holds it.

    Returns:
        The names: for a GraphModule those of its placeholders now; for a replacement the annotation, else the
        placeholders of the GraphModule that it holds. None when there is neither, or the graph is variadic.
    """
    if isinstance(module, GraphModule):
        return None if takes_variadic(module) else placeholder_names(module)
    annotated = annotated_args(module)
    if annotated is not None:
        return None if any(name.startswith("*") for name in annotated) else annotated
    wrapped = wrapped_graph(module)
    return None if wrapped is None else consumer_args(wrapped)


def wrapped_graph(module: Any) -> GraphModule | None:
    """Return the GraphModule that a module is or wraps, None without one."""
    return next((m for m in _with_wrapped(module) if isinstance(m, GraphModule)), None)


def _targets(graph: Graph) -> list[str]:
    return [str(node.target) for node in graph.find_nodes(op="placeholder")]


def _with_wrapped(module: Any) -> list[Any]:
    """The module, what it wraps, what that wraps, and so on; a module is looked at once."""
    chain: list[Any] = []
    while module is not None and not any(module is seen for seen in chain):
        chain.append(module)
        if isinstance(module, GraphModule):
            break
        module = next((v for v in (getattr(module, a, None) for a in _WRAPPED_ATTRIBUTES) if _is_module(v)), None)
    return chain


def _is_module(value: Any) -> bool:
    return isinstance(value, nn.Module)
