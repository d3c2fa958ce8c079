"""Drains before encoders: the marker of an encoder, the graph node, the forward pre-hook, and where they stand.

An encoder is a module that may hold the GIL while it waits for the device, for example while cuDNN plans a convolution
for a new image shape.
"""

from __future__ import annotations

import inspect
import json
import operator
import pkgutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import GraphModule, Node
from torch.fx.node import has_side_effect
from torch.utils._pytree import tree_leaves

from ..effects import MUTATIONS
from .hostfunc import HostFunc
from .pending import anything_pending, being_traced, drain_hostfuncs

#: attribute of a module that is an encoder.
ENCODER_MARK = "_is_hostfunc_encoder"
#: attribute of an encoder before which drains stand as nodes in graphs, also in those that are traced later.
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
    """The same as a forward pre-hook, for an encoder that is called eagerly.

    A graph's own call meets it too; behind the graph's node nothing is pending, so that it does nothing then.
    """
    if not being_traced() and anything_pending():
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
    """Drain before every call of a module by a pre-hook; says whether that is new."""
    if is_hooked(module):
        return False
    module.register_forward_pre_hook(drain_hook, prepend=True)
    return True


def is_hooked(module: nn.Module) -> bool:
    """Whether a module has the pre-hook."""
    return drain_hook in module._forward_pre_hooks.values()


def drain_in_graphs(module: nn.Module) -> None:
    """Let `insert_drains` put nodes before the calls of a module, also in graphs that are traced later."""
    setattr(module, DRAINED_MARK, True)


# ---------------------------------------------------------------- graphs


def called_module(gm: GraphModule, node: Node) -> Any:
    """The module that a call_module node calls, None without one."""
    try:
        return gm.get_submodule(str(node.target))
    except AttributeError:
        return None


def may_launch(gm: GraphModule, node: Node) -> bool:
    """Whether host functions may be pending after a node because of it; what is not known to launch none may.

    1. Known to launch none: torch's operators, functions and tensor methods, unless they are handed a callable;
       Python's own operators and harmless builtins; this package's graph ops; registered mutations; whatever else is
       asked of the interface in `ops.invoke`; encoders; torch.nn's own layers with nothing else inside.
    2. A module that says so (`launches_hostfuncs`) is believed.
    3. Everything else may: other modules, GraphModules above all, other functions, other objects' methods, operators
       of other libraries, whose Python implementations may do anything.
    """
    if node.op == "call_module":
        return _module_may_launch(called_module(gm, node))
    if node.op == "call_method":
        name = str(node.target)
        return name not in MUTATIONS and (not _is_tensor_method(name) or _takes_callable(gm, node))
    if node.op != "call_function":
        return False
    if getattr(node.target, "__module__", "") == _ORCHESTRATOR_OPS:
        return _op_may_launch(gm, node)
    return not is_harmless(node.target) or _takes_callable(gm, node)


def _module_may_launch(module: Any) -> bool:
    said = getattr(module, LAUNCHES_MARK, None)
    if said is not None:
        return bool(said)
    if is_encoder(module):
        return False
    if not type(module).__module__.startswith("torch.nn."):
        return True
    return any(map(_module_may_launch, module.children()))


def _op_may_launch(gm: GraphModule, node: Node) -> bool:
    """The same for a call of one of the orchestrator's ops: two of them call whatever they are told to."""
    name = getattr(node.target, "__name__", "")
    if name == "call":
        try:
            function = pkgutil.resolve_name(str(node.args[0]))
        except (ImportError, AttributeError, ValueError):
            return True
        return not is_harmless(function) or _takes_callable(gm, node)
    return name == "invoke" and not _belongs_to_interface(node.args[0])


