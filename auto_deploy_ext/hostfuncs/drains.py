"""Drains before encoders: the marker of an encoder, the graph node, the forward pre-hook, and where they stand.

An encoder is a module that may hold the GIL while it waits for the device, for example while cuDNN plans a convolution
for a new image shape.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import has_side_effect

from .hostfunc import HostFunc
from .pending import being_traced, drain_hostfuncs

#: attribute of a module that is an encoder.
ENCODER_MARK = "_is_hostfunc_encoder"
#: attribute of an encoder before which drains are to stand, also in graphs that are traced later.
DRAINED_MARK = "_drains_hostfuncs"
#: class or instance attribute of a module whose forward launches host functions, or is known not to (False).
LAUNCHES_MARK = "launches_hostfuncs"

_ORCHESTRATOR_OPS = "auto_deploy_ext.orchestrator.ops"


@has_side_effect
def drain_before(encoder: str) -> None:
    """What stands in a graph before the call of an encoder: `drain_hostfuncs()`.

    Args:
        encoder: the encoder's qualified name, for reports.
    """
    drain_hostfuncs()


def drain_hook(module: nn.Module, args: tuple[Any, ...]) -> None:
    """The same as a forward pre-hook, for an encoder that is called eagerly."""
    if not being_traced():
        drain_hostfuncs()


# ---------------------------------------------------------------- markers


def mark_encoder(module: nn.Module) -> nn.Module:
    """Mark a module as an encoder, so that `drain_hostfuncs` finds it and a tracer keeps its call as one node.

    It reads no metadata: its `meta["active_args"]` is empty.
    """
    setattr(module, ENCODER_MARK, True)
    if not isinstance(module, GraphModule):
        setattr(module, "meta", {"active_args": (), **getattr(module, "meta", {})})  # noqa: B010 - no nn.Module attribute
    return module


def is_encoder(module: Any) -> bool:
    """Whether a module is marked as an encoder."""
    return bool(getattr(module, ENCODER_MARK, False))


def drain_eagerly(module: nn.Module) -> bool:
    """Drain before every call of a module; says whether that is new."""
    if getattr(module, DRAINED_MARK, False):
        return False
    module.register_forward_pre_hook(drain_hook, prepend=True)
    setattr(module, DRAINED_MARK, True)
    return True


# ---------------------------------------------------------------- graphs


def called_module(gm: GraphModule, node: Node) -> Any:
    """The module that a call_module node calls, None without one."""
    try:
        return gm.get_submodule(str(node.target))
    except AttributeError:
        return None


def may_launch(gm: GraphModule, node: Node) -> bool:
    """Whether host functions may be pending after a node because of it.

    Modules do, unless they are encoders, torch.nn's own layers, or say otherwise (`launches_hostfuncs = False`). So do
    host functions, and methods of objects that are not the interface's.
    """
    if node.op == "call_module":
        module = called_module(gm, node)
        said = getattr(module, LAUNCHES_MARK, None)
        if said is not None:
            return bool(said)
        plain_layer = type(module).__module__.startswith("torch.nn.")
        return not is_encoder(module) and not plain_layer
    if node.op != "call_function":
        return False
    if isinstance(node.target, HostFunc):
        return True
    if getattr(node.target, "__module__", "") != _ORCHESTRATOR_OPS:
        return False
    name = getattr(node.target, "__name__", "")
    if name == "call":
        return not str(node.args[0]).startswith(("torch.", "builtins."))
    return name == "invoke" and not _belongs_to_interface(node.args[0])


def _belongs_to_interface(value: Any) -> bool:
    while isinstance(value, Node) and value.op == "call_function" and value.args:
        value = value.args[0]
    return isinstance(value, Node) and value.op == "placeholder"


def insert_drains(gm: GraphModule, encoders: Iterable[nn.Module] | None = None) -> int:
    """Put a drain directly before each call of an encoder at which host functions may be pending.

    At entry they may be. A second run inserts nothing.

    Args:
        gm: a straight-line graph, changed in place.
        encoders: the encoders; when left out, those before which drains are to stand everywhere.

    Returns:
        How many drains were inserted.
    """
    chosen = None if encoders is None else {id(encoder) for encoder in encoders}
    pending, inserted = True, 0
    for node in list(gm.graph.nodes):
        if node.target is drain_before:
            pending = False
        elif node.op == "call_module" and _is_chosen(called_module(gm, node), chosen):
            if pending:
                with gm.graph.inserting_before(node):
                    drain = gm.graph.call_function(drain_before, (str(node.target),))
                drain.meta = {k: v for k, v in node.meta.items() if k == "source"}
                inserted += 1
            pending = False
        elif may_launch(gm, node):
            pending = True
    if inserted:
        gm.graph.lint()
        gm.recompile()
    return inserted


def _is_chosen(module: Any, chosen: set[int] | None) -> bool:
    if module is None:
        return False
    return bool(getattr(module, DRAINED_MARK, False)) if chosen is None else id(module) in chosen


def traced_through(gm: GraphModule, path: str) -> bool:
    """Whether a graph contains the inside of the module at `path` instead of a call of it."""
    inside = f"{path}."
    return any(
        node.op in ("call_module", "get_attr") and str(node.target).startswith(inside) for node in gm.graph.nodes
    )


# ---------------------------------------------------------------- where they stand


@dataclass(frozen=True)
class DrainSite:
    """A place where an encoder is called.

    Attributes:
        graph: the graph's variant or name; empty for calls by eager code.
        encoder: the encoder's qualified name.
        kind: `node`: a drain stands before it; `none`: nothing can be pending there; `hook`: before every eager call.
        source: the line that calls it, where known.
    """

    graph: str
    encoder: str
    kind: str
    source: str = ""


@dataclass(frozen=True)
class DrainPlan:
    """Where drains stand in a model."""

    sites: tuple[DrainSite, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists."""
        return json.loads(json.dumps(asdict(self)))

    def to_text(self) -> str:
        """One line per place."""
        told = {
            "node": "drained before",
            "none": "nothing can be pending",
            "hook": "drained before every call by a forward pre-hook",
        }
        lines = [
            f"{site.graph or 'eager'}: {site.encoder}: {told[site.kind]}" + (f" ({site.source})" if site.source else "")
            for site in self.sites
        ]
        return "\n".join(["drains before encoders:", *lines] if lines else ["no encoder is drained before"])


def sites_in(gm: GraphModule, graph: str) -> Iterator[DrainSite]:
    """The calls of drained encoders in a graph."""
    drained = False
    for node in gm.graph.nodes:
        if node.target is drain_before:
            drained = True
        elif node.op == "call_module" and getattr(called_module(gm, node), DRAINED_MARK, False):
            yield DrainSite(graph, str(node.target), "node" if drained else "none", str(node.meta.get("source", "")))
            drained = False
