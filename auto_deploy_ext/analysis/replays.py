"""Which mutations the host repeats on mirrors, and for which buffers: what can be repeated, then what is read of it.

Two linear passes over a program's events, with bit sets:

* Forward, what can be had without a copy: a mirror at entry (if its version says otherwise it is refreshed there),
  one that a consumer has read (it was fresh by then, in whatever way), and one whose last write is a mutation that the
  host can repeat from mirrors that could be had before it. Every other write ends that.
* Backward, what is demanded: a mirror that a consumer reads and that can be had, until the mutation that wrote it;
  there, in its place, what the host's arithmetic reads.

A node that occurs several times (a nested graph called twice) must do the same each time, so both passes are repeated
until its occurrences agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch.fx import Graph, GraphModule, Node

from auto_deploy_ext.analysis.events import EVERYTHING, Event, Kind, NameTable, Program
from auto_deploy_ext.analysis.operands import Known, OperandFinder, Snapshot
from auto_deploy_ext.orchestrator import ops


@dataclass(frozen=True)
class Replay:
    """What the host repeats of one mutation.

    Attributes:
        names: sorted names of the buffers whose mirrors it computes.
        operand: how it gets to know the mutation's operand; None: there is none.
    """

    names: tuple[str, ...]
    operand: Known | Snapshot | None


@dataclass
class Replays:
    """The result, for all programs together.

    Attributes:
        by_node: for each mutation node of which something is repeated, what.
        refused: for a mutation node that cannot be repeated at all, why.
    """

    by_node: dict[Node, Replay] = field(default_factory=dict)
    refused: dict[Node, str] = field(default_factory=dict)

    def outputs(self, event: Event, table: NameTable) -> int:
        """The mirrors that the host computes at a mutation."""
        replay = self.by_node.get(event.node) if event.node is not None else None
        return 0 if replay is None else table.bits(replay.names)

    def inputs(self, event: Event, table: NameTable) -> int:
        """The mirrors that must be fresh before a mutation for that."""
        replay = self.by_node.get(event.node) if event.node is not None else None
        return 0 if replay is None else inputs_of(event, table, replay.names)


def inputs_of(event: Event, table: NameTable, names: Sequence[str]) -> int:
    """The mirrors from which the host computes those of some of the buffers that a mutation writes."""
    assert event.spec is not None
    return table.bits(i for name in names for i in event.spec.replay_inputs(name) or ())


def choose(
    programs: Sequence[Program], live_out: Sequence[int], own: Sequence[Callable[[Event], int]], together: bool
) -> Replays:
    """Decide what the host repeats.

    Args:
        programs: the variants of an orchestrator.
        live_out: for each, the mirrors read after the forward.
        own: for each, what a mutation brings up to date by itself.
        together: whether a consumer that some mirror must be copied for gets all that it finds stale by that copy, so
            that nothing is repeated for its sake; False: whatever can be repeated is.
    """
    owners: dict[Graph, GraphModule] = {}
    for program in programs:
        owners.update(program.owners)
    finder = OperandFinder(owners)
    result = Replays()
    blocked: dict[Node, int] = {}
    while True:
        passes = [_Passes(p, o, blocked, result.refused) for p, o in zip(programs, own, strict=True)]
        for one, out in zip(passes, live_out, strict=True):
            one.forward(out)
        shared = _occurs_twice(passes)
        if shared and _disagree(passes, blocked):
            continue
        chosen: dict[Node, int] = {}
        while True:
            before = dict(chosen)
            for one in passes:
                one.backward(together, chosen)
            if not shared or chosen == before:
                break
        result.by_node = _with_operands(passes, chosen, finder, result.refused)
        if len(result.by_node) == len(chosen):
            return result


def _occurs_twice(passes: Sequence[_Passes]) -> bool:
    """Whether a mutation's node has several events."""
    nodes = [event.node for one in passes for event in one.mutations]
    return len(set(nodes)) < len(nodes)


def _disagree(passes: Sequence[_Passes], blocked: dict[Node, int]) -> bool:
    """Note what one occurrence of a node cannot repeat and another can; whether there is any."""
    common: dict[Node, int] = {}
    for one in passes:
        for event in one.mutations:
            assert event.node is not None
            common[event.node] = common.get(event.node, EVERYTHING) & one.possible[event.order]
    found = False
    for one in passes:
        for event in one.mutations:
            assert event.node is not None
            extra = one.possible[event.order] & ~common[event.node]
            if extra:
                blocked[event.node] = blocked.get(event.node, 0) | extra
                found = True
    return found


def _with_operands(
    passes: Sequence[_Passes], chosen: dict[Node, int], finder: OperandFinder, refused: dict[Node, str]
) -> dict[Node, Replay]:
    """Find the operands of what was chosen; a mutation whose operand the host cannot get to know is refused."""
    found: dict[Node, Replay] = {}
    for one in passes:
        for event in one.mutations:
            node, spec = event.node, event.spec
            assert node is not None and spec is not None
            if node in found or node in refused or not chosen.get(node):
                continue
            operand = None
            if spec.operand is not None:
                operand = None if event.interface is None else finder.find(node, event.operand, event.interface)
                if operand is None:
                    refused[node] = "its operand may be memory of the interface"
                    continue
            found[node] = Replay(one.table.buffers(chosen[node]), operand)
    return found


