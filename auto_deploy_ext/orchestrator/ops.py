"""The functions that stand for effects in an orchestrator graph; each survives dead-code elimination.

FX treats a `call_method` whose result is unused as dead and deletes it, so every effect of an orchestrator is a
`call_function` of one of these. All are marked side-effectful at import, also in a process that unpickles a graph.
"""

from __future__ import annotations

import operator
import pkgutil
from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import has_side_effect

from auto_deploy_ext.runtime import fused_mutations, host_mirrors, replay

Override = tuple[str, ...] | None


@has_side_effect
def mutate(
    info: Any,
    name: str,
    /,
    *operands: Any,
    active_args: Override = None,
    replays: tuple[str, ...] = (),
    host_operand: Any = None,
    **kwargs: Any,
) -> Any:
    """Call the metadata mutation `name` of `info` (a SequenceInfo).

    Args:
        info: the host's SequenceInfo.
        name: a registered mutation, for example `switch_to_generate_`.
        operands: the mutation's own arguments.
        active_args: None leaves the mutation un-narrowed; a sorted tuple of `_host` names narrows what it mirrors to
            those (an empty tuple: nothing); see `host_mirrors.mutate`.
        replays: sorted names of the buffers whose mirrors then get their new values by the same arithmetic on the
            host, without a copy; their old values, as far as they count, are fresh.
        host_operand: what that arithmetic takes for the mutation's operand: the ticket of `snapshot_operand`, an int
            that all its elements are known to be, or None where there is no operand.
        kwargs: the mutation's own keyword arguments.
    """
    if not replays:
        return host_mirrors.mutate(info, name, *operands, active_args=active_args, **kwargs)
    before = replay.device_versions(info, replays)
    result = host_mirrors.mutate(info, name, *operands, active_args=active_args, **kwargs)
    if isinstance(host_operand, int):
        value = host_operand
        replay.replay(info, name, before, lambda: replay.known_operand(info, (*operands, *kwargs.values()), value))
    else:
        replay.replay(info, name, before, lambda: host_operand.wait())
    return result


@has_side_effect
def mutate_all(info: Any, parts: tuple[tuple[Any, ...], ...], /, *operands: Any) -> None:
    """Do what `mutate` does for each of some mutations, in order, with one kernel for all of them.

    Args:
        info: the host's SequenceInfo.
        parts: for each mutation the fields of a `fused_mutations.Part`: name, buffer and strictness of `copy_`, active
            arguments, replays, host operand.
        operands: for each part in turn the mutation's device operand, where it has one, and its ticket, where the host
            operand is one.
    """
    fused_mutations.mutate_all(info, parts, operands)


@has_side_effect
def start_mirrors(info: Any, names: tuple[str, ...], trigger: str, unless_fresh: tuple[str, ...] = ()) -> Any:
    """Start bringing mirrors up to date, in one packed transfer at their current lengths, without waiting.

    Args:
        info: a CachedSequenceInterface or a SequenceInfo.
        names: sorted `_host` names.
        trigger: the call that wrote the last of their buffers.
        unless_fresh: those of them that may be fresh already, because what writes them may have done nothing; they
            travel only if their version says that they are stale.

    Returns:
        A ticket for `wait_mirrors`; None when nothing travels.
    """
    if unless_fresh:
        stale = {f"{name}_host" for name in host_mirrors.stale_names(info)}
        names = tuple(name for name in names if name not in unless_fresh or name in stale)
    return host_mirrors.start(info, names, trigger) if names else None


@has_side_effect
def wait_mirrors(info: Any, ticket: Any) -> None:
    """Wait for a transfer of `start_mirrors` and write it into the mirrors; those that are newer by then stay.

    Args:
        info: a CachedSequenceInterface or a SequenceInfo.
        ticket: what `start_mirrors` returned.
    """
    if ticket is not None:
        ticket.wait()


@has_side_effect
def snapshot_operand(info: Any, operand: torch.Tensor, mutation: str) -> Any:
    """Start bringing a mutation's operand, as it is now, to the host, on a side stream; see `replay.snapshot`.

    Args:
        info: a CachedSequenceInterface or a SequenceInfo.
        operand: the device tensor that the mutation will be given, `[n]` integers.
        mutation: its name, which the transfer carries.

    Returns:
        A ticket for `mutate(..., host_operand=ticket)`.
    """
    return replay.snapshot(info, operand, mutation)


