"""Finds the orchestrator in a module, its interface parameter and its draft length."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from torch import nn
from torch.fx import GraphModule

from auto_deploy_ext.binding import host
from auto_deploy_ext.spelling import suggestion

from .tracer import has_mutations

INTERFACE_NAMES = ("cache_seq_interface", "csi", "cm")


class OrchestratorError(ValueError):
    """The orchestrator, or the parameter that receives the interface, cannot be found."""


def find_orchestrator(module: nn.Module, name: str | None = None) -> nn.Module:
    """Return the orchestrator: `module`, or its submodule called `name`.

    Raises:
        OrchestratorError: `module` has no submodule of that name.
    """
    if not name:
        return module
    try:
        return module.get_submodule(name)
    except AttributeError:
        names = [path for path, _ in module.named_modules() if path]
        hint = suggestion(name, names, otherwise=f"it has {', '.join(names[:8]) or 'no submodules'}")
        raise OrchestratorError(f"orchestrator: {type(module).__name__} has no submodule {name!r}{hint}") from None


def is_orchestrator_graph(module: nn.Module) -> bool:
    """Whether `module` is an FX orchestrator already: a GraphModule with mutation nodes."""
    return isinstance(module, GraphModule) and has_mutations(module)


def find_interface_arg(forward: Callable[..., Any], name: str | None = None) -> str:
    """Return the parameter of `forward` that receives the interface.

    In this order: `name`; the one annotated with the host's CachedSequenceInterface; one called
    `cache_seq_interface`, `csi` or `cm`; the only one.

    Raises:
        OrchestratorError: none of these, or `forward` has no parameter `name`.
    """
    parameters = {
        n: p
        for n, p in inspect.signature(forward).parameters.items()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    if name is not None:
        if name not in parameters:
            raise OrchestratorError(f"interface_arg: forward has no parameter {name!r}; it has {_listed(parameters)}")
        return name
    annotated = [n for n in parameters if _is_interface(_hints(forward).get(n))]
    named = [n for n in INTERFACE_NAMES if n in parameters]
    for candidates in (annotated, named, list(parameters)):
        if len(candidates) == 1 or (candidates and candidates is named):
            return candidates[0]
    raise OrchestratorError(
        f"cannot tell which parameter of forward({_listed(parameters)}) receives the interface; "
        "name it with interface_arg:"
    )


def _listed(parameters: dict[str, Any]) -> str:
    return ", ".join(parameters) or "none"


def _hints(forward: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(forward)
    except Exception:  # an annotation that cannot be evaluated here says nothing
        return {n: p.annotation for n, p in inspect.signature(forward).parameters.items()}


def _is_interface(annotation: Any) -> bool:
    if annotation is None:
        return False
    if isinstance(annotation, str):
        return "CachedSequenceInterface" in annotation
    interface = host.get("CachedSequenceInterface")
    options = getattr(annotation, "__args__", (annotation,))
    return any(isinstance(option, type) and issubclass(option, interface) for option in options)


def draft_length(owner: nn.Module, interface: Any, configured: int | None = None) -> int:
    """The draft length for example batches: configured, else the wrapper's, else the speculative config's, else 1."""
    candidates = (
        configured,
        getattr(owner, "max_draft_len", None),
        getattr(getattr(interface, "spec_config", None), "max_draft_len", None),
        getattr(getattr(interface, "_spec_config", None), "max_draft_len", None),
    )
    return next((int(c) for c in candidates if isinstance(c, int)), 1)
