"""How a program's stale reads are prevented: each strategy turns the analysis into edits of the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch.fx import Node

from auto_deploy_ext.effects import mirror_of
from auto_deploy_ext.events import EVERYTHING, Event, Kind, Program
from auto_deploy_ext.liveness import Liveness, StaleRead, liveness, nothing_moved, proof_path, stale_reads

#: the names of a narrowed call, None for one that stays un-narrowed.
Override = tuple[str, ...] | None


class StaleReadError(RuntimeError):
    """A consumer would read a stale mirror, and `insert_missing: false` forbids to repair that."""


@dataclass(frozen=True)
class HostTraits:
    """How a host's mutations mirror.

    Attributes:
        narrowed_moves_whole: a narrowed call that names something it wrote moves the whole buffer.
        twins_trigger: an active mirror of another pool's twin (`_g1`, ...) makes an un-narrowed call move.
    """

    narrowed_moves_whole: bool = False
    twins_trigger: bool = True


@dataclass
class Analysis:
    """What is known of one program before a strategy decides.

    Attributes:
        program: the events.
        live_out: mirrors read after the forward, as a bit set.
        liveness: what is live after each event.
        arrivals: per consumer what it would find stale if no mutation mirrored anything.
        problems: the consumers that read something stale as the program is.
    """

    program: Program
    live_out: int
    liveness: Liveness
    arrivals: list[StaleRead]
    problems: list[StaleRead]
    traits: HostTraits

    @classmethod
    def of(cls, program: Program, live_out: tuple[str, ...] = (), traits: HostTraits | None = None) -> Analysis:
        """Analyse a program."""
        traits = traits or HostTraits()
        out = program.table.bits(live_out)
        moved = Mirroring(program, traits)
        problems = [r for r in stale_reads(program, moved.as_given, out) if r.stale]
        return cls(program, out, liveness(program, out), stale_reads(program, nothing_moved, out), problems, traits)


class Mirroring:
    """What each call of a program brings up to date by itself, as a bit set, EVERYTHING for the whole buffer."""

    def __init__(self, program: Program, traits: HostTraits) -> None:
        table, setting = program.table, program.setting
        self._traits = traits
        self._table = table
        self.active = table.bits(setting.active)
        self.watched = table.bits(setting.watched)

    def as_given(self, event: Event) -> int:
        """What the call moves as it stands in the program."""
        return self.under(event, event.given)

    def under(self, event: Event, override: Override) -> int:
        """What the call moves when it is given `override`."""
        spec = event.spec
        if spec is None or spec.mirrors == "none" or event.status == "noop":
            return 0
        if override is None:
            trigger = event.writes & self.watched
            if not self._traits.twins_trigger:
                trigger = self._table.bits(b for b in self._table.buffers(trigger) if b in _plain(event))
            return EVERYTHING if trigger else 0
        named = event.writes & self.watched & self._table.bits(override)
        if not self._traits.twins_trigger:
            named = self._table.bits(b for b in self._table.buffers(named) if b in _plain(event))
        return EVERYTHING if named and self._traits.narrowed_moves_whole else named

    def purpose(self, event: Event, override: Override) -> tuple[str, ...]:
        """The active mirrors of what the call writes, narrowed to `override`: what its copying is for."""
        spec = event.spec
        if spec is None or spec.mirrors == "none":
            return ()
        bits = event.writes & self.watched
        if override is not None:
            bits &= self._table.bits(override)
        return self._table.mirrors(bits)


def _plain(event: Event) -> tuple[str, ...]:
    assert event.spec is not None
    return () if callable(event.spec.writes) else event.spec.writes


@dataclass(frozen=True)
class Insertion:
    """A refresh of mirrors right before a node.

    Attributes:
        anchor: the node.
        interface: the node that stands for the interface there.
        names: sorted `_host` names.
        if_stale: only those that are stale by their version.
        consumer: the consumer it is for.
    """

    anchor: Node
    interface: Node
    names: tuple[str, ...]
    if_stale: bool
    consumer: Event


@dataclass
class Edits:
    """What a strategy wants changed, for all variants together.

    Attributes:
        overrides: for each mutation node that takes an override, the one it gets.
        insertions: refreshes, in program order, at most one of each kind per node.
        warnings: what a person should know.
        widened: mutation nodes whose hand-written override was too narrow.
    """

    overrides: dict[Node, Override] = field(default_factory=dict)
    insertions: dict[tuple[Node, bool], Insertion] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    widened: dict[Node, tuple[str, ...]] = field(default_factory=dict)

    def insert(self, new: Insertion) -> None:
        """Add a refresh; what one before the same node moves already is merged."""
        key = (new.anchor, new.if_stale)
        old = self.insertions.get(key)
        names = tuple(sorted({*new.names, *(old.names if old else ())}))
        self.insertions[key] = replace(new, names=names)


def override(analyses: list[Analysis]) -> Edits:
    """Narrow each mutation to what live consumers read among what it writes; see design rules 1 and 2.

    1. Un-narrowed calls get the active mirrors among what they write that a consumer reads before they are
       overwritten; a call that is known to do nothing gets none.
    2. A call whose mirrors an unknown call may read stays un-narrowed.
    3. A hand-narrowed call keeps its names when they include all of these, else the missing ones are added.
    4. A consumer that would still find something stale (a device-only `copy_`, an in-place write, a mirror that no
       override can name) gets exactly that refreshed before it; a mirror that it reads as it was at entry is
       refreshed if its version says that it is stale.
    """
    refreshed: list[dict[int, int]] = [{} for _ in analyses]
    while True:
        edits = Edits()
        required, full = _requirements(analyses, refreshed)
        for analysis in analyses:
            _decide(analysis, required, full, edits)
        leftovers = [_leftovers(analysis, edits) for analysis in analyses]
        found = [{r.consumer.order: r.stale for r in reads if r.stale} for reads in leftovers]
        if all(_covers(known, f) for f, known in zip(found, refreshed, strict=True)):
            break
        # What is refreshed right before a consumer anyway need not travel with a mutation too.
        refreshed = [_merged(f, known) for f, known in zip(found, refreshed, strict=True)]
    for analysis, reads in zip(analyses, leftovers, strict=True):
        _insert_refreshes(analysis, reads, edits)
    return edits


def _covers(known: dict[int, int], found: dict[int, int]) -> bool:
    return all(not bits & ~known.get(order, 0) for order, bits in found.items())


def _merged(first: dict[int, int], second: dict[int, int]) -> dict[int, int]:
    return {order: first.get(order, 0) | second.get(order, 0) for order in {**first, **second}}


def _narrowable(analysis: Analysis) -> list[Event]:
    events = analysis.program.flat
    return [e for e in events if e.kind is Kind.MUTATION and e.spec is not None and e.spec.takes_override]


def _requirements(
    analyses: list[Analysis], refreshed: list[dict[int, int]]
) -> tuple[dict[Node, set[str]], dict[Node, None]]:
    """What live consumers need of each mutation node, and which nodes an unknown call may read anything of.

    A node may occur several times in a program, and in several variants.
    """
    required: dict[Node, set[str]] = {}
    full: dict[Node, None] = {}
    for analysis, known in zip(analyses, refreshed, strict=True):
        mirroring = Mirroring(analysis.program, analysis.traits)
        live = liveness(analysis.program, analysis.live_out, known) if known else analysis.liveness
        for event in _narrowable(analysis):
            assert event.node is not None
            needed = event.writes & live.live[event.order] & mirroring.active
            required.setdefault(event.node, set()).update(analysis.program.table.mirrors(needed))
            if event.writes & live.unknown[event.order] and event.writes & mirroring.watched:
                full[event.node] = None
    return required, full


def _decide(analysis: Analysis, required: dict[Node, set[str]], full: dict[Node, None], edits: Edits) -> None:
    for event in _narrowable(analysis):
        node = event.node
        assert node is not None
        if node in edits.overrides:
            continue
        names = tuple(sorted(required[node]))
        if event.given is not None and not event.scoped:
            missing = tuple(sorted(required[node].difference(event.given)))
            edits.overrides[node] = tuple(sorted({*event.given, *missing}))
            if missing:
                edits.widened[node] = missing
        else:
            edits.overrides[node] = None if node in full else names
        if event.dynamic:
            edits.warnings.append(
                f"{event.name} (%{node.name}) computes its override at run time; it is replaced by {list(names)}"
            )


def _leftovers(analysis: Analysis, edits: Edits) -> list[StaleRead]:
    """The consumers that still find something stale, each assumed to get it refreshed."""
    mirroring = Mirroring(analysis.program, analysis.traits)

    def moved(event: Event) -> int:
        given = edits.overrides.get(event.node, event.given) if event.node is not None else event.given
        return mirroring.under(event, given)

    return stale_reads(analysis.program, moved, analysis.live_out, repair=True)


def _insert_refreshes(analysis: Analysis, reads: list[StaleRead], edits: Edits) -> None:
    table = analysis.program.table
    for read in reads:
        event = read.consumer
        anchor, interface = event.anchor, event.interface
        if event.node is None:
            anchor, interface = _at_the_end(analysis.program)
        if anchor is None or interface is None:
            names = table.mirrors(read.stale)
            if names:
                edits.warnings.append(f"{event.name} reads {list(names)}, and no interface is in reach to refresh them")
            continue
        for bits, if_stale in ((read.stale, False), (read.at_entry, True)):
            if bits and not (if_stale and interface.op != "placeholder"):
                edits.insert(Insertion(anchor, interface, table.mirrors(bits), if_stale, event))


def _at_the_end(program: Program) -> tuple[Node | None, Node | None]:
    interface = next((e.interface for e in program.events if e.interface is not None), None)
    return program.gm.graph.output_node(), interface


#: how many stale reads are described one by one.
_DESCRIBED = 16

#: strategies by their name in YAML; each takes the analyses of all variants.
STRATEGIES: dict[str, Callable[[list[Analysis]], Edits]] = {"override": override}


def describe_problems(analysis: Analysis) -> list[str]:
    """One paragraph per mirror that a consumer reads stale as the program is, with the path that proves it."""
    lines: list[str] = []
    for read in analysis.problems:
        if len(lines) >= _DESCRIBED:
            return [*lines, "and more of the same"]
        for buffer in analysis.program.table.buffers(read.stale):
            steps = "\n    ".join(proof_path(analysis.program, read, buffer))
            lines.append(f"{read.consumer.name} reads {mirror_of(buffer)}, which is stale there:\n    {steps}")
    return lines
