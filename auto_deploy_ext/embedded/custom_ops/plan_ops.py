"""Which operators plan an attention kernel on the host, and whether the plan being made serves a device graph.

A plan operator takes placeholders and literals only, and what it returns goes to the attention operators, so that data
flow orders them. A consumer that is captured as a device graph has its plan operators taken out of the graph: they run
before the capture and before every replay, with the call's own arguments, inside `plan_for_graph`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any

PLAN_OPS: dict[Any, Callable[..., Any]] = {}
"""Packets of the operators that plan, and for each what a call outside of graphs runs."""

_graphs: list[Hashable] = []
_observers: list[Callable[[Hashable], None]] = []


def register_plan_op(op: Any, function: Callable[..., Any] | None = None) -> Any:
    """Note that an operator plans; gives it back.

    Args:
        op: an operator's packet or one of its overloads.
        function: what implements it, in Python: a call of that is some 20 microseconds shorter than one through the
            dispatcher. None: the operator itself.
    """
    PLAN_OPS[_packet(op)] = op if function is None else function
    return op


def is_plan_op(target: Any) -> bool:
    """Whether a node's target is an operator that plans."""
    return _packet(target) in PLAN_OPS


def implementation(target: Any) -> Callable[..., Any]:
    """What to call, outside of graphs, for an operator that plans."""
    return PLAN_OPS[_packet(target)]


def _packet(op: Any) -> Any:
    return getattr(op, "overloadpacket", op)


@contextlib.contextmanager
def plan_for_graph(key: Hashable) -> Iterator[None]:
    """While active, plans serve the device graph `key`: they use buffers of fixed addresses that are its own."""
    _graphs.append(key)
    try:
        yield
    finally:
        _graphs.pop()


def current_graph() -> Hashable | None:
    """The graph that a plan made now serves; None: an eager run."""
    return _graphs[-1] if _graphs else None


def on_forget(observer: Callable[[Hashable], None]) -> None:
    """Have `observer(key)` called whenever a device graph is freed, so that a planner can let go of its buffers."""
    _observers.append(observer)


def forget_graph(key: Hashable) -> None:
    """Tell planners that a device graph is freed."""
    for observer in list(_observers):
        observer(key)
