"""How a program's stale reads are prevented: each strategy turns the analysis into edits of the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch.fx import Node

from auto_deploy_ext.analysis.events import EVERYTHING, Event, Kind, Program
from auto_deploy_ext.analysis.liveness import Liveness, StaleRead, liveness, nothing_moved, proof_path, stale_reads
from auto_deploy_ext.analysis.replays import Replay, Replays, choose, inputs_of
from auto_deploy_ext.effects import mirror_of

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

    def by_itself(self, event: Event) -> int:
        """What the call moves when it is narrowed to nothing, which not every call can be."""
        spec = event.spec
        return 0 if spec is None or spec.takes_override else self.under(event, None)

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


@dataclass(frozen=True)
class Start:
    """A transfer that is started somewhere and waited for right before a node.

    Attributes:
        anchor: the node.
        interface: the node that stands for the interface there.
        names: sorted `_host` names.
        unless_fresh: those of them that travel only if their version says that they are stale.
        after: the node of the same graph right after which the transfer is started.
        trigger: what wrote the last of their buffers.
        consumer: the consumer it is for.
    """

    anchor: Node
    interface: Node
    names: tuple[str, ...]
    unless_fresh: tuple[str, ...]
    after: Node
    trigger: str
    consumer: Event


@dataclass
class Edits:
    """What a strategy wants changed, for all variants together.

    Attributes:
        overrides: for each mutation node that takes an override, the one it gets.
        insertions: refreshes, in program order, at most one of each kind per node.
        starts: transfers, by the node that waits for them.
        replays: for each mutation node that the host repeats, what.
        mutations: the name of each of these mutations.
        interfaces: the node that stands for the interface at each of them.
        sent: by mutation node, the mirrors that travel, with a start or a refresh, because of what it wrote.
        unsent: by the node that a transfer ends at, those mirrors of it that no mutation wrote last.
        warnings: what a person should know.
        reasons: why a transfer takes place where the host might have repeated a mutation.
        widened: mutation nodes whose hand-written override was too narrow.
    """

    overrides: dict[Node, Override] = field(default_factory=dict)
    insertions: dict[tuple[Node, bool], Insertion] = field(default_factory=dict)
    starts: dict[Node, Start] = field(default_factory=dict)
    replays: dict[Node, Replay] = field(default_factory=dict)
    mutations: dict[Node, str] = field(default_factory=dict)
    interfaces: dict[Node, Node] = field(default_factory=dict)
    sent: dict[Node, set[str]] = field(default_factory=dict)
    unsent: dict[Node, tuple[str, ...]] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    reasons: dict[str, None] = field(default_factory=dict)
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
        if event.given is not None:
            missing = tuple(sorted(required[node].difference(event.given)))
            edits.overrides[node] = tuple(sorted({*event.given, *missing}))
            if missing:
                edits.widened[node] = missing
        else:
            edits.overrides[node] = None if node in full else names
        _warn_of_dynamic(event, names, edits)


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
    return program.gm.graph.output_node(), program.interface


# -- copy, replay, auto ----------------------------------------------------------------------------------------------


def copy(analyses: list[Analysis]) -> Edits:
    """Bring what a consumer finds stale to it in one transfer; mutations move nothing.

    1. Every call that can be narrowed is narrowed to nothing, also where a person had named something.
    2. What a consumer reads and finds stale travels in one transfer, started right after the last write of any of it
       and waited for right before the consumer.
    3. Where that write lies outside of the nested graph or branch that the consumer is in, or the interface cannot be
       reached there, the transfer takes place right before the consumer instead.
    4. A mirror that a consumer reads as it was at entry is refreshed if its version says that it is stale.
    """
    return _by_transfers(analyses, None)


def replay(analyses: list[Analysis]) -> Edits:
    """Have the host repeat every mutation whose arithmetic it can do, and copy only what it cannot.

    1. A consumer's mirror that could be had without a copy (see `auto_deploy_ext.analysis.replays`) is repeated at the
       mutation that wrote it, from mirrors for which the same holds.
    2. The operand is snapshotted as soon as it has its final value; mutations that are given the same value share one.
    3. What a repeated mutation reads as it was at entry is refreshed before it if its version says that it is stale.
    4. All else is as with `copy`.
    """
    return _by_transfers(analyses, _choose(analyses, together=False))


def auto(analyses: list[Analysis]) -> Edits:
    """As `replay`, but where a consumer must wait for a transfer anyway, all that it finds stale travels with it."""
    return _by_transfers(analyses, _choose(analyses, together=True))


def _choose(analyses: list[Analysis], together: bool) -> Replays:
    own = [Mirroring(a.program, a.traits).by_itself for a in analyses]
    return choose([a.program for a in analyses], [a.live_out for a in analyses], own, together)


def _by_transfers(analyses: list[Analysis], replays: Replays | None) -> Edits:
    edits = Edits()
    known = replays or Replays()
    edits.replays = dict(known.by_node)
    arrivals: list[_Arriving] = []
    for analysis in analyses:
        for event in _narrowable(analysis):
            assert event.node is not None
            edits.overrides[event.node] = ()
            if event.node in edits.replays and event.interface is not None:
                edits.mutations[event.node] = event.spec.name if event.spec is not None else event.label
                edits.interfaces[event.node] = event.interface
            _warn_of_dynamic(event, (), edits)
        for read in _unrepeated(analysis, known):
            arrivals.append(_Arriving.of(analysis, read))
            if replays is not None and read.stale:
                _explain(analysis, read, replays, edits)
    _place(arrivals, edits)
    return edits


def _warn_of_dynamic(event: Event, names: tuple[str, ...], edits: Edits) -> None:
    assert event.node is not None
    if event.dynamic:
        edits.warnings.append(
            f"{event.name} (%{event.node.name}) computes its override at run time; it is replaced by {list(names)}"
        )


def _unrepeated(analysis: Analysis, replays: Replays) -> list[StaleRead]:
    """Who finds something stale although the host repeats what it repeats; repeated mutations read mirrors too."""
    table = analysis.program.table
    own = Mirroring(analysis.program, analysis.traits).by_itself

    def moved(event: Event) -> int:
        return own(event) | replays.outputs(event, table)

    def needed(event: Event) -> int:
        return replays.inputs(event, table)

    return stale_reads(analysis.program, moved, analysis.live_out, repair=True, needed=needed)


@dataclass
class _Arriving:
    """One consumer's stale mirrors and how they can reach it.

    Attributes:
        after: the node right after which their transfer can start; None: it has to take place at the consumer.
        certain: those that are stale whatever happens.
        versioned: those whose version tells whether they are stale.
    """

    read: StaleRead
    analysis: Analysis
    anchor: Node | None
    interface: Node | None
    after: Node | None
    certain: int
    versioned: int

    @classmethod
    def of(cls, analysis: Analysis, read: StaleRead) -> _Arriving:
        event = read.consumer
        anchor, interface, entry = event.anchor, event.interface, event.anchor_entry
        if event.node is None:
            anchor, interface = _at_the_end(analysis.program)
        after = None if read.last_write is None else read.last_write.node_in(entry)
        if after is anchor or interface is None or interface.op != "placeholder":
            after = None
        unversioned = twice = seen = conditional = 0
        for write, bits in read.writes:
            twice |= seen & bits
            seen |= bits
            if write.spec is None or not write.spec.keeps_versions or not analysis.program.setting.checks_entry:
                unversioned |= bits
            if write.status != "effective" or write.entry is not entry:
                conditional |= bits
        return cls(read, analysis, anchor, interface, after, seen & ~twice & ~conditional, seen & ~unversioned)


def _place(arrivals: list[_Arriving], edits: Edits) -> None:
    """Decide where each consumer's mirrors travel; a consumer that occurs several times gets what it ever needs."""
    by_anchor: dict[Node, list[_Arriving]] = {}
    for arriving in arrivals:
        event, table = arriving.read.consumer, arriving.analysis.program.table
        anchor, interface = arriving.anchor, arriving.interface
        if anchor is None or interface is None:
            names = table.mirrors(arriving.read.stale)
            if names:
                edits.warnings.append(f"{event.name} reads {list(names)}, and no interface is in reach to refresh them")
            continue
        if arriving.read.at_entry and interface.op == "placeholder":
            edits.insert(Insertion(anchor, interface, table.mirrors(arriving.read.at_entry), True, event))
        if arriving.read.stale:
            by_anchor.setdefault(anchor, []).append(arriving)
            _attribute(arriving, edits)
    for anchor, group in by_anchor.items():
        names = tuple(sorted({n for a in group for n in a.analysis.program.table.mirrors(a.read.stale)}))
        first = group[0]
        assert first.interface is not None
        if any(a.after is None for a in group):
            edits.insert(Insertion(anchor, first.interface, names, False, first.read.consumer))
            continue
        last = max(group, key=lambda a: _position(a.after, group))
        assert last.after is not None and last.read.last_write is not None
        unless = _unless_fresh(group, names)
        trigger = last.read.last_write.label
        edits.starts[anchor] = Start(anchor, first.interface, names, unless, last.after, trigger, first.read.consumer)