@has_side_effect
def invoke(obj: Any, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call the method `name` of `obj`, anything that is no tensor and no registered mutation."""
    return getattr(obj, name)(*args, **kwargs)


@has_side_effect
def call_inplace(tensor: torch.Tensor, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call the in-place method `name` (`fill_`, `copy_`, `__iadd__`, ...) of `tensor`."""
    return getattr(tensor, name)(*args, **kwargs)


@has_side_effect
def setitem(obj: Any, index: Any, value: Any, /) -> None:
    """Do `obj[index] = value`."""
    obj[index] = value


@has_side_effect
def set_attribute(owner: Any, name: str, value: Any, /) -> None:
    """Do `owner.name = value`."""
    setattr(owner, name, value)


@has_side_effect
def call(name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call the function of that qualified name (`torch.cuda.synchronize`), which has effects that FX cannot see."""
    return _resolve(name)(*args, **kwargs)


@lru_cache
def _resolve(name: str) -> Callable[..., Any]:
    return pkgutil.resolve_name(name)


def resolves_to(name: str, function: Any) -> bool:
    """Whether `call` would find `function` under that qualified name."""
    try:
        return pkgutil.resolve_name(name) is function
    except (ImportError, AttributeError, ValueError):
        return False


def make_set(*items: Any) -> frozenset[Any]:
    """Build a frozenset; FX takes no set as an argument."""
    return frozenset(items)


def make_namespace(**fields: Any) -> SimpleNamespace:
    """Build a SimpleNamespace; FX takes none as an argument."""
    return SimpleNamespace(**fields)


#: `tensor += x` and its like.
INPLACE_OPERATORS = frozenset(
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
)

EFFECTS = frozenset({mutate, mutate_all, invoke, call_inplace, setitem, set_attribute, call})


def is_inplace_name(name: str) -> bool:
    """Whether a tensor method of that name writes its tensor: `fill_`, `__iadd__`, `__setitem__`."""
    return name in INPLACE_OPERATORS or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def normalize_effects(graph: Graph, is_mutation: Callable[[str], bool]) -> int:
    """Rewrite the `call_method` nodes of a hand-built graph that have effects into the functions above, in place.

    Registered mutations become `mutate` (a hand-written `active_args_override` becomes its sorted tuple), other
    methods that end in `_` become `call_inplace`, `__setitem__` and `operator.setitem` become `setitem`.

    Args:
        graph: the graph to rewrite.
        is_mutation: says whether a method name is a registered mutation.

    Returns:
        The number of nodes replaced; a second call returns 0.
    """
    replaced = 0
    for node in list(graph.nodes):
        form = _effect_form(node, is_mutation)
        if form is None:
            continue
        function, args, kwargs = form
        with graph.inserting_before(node):
            new = graph.call_function(function, args, kwargs)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        replaced += 1
    return replaced


def _effect_form(
    node: Node, is_mutation: Callable[[str], bool]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None:
    if node.op == "call_function" and node.target is operator.setitem:
        return setitem, node.args, dict(node.kwargs)
    if node.op != "call_method":
        return None
    name = str(node.target)
    receiver, *rest = node.args
    kwargs = dict(node.kwargs)
    if is_mutation(name) and not is_tensor_copy(node):
        if kwargs.get("active_args_override", ()) is None:
            del kwargs["active_args_override"]
        if "active_args_override" in kwargs:
            override: Any = kwargs.pop("active_args_override")
            kwargs["active_args"] = override if isinstance(override, Node) else tuple(sorted(override))
        return mutate, (receiver, name, *rest), kwargs
    if name == "__setitem__":
        return setitem, node.args, kwargs
    if is_inplace_name(name):
        return call_inplace, (receiver, name, *rest), kwargs
    return None


def is_tensor_copy(node: Node) -> bool:
    """Whether `copy_` is a tensor's own (first argument a tensor) and not the interface's (first argument a name)."""
    first = node.args[1] if len(node.args) > 1 else node.kwargs.get("name")
    return node.target == "copy_" and not isinstance(first, str)
