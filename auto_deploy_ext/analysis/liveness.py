"""Which mirrors are still going to be read, and which are stale when they are: dataflow over a program's events.

Both analyses are linear in events times the buffers that an event touches; sets are bit sets.

* Backward, liveness: a mutation's mirror is needed where a consumer reads it before something certainly overwrites the
  buffer. A mutation that may be a no-op overwrites nothing for certain, so what an earlier one wrote stays needed;
  over the two worlds, it does something or it does nothing, that union is exact, because a call that is known to do
  nothing (a second `switch_to_generate_`) is neither a write nor a maybe.
* Forward, staleness: what each consumer finds stale on arrival, given what each call brings up to date by itself, and
  which writes may have made it so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from auto_deploy_ext.analysis.events import EVERYTHING, Event, Kind, NameTable, Program

#: what a call itself brings up to date, as a bit set; EVERYTHING: the whole buffer.
Moved = Callable[[Event], int]

#: how many writes are remembered as possible last ones before those that later ones cover are forgotten.
_REMEMBERED_WRITES = 32

#: writes that may have been the last, oldest first, each with the buffers of which it may have been.
LastWrites = tuple[tuple[Event, int], ...]


@dataclass
class Liveness:
    """The result of the backward analysis, by event order.

    Attributes:
        live: mirrors that something read for certain, by name, reads after the event and before the next write.
        unknown: those that a call of unknown effect may read.
        consumers: the next consumers after the event, on every path, in program order.
    """

    live: list[int]
    unknown: list[int]
    consumers: list[tuple[Event, ...]]


def liveness(program: Program, live_out: int = 0, refreshed: Mapping[int, int] | None = None) -> Liveness:
    """Compute what is live after each event.

    Args:
        program: the events.
        live_out: mirrors that are read after the forward.
        refreshed: by event order, mirrors that are brought up to date right before that event in any case.
    """
    result = Liveness([0] * len(program.flat), [0] * len(program.flat), [()] * len(program.flat))
    consumers = (live_out_event(program, live_out),) if live_out else ()
    out = live_out & ~(refreshed or {}).get(len(program.flat), 0)
    _backward(program.events, _LiveState(out, 0, consumers), result, refreshed or {})
    return result


def live_out_event(program: Program, live_out: int) -> Event:
    """The event that stands for whatever reads mirrors after the forward."""
    return Event(Kind.READ, None, "live_out", reads=live_out, order=len(program.flat))


@dataclass
class _LiveState:
    live: int
    unknown: int
    consumers: tuple[Event, ...]


def _backward(events: list[Event], state: _LiveState, result: Liveness, refreshed: Mapping[int, int]) -> _LiveState:
    live, unknown, consumers = state.live, state.unknown, state.consumers
    for event in reversed(events):
        result.live[event.order], result.unknown[event.order] = live, unknown
        result.consumers[event.order] = consumers
        if event.kind is Kind.BRANCH:
            joined = [_backward(b, _LiveState(live, unknown, consumers), result, refreshed) for b in event.branches]
            live = _union(s.live for s in joined)
            unknown = _union(s.unknown for s in joined)
            consumers = tuple(dict.fromkeys(c for s in joined for c in s.consumers))
            continue
        live &= ~event.kills
        unknown &= ~event.kills
        if event.kind is Kind.UNKNOWN:
            unknown |= event.reads
        else:
            live |= event.reads
        if event.order in refreshed:
            live &= ~refreshed[event.order]
            unknown &= ~refreshed[event.order]
        if event.kind in (Kind.READ, Kind.UNKNOWN):
            consumers = (event,)
    return _LiveState(live, unknown, consumers)


def _union(sets: Iterable[int]) -> int:
    result = 0
    for bits in sets:
        result |= bits
    return result


@dataclass(frozen=True)
class StaleRead:
    """A consumer that reads mirrors which are stale when it is reached.

    Attributes:
        consumer: the event that reads.
        stale: the mirrors it reads that a device write may have made stale, as a bit set.
        at_entry: those that are as fresh as they were at entry.
        writes: the writes that may have been the last of what is stale.
    """

    consumer: Event
    stale: int
    at_entry: int
    writes: LastWrites

    @property
    def last_write(self) -> Event | None:
        """The write after which everything that the consumer finds stale could have been moved; None: entry."""
        return self.writes[-1][0] if self.writes else None


@dataclass
class _FlowState:
    stale: int = 0
    entry: int = 0
    writes: list[tuple[Event, int]] = field(default_factory=list)

    def copy(self) -> _FlowState:
        return _FlowState(self.stale, self.entry, list(self.writes))


@dataclass
class _Flow:
    table: NameTable
    moved: Moved
    repair: bool
    needed: Moved | None = None
    found: list[StaleRead] = field(default_factory=list)


def stale_reads(
    program: Program, moved: Moved, live_out: int = 0, repair: bool = False, needed: Moved | None = None
) -> list[StaleRead]:
    """Return, in program order, the consumers that read something stale.

    Args:
        program: the events.
        moved: what each mutation brings up to date by itself.
        live_out: mirrors that are read after the forward.
        repair: whether a consumer's stale mirrors are brought up to date right before it, so that the next consumer
            finds them fresh; False lists every consumer that would read a stale mirror.
        needed: mirrors that a mutation reads, because the host repeats it on them; None: no mutation reads any.
    """
    flow = _Flow(program.table, moved, repair, needed)
    state = _FlowState(entry=EVERYTHING if program.setting.checks_entry else 0)
    _forward(program.events, state, flow)
    if live_out:
        _read(live_out_event(program, live_out), live_out, state, flow)
    return flow.found


def nothing_moved(event: Event) -> int:
    """The `moved` of a program whose mutations mirror nothing: what strategy `copy` starts from."""
    return 0


def _forward(events: list[Event], state: _FlowState, flow: _Flow) -> None:
    for event in events:
        if event.kind is Kind.BRANCH:
            _join(event, state, flow)
            continue
        if event.reads:
            _read(event, event.reads, state, flow)
        if flow.needed is not None and event.kind is Kind.MUTATION:
            _read(event, flow.needed(event), state, flow)
        if event.writes:
            _note_writes(event, state, flow)
            moved = flow.moved(event) if event.kind is Kind.MUTATION else 0
            if event.status == "effective":
                state.stale = (state.stale | event.writes) & ~moved
                state.entry &= ~(event.kills | moved)
            else:
                state.stale |= event.writes & ~moved
        if event.freshens:
            state.stale &= ~event.freshens
            state.entry &= ~event.freshens


def _read(event: Event, reads: int, state: _FlowState, flow: _Flow) -> None:
    reads &= flow.table.all
    stale = reads & state.stale
    at_entry = reads & state.entry & ~stale
    if not (stale or at_entry):
        return
    writes = tuple([(e, bits & stale) for e, bits in state.writes if bits & stale])
    flow.found.append(StaleRead(event, stale, at_entry, writes))
    if flow.repair:
        state.stale &= ~stale
        state.entry &= ~(at_entry | stale)


def _note_writes(event: Event, state: _FlowState, flow: _Flow) -> None:
    kept = ~(event.kills & event.writes)
    state.writes = [(e, bits & kept) for e, bits in state.writes if bits & kept]
    state.writes.append((event, event.writes & flow.table.all))
    if len(state.writes) > _REMEMBERED_WRITES:
        state.writes = _newest(state.writes)


def _newest(writes: list[tuple[Event, int]]) -> list[tuple[Event, int]]:
    """Forget the older half of the writes, except what no newer one covers."""
    half = len(writes) // 2
    covered = _union(bits for _, bits in writes[half:])
    return [(e, bits & ~covered) for e, bits in writes[:half] if bits & ~covered] + writes[half:]


def _join(branch_event: Event, state: _FlowState, flow: _Flow) -> None:
    """Run every alternative from the same state; afterwards holds what holds after any of them."""
    results = []
    for branch in branch_event.branches:
        taken = state.copy()
        _forward(branch, taken, flow)
        results.append(taken)
    state.stale = _union(r.stale for r in results)
    state.entry = _union(r.entry for r in results)
    merged: dict[Event, int] = {}
    for result in results:
        for event, bits in result.writes:
            merged[event] = merged.get(event, 0) | bits
    state.writes = sorted(merged.items(), key=lambda item: item[0].order)


def proof_path(program: Program, read: StaleRead, buffer: str) -> tuple[str, ...]:
    """Return the way from the last write of a buffer to the consumer that reads its mirror, one line per step."""
    bit = program.table.bit(buffer)
    writes = [e for e, bits in read.writes if bits & bit]
    if not writes:
        start = [f"at entry {buffer}_host may be stale"]
        first = -1
    else:
        start = [f"{_describe(w)} writes {buffer} on the device" for w in writes]
        first = max(w.order for w in writes)
    between = [e for e in program.flat[first + 1 : read.consumer.order] if e.kind is Kind.MUTATION]
    passed = [f"then {_describe(e)}, which leaves {buffer} and its mirror as they are" for e in between[:4]]
    if len(between) > 4:
        passed.append(f"then {len(between) - 4} more calls that leave them as they are")
    return (*start, *passed, f"then {_describe(read.consumer)} reads {buffer}_host")


def _describe(event: Event) -> str:
    if event.node is None:
        return "the caller (live_out)"
    source = event.node.meta.get("source")
    place = f"%{event.node.name}" + (f", {source}" if source else "")
    return f"{event.name} ({place})"