class _Passes:
    """Both passes over one program.

    Attributes:
        mutations: the events of mutations that could be repeated.
        possible: by event order, which mirrors a mutation's repetition could give.
    """

    def __init__(
        self, program: Program, own: Callable[[Event], int], blocked: dict[Node, int], refused: dict[Node, str]
    ) -> None:
        self.table = program.table
        self.mutations = [e for e in program.flat if self._may_repeat(program, e, refused)]
        self.possible: dict[int, int] = {e.order: 0 for e in self.mutations}
        self._program = program
        self._own = own
        self._blocked = blocked
        self._arithmetic: dict[str, list[tuple[int, int]]] = {}
        #: per reading event: what it finds stale, and of that what cannot be had without a copy.
        self._arrivals: dict[int, tuple[int, int]] = {}

    @staticmethod
    def _may_repeat(program: Program, event: Event, refused: dict[Node, str]) -> bool:
        spec, node = event.spec, event.node
        if spec is None or node is None or not spec.replays or not event.writes or node in refused:
            return False
        if not program.setting.can_replay:
            refused[node] = "this release writes host twins itself"
        elif node.op == "call_function" and node.target not in (ops.mutate, ops.invoke):
            refused[node] = "it is called through a function"
        elif spec.operand is not None and event.operand_shared:
            refused[node] = "its operand may be memory of the interface"
        return node not in refused

    # -- what can be had ---------------------------------------------------------------------------------------------

    def forward(self, live_out: int) -> None:
        """Find what each mutation could repeat and what each consumer cannot have without a copy."""
        fresh, stale = self._forward(self._program.events, EVERYTHING, 0)
        self._arrivals[len(self._program.flat)] = (live_out & stale, live_out & stale & ~fresh)

    def _forward(self, events: Sequence[Event], fresh: int, stale: int) -> tuple[int, int]:
        for event in events:
            if event.kind is Kind.BRANCH:
                taken = [self._forward(branch, fresh, stale) for branch in event.branches]
                fresh, stale = EVERYTHING, 0
                for f, s in taken:
                    fresh, stale = fresh & f, stale | s
                continue
            if event.reads:
                arriving = event.reads & stale
                self._arrivals[event.order] = (arriving, arriving & ~fresh)
                fresh |= arriving
                stale &= ~arriving
            if event.kind is Kind.MUTATION:
                fresh, stale = self._after_mutation(event, fresh, stale)
            elif event.writes:
                fresh &= ~event.writes
                stale |= event.writes
            if event.freshens:
                stale &= ~event.freshens
                # What the host wrote into a mirror need not be what the device has.
                fresh = fresh & ~event.freshens if event.kind is Kind.HOST_WRITE else fresh | event.freshens
        return fresh, stale

    def _after_mutation(self, event: Event, fresh: int, stale: int) -> tuple[int, int]:
        possible = 0
        if event.order in self.possible:
            for output, inputs in self._outputs(event):
                if not inputs & ~fresh:
                    possible |= output
            possible &= ~self._blocked.get(event.node, 0)  # type: ignore[arg-type]
            self.possible[event.order] = possible
        own = self._own(event)
        if event.status == "effective":
            return (fresh & ~event.writes) | possible | own, (stale | event.writes) & ~own
        written = event.writes & ~own
        return fresh & ~(written & ~possible), stale | written

    def _outputs(self, event: Event) -> list[tuple[int, int]]:
        """For each buffer that the host can compute, its bit and those that it is computed from."""
        spec = event.spec
        assert spec is not None
        known = self._arithmetic.get(spec.name)
        if known is None:
            pairs = [(name, spec.replay_inputs(name)) for name in self.table.buffers(event.writes)]
            known = [(self.table.bit(name), self.table.bits(inputs)) for name, inputs in pairs if inputs is not None]
            self._arithmetic[spec.name] = known
        return known

    # -- what is demanded --------------------------------------------------------------------------------------------

    def backward(self, together: bool, chosen: dict[Node, int]) -> None:
        """Add to `chosen` what is demanded of each mutation."""
        self._together = together
        self._chosen = chosen
        self._backward(self._program.events, self._demanded_at(len(self._program.flat), 0))

    def _demanded_at(self, order: int, demanded: int) -> int:
        """What is demanded before a consumer, given what is demanded after it."""
        stale, missing = self._arrivals.get(order, (0, 0))
        copied = stale if missing and self._together else missing
        return (demanded & ~copied) | (stale & ~copied)

    def _backward(self, events: Sequence[Event], demanded: int) -> int:
        for event in reversed(events):
            if event.kind is Kind.BRANCH:
                before = 0
                for branch in event.branches:
                    before |= self._backward(branch, demanded)
                demanded = before
                continue
            if event.freshens:
                demanded &= ~event.freshens
            if event.kind is Kind.MUTATION:
                demanded = self._before_mutation(event, demanded)
            if event.reads:
                demanded = self._demanded_at(event.order, demanded)
        return demanded

    def _before_mutation(self, event: Event, demanded: int) -> int:
        inputs = 0
        if event.order in self.possible:
            assert event.node is not None
            repeated = demanded & event.writes & self.possible[event.order]
            repeated |= self._chosen.get(event.node, 0)
            if repeated:
                self._chosen[event.node] = repeated
                for output, needed in self._outputs(event):
                    if output & repeated:
                        inputs |= needed
        if event.status == "effective":
            demanded &= ~(event.writes | self._own(event))
        return demanded | inputs
