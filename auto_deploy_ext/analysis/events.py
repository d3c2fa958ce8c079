"""What happens to mirrors, as data: buffers as bits, what is known of the interface, and the events of a program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

import torch
from torch.fx import Graph, GraphModule, Node

from auto_deploy_ext.binding import host
from auto_deploy_ext.effects import MutationSpec, buffer_of, is_mirror, mirror_of

#: all bits: every buffer, those included that get their bit later.
EVERYTHING = -1


class Kind(Enum):
    """What an event does."""

    MUTATION = "mutation"
    WRITE = "write"
    HOST_WRITE = "host write"
    READ = "read"
    UNKNOWN = "unknown"
    REFRESH = "refresh"
    BRANCH = "branch"


class NameTable:
    """Gives every buffer a bit, so that sets of buffers are Python integers."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._index: dict[str, int] = {}
        self._names: list[str] = []
        self._shown: dict[int, tuple[str, ...]] = {}
        for name in sorted(set(names)):
            self.bit(name)

    def bit(self, buffer: str) -> int:
        """The bit of a buffer, which gets one if it has none."""
        index = self._index.setdefault(buffer, len(self._names))
        if index == len(self._names):
            self._names.append(buffer)
        return 1 << index

    def bits(self, buffers: Iterable[str]) -> int:
        """The set of some buffers (names of buffers or of their mirrors)."""
        result = 0
        for name in buffers:
            result |= self.bit(buffer_of(name))
        return result

    @property
    def all(self) -> int:
        """The set of all buffers known so far."""
        return (1 << len(self._names)) - 1

    def __contains__(self, buffer: str) -> bool:
        return buffer in self._index

    def buffers(self, bits: int) -> tuple[str, ...]:
        """The names in a set, sorted."""
        return tuple(sorted(name for i, name in enumerate(self._names) if bits >> i & 1))

    def mirrors(self, bits: int) -> tuple[str, ...]:
        """The names of the mirrors of a set, sorted."""
        shown = self._shown.get(bits)
        if shown is None:
            shown = tuple(map(mirror_of, self.buffers(bits)))
            if bits >= 0:
                self._shown[bits] = shown
        return shown


@dataclass(frozen=True)
class Setting:
    """What is known of the interface while planning.

    Attributes:
        info: the SequenceInfo, or None where a graph is analysed without one.
        buffers: names of all buffers; None: unknown, every name is taken for a buffer.
        active: `_host` names that the interface has activated; an override may name these.
        can_replay: whether mirrors may be computed: nothing but staging, transfers and this plugin writes them.
        watched: `active` and the `_host` names among the registered host-prepare functions' arguments.
        checks_entry: whether a mirror that is stale at entry can be told; with an interface it can.
        on_unknown: what a call of unknown effect means.
        device_type: where buffers live, None when unknown.
    """

    info: Any = None
    buffers: frozenset[str] | None = None
    active: frozenset[str] = frozenset()
    watched: frozenset[str] = frozenset()
    checks_entry: bool = False
    can_replay: bool = False
    on_unknown: Literal["full", "error"] = "full"
    device_type: str | None = None

    @classmethod
    def of(cls, interface: Any, on_unknown: Literal["full", "error"] = "full") -> Setting:
        """Read the setting from a CachedSequenceInterface or a SequenceInfo."""
        info = getattr(interface, "info", interface)
        active = frozenset(n for n in info._active_args if is_mirror(n))
        prepared = frozenset(n for n in getattr(info, "_active_host_prep_args", ()) if is_mirror(n))
        buffer = info._input_buffer
        return cls(
            info=info,
            buffers=frozenset(buffer.tensor_names),
            active=active,
            watched=active | prepared,
            checks_entry=True,
            # A release whose switch writes host twins itself leaves no old values to compute from.
            can_replay=hasattr(buffer, "mark_mirror") or host.features["pages_per_pool"],
            on_unknown=on_unknown,
            device_type=torch.device(info.device).type,
        )


@dataclass(frozen=True, eq=False)
class Entry:
    """One execution of a nested graph.

    Attributes:
        node: the node that runs it.
        outer: how the graph of that node was entered.
    """

    node: Node
    outer: Entry | None


@dataclass(eq=False, slots=True)
class Event:
    """One thing that happens to mirrors.

    Sets are bit sets of a `NameTable`.

    Attributes:
        kind: what happens.
        node: the node that does it; None for what reads after the forward.
        label: the call's or the consumer's name.
        where: qualified name of the nested orchestrator graph that the node is in, empty for the root.
        reads: buffers whose mirrors are read.
        writes: buffers that are or may be written on the device.
        kills: those of which every element is certainly written, so that older mirrors of them are of no use.
        freshens: mirrors that are certainly up to date afterwards, whatever the strategy.
        spec: the mutation's table entry.
        status: whether a mutation does something: "effective", "noop" or "maybe".
        given: the hand-written override of a mutation as names; None when it has none.
        dynamic: whether a hand-written override is computed at run time, so that nothing is known of it.
        entry: how the graph that the node is in was entered, None for the root graph.
        interface: a node for the interface to which nodes can be given.
        anchor: the node before which such nodes go, in the same graph as `interface`.
        anchor_entry: how that graph was entered.
        operand: a mutation's device operand, a node or a constant; None: it has none.
        operand_shared: whether that operand may be memory of the interface.
        reason: why the effect is unknown.
        branches: the alternatives of a branch.
        order: position in program order.
    """

    kind: Kind
    node: Node | None
    label: str
    where: str = ""
    reads: int = 0
    writes: int = 0
    kills: int = 0
    freshens: int = 0
    spec: MutationSpec | None = None
    status: Literal["effective", "noop", "maybe"] = "effective"
    given: tuple[str, ...] | None = None
    dynamic: bool = False
    entry: Entry | None = None
    interface: Node | None = None
    anchor: Node | None = None
    anchor_entry: Entry | None = None
    operand: Any = None
    operand_shared: bool = False
    reason: str = ""
    branches: tuple[list[Event], ...] = ()
    order: int = -1

    def node_in(self, entry: Entry | None) -> Node | None:
        """The node that stands for the event in the graph that was so entered; None: it happens outside of it."""
        node, own = self.node, self.entry
        while own is not entry:
            if own is None:
                return None
            node, own = own.node, own.outer
        return node

    @property
    def name(self) -> str:
        """The label with the nested graph's name in front."""
        return f"{self.where}.{self.label}" if self.where else self.label


@dataclass
class Program:
    """The events of one orchestrator graph.

    Attributes:
        gm: the root graph.
        events: in program order; branches hold their own.
        table: the bits of the buffers.
        setting: what was known of the interface.
        owners: the graph module of each orchestrator graph walked, the root's included.
        interface: the node that stands for the interface in the root graph, None without one.
        exposed: call_method and call_function nodes with effects that FX would delete as dead code.
        flat: every event in program order, those of each branch one alternative after the other.
    """

    gm: GraphModule
    events: list[Event]
    table: NameTable
    setting: Setting
    owners: dict[Graph, GraphModule] = field(default_factory=dict)
    interface: Node | None = None
    exposed: list[Node] = field(default_factory=list)
    flat: list[Event] = field(default_factory=list)

    def number(self) -> None:
        """Fill `flat` and give every event its place in it."""
        self.flat = list(_walk(self.events))
        for order, event in enumerate(self.flat):
            event.order = order


def _walk(events: list[Event]) -> Iterator[Event]:
    for event in events:
        yield event
        for branch in event.branches:
            yield from _walk(branch)
