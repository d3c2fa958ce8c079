"""A rewritten orchestrator as it runs: its own events and, among them, what the pass has placed, taken at its word.

`program.collect` sees through what the pass has placed; nothing here does, and nothing here asks a strategy. So what
this module says of a rewritten graph is a second opinion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import and_
from typing import Any

from torch.fx import Graph, Node

from auto_deploy_ext.analysis.events import Entry, Event, Kind, Program
from auto_deploy_ext.analysis.liveness import StaleRead, stale_reads
from auto_deploy_ext.analysis.program import split_override
from auto_deploy_ext.analysis.replays import inputs_of
from auto_deploy_ext.orchestrator import ops
from auto_deploy_ext.rewriting.strategies import HostTraits, Mirroring, Override
from auto_deploy_ext.runtime.refresh import PLACED, bring_up_to_date, ensure_fresh


def as_run(program: Program) -> Program:
    """Return a program that also has an event for every transfer that the pass has placed, where it ends.

    Args:
        program: what `collect` gives for a rewritten graph; it is not changed.
    """
    merger = _Merger(program)
    result = Program(program.gm, merger.merge(program.gm.graph, None, program.events), program.table, program.setting)
    result.owners, result.interface = program.owners, program.interface
    result.number()
    return result


def override_in_graph(event: Event) -> Override:
    """The names that a mutation's node gives the call, None where it gives none."""
    node, spec = event.node, event.spec
    if node is None or spec is None:
        return event.given
    if node.target is ops.mutate and "active_args" in node.kwargs:
        return node.kwargs["active_args"]  # type: ignore[return-value]
    skipped = 2 if node.target in (ops.mutate, ops.invoke, ops.call) else 1
    return split_override(spec, node.args[skipped:], dict(node.kwargs))[2]


def replays_in_graph(event: Event) -> tuple[str, ...]:
    """The buffers whose mirrors a mutation's node has the host compute."""
    node = event.node
    return tuple(node.kwargs.get("replays") or ()) if node is not None and node.target is ops.mutate else ()  # type: ignore[arg-type]


def stale_as_run(program: Program, traits: HostTraits, live_out: tuple[str, ...] = ()) -> list[StaleRead]:
    """Return the consumers that read something stale when a rewritten graph runs, in program order.

    A mutation that the host repeats is a consumer of what its arithmetic reads.

    Args:
        program: what `as_run` gives.
        traits: how the host's mutations mirror.
        live_out: `_host` names that something reads after the forward.
    """
    mirroring, table = Mirroring(program, traits), program.table

    def moved(event: Event) -> int:
        return mirroring.under(event, override_in_graph(event)) | table.bits(replays_in_graph(event))

    def needed(event: Event) -> int:
        names = replays_in_graph(event)
        return inputs_of(event, table, names) if names else 0

    found = stale_reads(program, moved, table.bits(live_out), needed=needed)
    return [read for read in found if read.stale]


@dataclass
class _Merger:
    """Merges a program's events with the nodes that the pass has placed among theirs."""

    program: Program
    #: transfers under way: what of them is still as new as the device.
    under_way: dict[Node, int] = field(default_factory=dict)

    def merge(self, graph: Graph, entry: Entry | None, events: Sequence[Event]) -> list[Event]:
        """The events of one execution of a graph, `events` among them being the program's."""
        merged: list[Event] = []
        position = 0
        for node in graph.nodes:
            if node.target in PLACED:
                merged += self._placed(node, entry)
                continue
            while position < len(events) and events[position].node_in(entry) is node:
                event = events[position]
                end = position + 1
                if event.entry is not entry:
                    while end < len(events) and _inside(events[end], entry, node):
                        end += 1
                    merged += self._nested(entry, events[position:end])
                else:
                    merged.append(self._own(event, entry))
                position = end
        return merged

    def _own(self, event: Event, entry: Entry | None) -> Event:
        if event.kind is Kind.BRANCH:
            return self._branch(event, entry)
        for transfer in self.under_way:
            self.under_way[transfer] &= ~event.writes
        return replace(event)

    def _nested(self, outer: Entry | None, events: Sequence[Event]) -> list[Event]:
        entry = events[0].entry
        while entry is not None and entry.outer is not outer:
            entry = entry.outer
        first = events[0].node_in(entry)
        return [] if first is None else self.merge(first.graph, entry, events)

    def _branch(self, event: Event, entry: Entry | None) -> Event:
        before, after = dict(self.under_way), []
        branches = []
        for branch in event.branches:
            self.under_way = dict(before)
            branches.append(self._nested(entry, branch) if branch else [])
            after.append(self.under_way)
        self.under_way = {node: reduce(and_, (a.get(node, 0) for a in after), bits) for node, bits in before.items()}
        return replace(event, branches=tuple(branches))

    def _placed(self, node: Node, entry: Entry | None) -> list[Event]:
        names: Any = node.args[1]
        bits = self.program.table.bits(names) if isinstance(names, tuple) else 0
        if node.target is ops.start_mirrors:
            self.under_way[node] = bits
            return []
        if node.target is ops.wait_mirrors:
            bits = self.under_way.pop(node.args[1], 0)  # type: ignore[arg-type]
        elif node.target not in (bring_up_to_date, ensure_fresh):
            return []
        label = str(getattr(node.target, "__name__", node.target))
        return [Event(Kind.REFRESH, node, label, freshens=bits, entry=entry)]


def _inside(event: Event, entry: Entry | None, node: Node | None) -> bool:
    """Whether an event happens in a nested graph that a node of the graph so entered runs."""
    return event.entry is not entry and event.node_in(entry) is node