def _attribute(arriving: _Arriving, edits: Edits) -> None:
    """Note for whose sake a consumer's mirrors travel."""
    table = arriving.analysis.program.table
    rest = arriving.read.stale
    for write, bits in arriving.read.writes:
        if write.node is not None and write.kind is Kind.MUTATION:
            edits.sent.setdefault(write.node, set()).update(table.mirrors(bits))
            rest &= ~bits
    assert arriving.anchor is not None
    known = edits.unsent.get(arriving.anchor, ())
    edits.unsent[arriving.anchor] = tuple(sorted({*known, *table.mirrors(rest)}))


def _position(node: Node | None, group: list[_Arriving]) -> int:
    """A node's place in its graph, where that matters."""
    assert node is not None
    if all(a.after is node for a in group):
        return 0
    return next(i for i, other in enumerate(node.graph.nodes) if other is node)


def _unless_fresh(group: list[_Arriving], names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the names that may be fresh when the transfer starts and whose versions tell."""
    maybe = []
    for name in names:
        bits = [(a, a.analysis.program.table.bits([name])) for a in group]
        certain = all(a.certain & bit for a, bit in bits)
        versioned = all(a.versioned & bit for a, bit in bits if a.read.stale & bit)
        if versioned and not certain:
            maybe.append(name)
    return tuple(maybe)


def _explain(analysis: Analysis, read: StaleRead, replays: Replays, edits: Edits) -> None:
    """Say why a consumer's mirrors are copied although mutations are repeated where that is possible."""
    table = analysis.program.table
    for write, bits in read.writes:
        shown = ", ".join(table.mirrors(bits))
        place = f"{write.name} (%{write.node.name})" if write.node is not None else write.name
        why = _why_not(analysis, write, bits, replays)
        edits.reasons[f"{read.consumer.name} gets {shown} by a copy: {why.format(place=place)}"] = None


def _why_not(analysis: Analysis, write: Event, bits: int, replays: Replays) -> str:
    table, spec = analysis.program.table, write.spec
    if write.kind is not Kind.MUTATION or spec is None:
        return "{place} writes the buffer itself"
    if write.node in replays.refused:
        return f"{{place}} cannot be repeated on the host: {replays.refused[write.node]}"
    unknown = [name for name in table.buffers(bits) if spec.replay_inputs(name) is None]
    if unknown:
        return f"what {{place}} gives {', '.join(unknown)}, the host does not know"
    inputs = ", ".join(table.mirrors(inputs_of(write, table, table.buffers(bits))))
    return f"it travels with others, or not all of {inputs or 'its inputs'} can be had without a copy before {{place}}"


#: how many stale reads are described one by one.
_DESCRIBED = 16

#: strategies by their name in YAML; each takes the analyses of all variants.
STRATEGIES: dict[str, Callable[[list[Analysis]], Edits]] = {
    "override": override,
    "copy": copy,
    "replay": replay,
    "auto": auto,
}


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
