"""Which nodes of an orchestrator graph go into device graphs, and which run on the host between these."""

from __future__ import annotations

import builtins
import operator
from enum import Enum
from typing import Any

from torch import nn
from torch.fx import Node

from ...active_args import META_KEY
from ...analysis.fused_nodes import part_of
from ...analysis.interface_nodes import is_orchestrator_graph
from ...effects import HOST_SUFFIX
from ...hostfuncs.drains import LAUNCHES_MARK
from ...orchestrator import ops
from ...orchestrator.guards import is_pure_method
from ...runtime.fused_mutations import FUSIBLE
from ...runtime.refresh import PLACED, is_placed
from .captured_module import CapturedModule

_PURE_CALLS = frozenset({"flatten", "maybe_gather_and_squeeze", "unflatten", "update_mamba_states"})
_HOST_CALLS = frozenset({"update_tokens_gather_info"})
#: tensor methods that wait for the device, or whose result lies on the host.
_WAITING = frozenset({"cpu", "item", "nonzero", "numpy", "tolist", "unique"})
_KNOWN_PACKAGES = frozenset({"_operator", "auto_deploy_ext", "builtins", "math", "operator", "torch"})
_PYTHON = frozenset({getattr, *(f for name, f in vars(operator).items() if callable(f) and not name.endswith("item"))})
_PYTHON |= {operator.getitem}


class Role(Enum):
    """How a node of an orchestrator graph runs."""

    PLAIN = "as part of a device graph, and it changes nothing that the host knows of"
    WRITE = "as part of a device graph; it writes a tensor"
    CONSUMER = "as part of a device graph, but for its plans"
    MUTATION = "its device side as part of a device graph, its host side afterwards"
    COUNTS = "on the host, and while a device graph is captured too, because it changes the batch's counts"
    HOST = "on the host"


def role_of(node: Node, owner: nn.Module) -> Role:
    """How a node of a graph that `reason_against_segments` accepts runs; `owner`: where its modules are looked up."""
    if node.op == "call_module":
        return Role.CONSUMER if is_consumer(node, owner) else Role.PLAIN
    if node.op == "call_function":
        if is_placed(node):
            return Role.HOST
        if node.target in (ops.mutate, ops.mutate_all):
            return Role.HOST if parts_of(node) is None else Role.MUTATION
        if node.target in (ops.call_inplace, ops.setitem, ops.call):
            return Role.WRITE
        if node.target is ops.invoke and node.args[1] in _HOST_CALLS:
            return Role.COUNTS
        if node.target is ops.invoke and node.args[1] == "update_mamba_states":
            return Role.WRITE
    if node.op == "call_method" and ops.is_inplace_name(str(node.target)):
        return Role.WRITE
    return Role.PLAIN


def is_consumer(node: Node, owner: nn.Module) -> bool:
    """Whether a node calls a consumer: it is annotated as such, or a captured module is what it calls."""
    if node.op != "call_module":
        return False
    return META_KEY in node.meta or isinstance(owner.get_submodule(str(node.target)), CapturedModule)


def parts_of(node: Node) -> tuple[tuple[tuple[Any, ...], ...], tuple[Any, ...]] | None:
    """The parts and operands, as `ops.mutate_all` takes them, of a mutation's node; None: it cannot be said so."""
    if node.target is ops.mutate_all:
        return node.args[1], node.args[2:]  # type: ignore[return-value]
    known = part_of(node) if node.args[1] in FUSIBLE else None
    return None if known is None else ((tuple(known[0]),), known[1])


def is_python(node: Node) -> bool:
    """Whether a node may be a mere computation on the host: with the interface and numbers, no device is involved."""
    if node.op != "call_function":
        return False
    if node.target is ops.invoke:
        return is_pure_method(str(node.args[1]))
    return node.target in _PYTHON


def reason_against_segments(variant: Any) -> str | None:
    """What keeps an orchestrator graph from being split into device graphs and host calls; None: nothing does."""
    launching = [name for name, module in variant.owner.named_modules() if getattr(module, LAUNCHES_MARK, False)]
    if launching:
        return f"{', '.join(launching)} launches host functions with arguments of each batch's own"
    for node in variant.graph.nodes:
        reason = _against(node, variant)
        if reason is not None:
            source = f", {node.meta['source']}" if "source" in node.meta else ""
            return f"{reason} (%{node.name}{source})"
    return None


def _against(node: Node, variant: Any) -> str | None:
    if node.op == "call_module":
        module = variant.owner.get_submodule(str(node.target))
        if is_orchestrator_graph(module):
            return f"{node.target} is an orchestrator of its own"
    elif node.op == "call_method":
        if node.target in _WAITING:
            return f"{node.target} brings something to the host"
    elif node.op == "call_function":
        return _against_call(node, variant.owner)
    return None


def _against_call(node: Node, owner: nn.Module) -> str | None:
    target: Any = node.target
    if is_placed(node) or target in (ops.mutate, ops.mutate_all):
        if all(user.target in PLACED or user.target in (ops.mutate, ops.mutate_all) for user in node.users):
            return None
        return f"what {node.name} returns is used by something else than a mutation"
    if target is ops.set_attribute:
        return f"the assignment of {node.args[1]} keeps something"
    if target is ops.call:
        name = str(node.args[0])
        return None if name.startswith("torch.") and not name.startswith("torch.cuda.") else f"{name} runs on the host"
    if target is ops.setitem:
        container = node.args[0]
        kept = isinstance(container, Node) and container.target is getattr
        return "something is kept in a container" if kept else None
    if target is ops.invoke:
        name = str(node.args[1])
        if name not in _PURE_CALLS and name not in _HOST_CALLS and not is_pure_method(name):
            return f"the effects of {name} are not known"
        if name == "serialize" and node.users:
            return "the batch's counts are read as a tensor"
    elif target not in ops.EFFECTS:
        package = (getattr(target, "__module__", None) or "torch").partition(".")[0]
        if package not in _KNOWN_PACKAGES or target in (builtins.print, builtins.input):
            return f"the effects of {getattr(target, '__qualname__', target)} are not known"
    if _is_mirror(node):
        readers = [user for user in node.users if not is_consumer(user, owner)]
        if readers:
            return f"{readers[0].name} reads {node.args[-1]} on the host"
    return None


def _is_mirror(node: Node) -> bool:
    """Whether a node asks the interface for something that lies on the host."""
    asks = node.target is operator.getitem or node.target is ops.invoke
    return asks and any(isinstance(arg, str) and arg.endswith(HOST_SUFFIX) for arg in node.args)