#: modules whose functions launch no host function; those that are handed a callable are told apart by that.
_HARMLESS_MODULES = frozenset(
    {"torch", "torch._C", "torch._tensor", "torch.cuda", "torch.functional", "torch.nn.functional", "torch.nn.init"}
    | {"torch._C._fft", "torch._C._linalg", "torch._C._nn", "torch._C._special"}
    | {"torch.fft", "torch.linalg", "torch.special", "_operator", "math"}
    | {f"auto_deploy_ext.{own}" for own in ("hostfuncs.drains", "runtime.refresh")}
)
#: of their functions, those that call what they are given, whatever that is.
_CALLERS = frozenset({"call"})
_HARMLESS_BUILTINS = frozenset(
    {abs, bool, dict, divmod, float, getattr, hasattr, hash, id, int, isinstance, issubclass, len, list, max, min, pow}
    | {range, repr, reversed, round, set, slice, sorted, str, sum, tuple, type, zip}
)
#: namespaces of torch's own operators.
_HARMLESS_NAMESPACES = frozenset({"aten", "prim", "prims", "quantized", "auto_deploy_ext"})


def is_harmless(function: Any) -> bool:
    """Whether a function is known to launch no host function by itself."""
    if isinstance(function, OpOverload | OpOverloadPacket):
        packet = function.overloadpacket if isinstance(function, OpOverload) else function
        return packet._qualified_op_name.partition("::")[0] in _HARMLESS_NAMESPACES
    if isinstance(function, HostFunc | HigherOrderOperator):
        return False
    if inspect.ismethoddescriptor(function):
        return getattr(torch.Tensor, function.__name__, None) is function
    if not isinstance(function, FunctionType | BuiltinFunctionType | type):
        return False
    name, module = function.__name__, function.__module__
    if module == "builtins":
        return function in _HARMLESS_BUILTINS
    if module is None:
        return getattr(torch, name, None) is function
    return module in _HARMLESS_MODULES and name not in _CALLERS


def _is_tensor_method(name: str) -> bool:
    return callable(getattr(torch.Tensor, name, None))


def _takes_callable(gm: GraphModule, node: Node) -> bool:
    """Whether a node hands over something that could be called: a function, or a module of the graph."""

    def is_callable(leaf: Any) -> bool:
        if isinstance(leaf, Node):
            return leaf.op == "get_attr" and isinstance(called_module(gm, leaf), nn.Module)
        return callable(leaf) and not isinstance(leaf, type | torch.device)

    return any(map(is_callable, tree_leaves((node.args, node.kwargs))))


#: names of a graph's placeholder for the interface, where it is not the only one.
_INTERFACE_NAMES = frozenset({"cache_seq_interface", "csi", "cm", "info"})


def _belongs_to_interface(value: Any) -> bool:
    """Whether a value is the interface or comes from it by attributes, items and its own methods."""
    while isinstance(value, Node) and value.op == "call_function" and value.args:
        name = getattr(value.target, "__name__", "")
        from_op = getattr(value.target, "__module__", "") == _ORCHESTRATOR_OPS and name in ("invoke", "mutate")
        if not from_op and value.target not in (getattr, operator.getitem):
            return False
        value = value.args[0]
    if not isinstance(value, Node) or value.op != "placeholder":
        return False
    return str(value.target) in _INTERFACE_NAMES or len(value.graph.find_nodes(op="placeholder")) == 1


def insert_drains(gm: GraphModule) -> int:
    """Put a drain directly before each call of an encoder (`drain_in_graphs`) where host functions may be pending.

    At entry they may be. A second run inserts nothing.

    Args:
        gm: a straight-line graph, changed in place.

    Returns:
        How many drains were inserted.
    """
    pending, inserted = True, 0
    for node in list(gm.graph.nodes):
        if node.target is drain_before:
            pending = False
        elif node.op == "call_module" and _is_drained_in_graphs(gm, node):
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


def _is_drained_in_graphs(gm: GraphModule, node: Node) -> bool:
    return bool(getattr(called_module(gm, node), DRAINED_MARK, False))


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
        elif node.op == "call_module" and _is_drained_in_graphs(gm, node):
            yield DrainSite(graph, str(node.target), "node" if drained else "none", str(node.meta.get("source", "")))
            drained = False
