"""Bringing mirrors up to date between the calls of an orchestrator, as nodes that survive dead-code elimination."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node
from torch.fx.node import has_side_effect

from auto_deploy_ext.effects import buffer_of
from auto_deploy_ext.orchestrator import ops
from auto_deploy_ext.runtime import host_mirrors, late_offset


@has_side_effect
def bring_up_to_date(interface: Any, names: tuple[str, ...]) -> None:
    """Copy mirrors from the device in one transfer and wait for it.

    Args:
        interface: a CachedSequenceInterface or a SequenceInfo.
        names: `_host` names.
    """
    host_mirrors.move(interface, names, trigger="bring_up_to_date")


@has_side_effect
def ensure_fresh(interface: Any, names: tuple[str, ...]) -> None:
    """Copy those mirrors from the device whose versions say that they are stale, in one transfer, and wait for it.

    An orchestrator's first consumers read mirrors that it did not write. Usually these are as fresh as staging left
    them, and nothing happens; overlap scheduling can have moved the device side on, and where the host has been told by
    how much (see `late_offset`), it catches up by itself.

    Args:
        interface: a CachedSequenceInterface or a SequenceInfo.
        names: `_host` names.
    """
    read = set(map(buffer_of, names))
    stale = read.intersection(host_mirrors.stale_names(interface))
    if stale:
        late_offset.settle(interface, stale)
        stale = read.intersection(host_mirrors.stale_names(interface))
    host_mirrors.move(interface, stale, trigger="ensure_fresh")


#: functions whose nodes the pass alone puts into a graph; it sees through them and puts them anew.
PLACED: frozenset[Callable[..., Any]] = frozenset(
    {bring_up_to_date, ensure_fresh, ops.start_mirrors, ops.wait_mirrors, ops.snapshot_operand}
)


def is_placed(node: Node) -> bool:
    """Whether the pass has put a node into its graph."""
    return node.op == "call_function" and node.target in PLACED
