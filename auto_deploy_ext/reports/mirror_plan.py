"""MirrorPlan: what each call of an orchestrator mirrors before and after scoping, and why."""

from __future__ import annotations

import html
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn
from torch.fx import Node

from auto_deploy_ext.analysis.events import Event, Kind
from auto_deploy_ext.analysis.liveness import StaleRead
from auto_deploy_ext.analysis.operands import Known, Snapshot
from auto_deploy_ext.effects import buffer_of, mirror_of
from auto_deploy_ext.rewriting.strategies import Analysis, Edits, Insertion, Mirroring, Start, describe_problems

HEADINGS = ("#", "call", "next consumer", "mirrored before", "mirrored after", "replayed", "why")
"""Of a plan's tables, as text and as HTML; those of a run have them up to `replayed`."""


@dataclass(frozen=True)
class CallSite:
    """One call that writes metadata, or brings mirrors up to date, in one variant.

    Attributes:
        variant: the variant's name.
        call: the mutation's name, or `bring_up_to_date` for a refresh that the pass put before a consumer.
        index: position among the call sites of the variant, in program order.
        node: the node's name.
        source: where in the orchestrator's source it stands, empty when unknown.
        consumer: the consumers that come next, on every path; empty when there is none.
        reads: sorted `_host` names that these consumers read.
        writes: sorted names of the buffers that the call writes on the device.
        mirrored_before: sorted `_host` names that the call mirrors without the pass: the active ones among what it
            writes, narrowed by hand where it is. The host may move more, its whole buffer, for their sake.
        mirrored_after: those that are brought up to date by copying because of this call, with the pass: under
            `override` what its own transfer moves, else those of what it wrote that a later transfer takes along;
            never those that the host computes.
        why: a sentence.
        replayed: sorted `_host` names that the host computes at this call, without a copy of them.
        operand: how the host gets to know the call's operand for that; empty when it needs none.
        copies_operand: whether the operand is copied to the host for that.
    """

    variant: str
    call: str
    index: int
    node: str
    source: str
    consumer: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    mirrored_before: tuple[str, ...]
    mirrored_after: tuple[str, ...]
    why: str
    replayed: tuple[str, ...] = ()
    operand: str = ""
    copies_operand: bool = False


@dataclass(frozen=True)
class Arrival:
    """Mirrors that a consumer would find stale if no call mirrored anything.

    Attributes:
        mirrors: sorted `_host` names.
        last_write: the call that may have written their buffers last.
        node: that call's node. Where several calls may have been the last, each has an Arrival.
    """

    mirrors: tuple[str, ...]
    last_write: str
    node: str


@dataclass(frozen=True)
class ConsumerReads:
    """One consumer in one variant.

    Attributes:
        variant: the variant's name.
        consumer: the consumer's name.
        node: the node's name, empty for what reads after the forward.
        reads: sorted `_host` names that it reads.
        stale: those that something has written on the device since they were staged, by their last write.
        checked: those that it reads as they were at entry, and that are refreshed if their version says so.
        transfer: those that travel in a transfer of their own which ends right before it.
        transfer_bytes: as many bytes as that moves at most: their buffers' capacities; 0 when nothing travels.
    """

    variant: str
    consumer: str
    node: str
    reads: tuple[str, ...]
    stale: tuple[Arrival, ...]
    checked: tuple[str, ...]
    transfer: tuple[str, ...] = ()
    transfer_bytes: int = 0


@dataclass(frozen=True)
class MirrorPlan:
    """What the pass does to an orchestrator, or would do.

    Attributes:
        strategy: how mirrors are brought up to date.
        mode: how the orchestrator is worked on: "graph", or "eager" where it could not be traced and stays as it is.
        active: `_host` names that the interface has activated.
        variants: the names of the variants.
        call_sites: what each call mirrors, by variant and program order.
        consumers: what each consumer reads.
        problems: stale reads in the orchestrator as it is written, each with the path that proves it.
        warnings: what a person should look at.
        reasons: why something is not as it might be: calls of unknown effect, no tracing.
    """

    strategy: str
    mode: str
    active: tuple[str, ...]
    variants: tuple[str, ...]
    call_sites: tuple[CallSite, ...]
    consumers: tuple[ConsumerReads, ...]
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The plan as a JSON text, the same on every rank and in every process."""
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> MirrorPlan:
        """The inverse of `to_json`."""
        fields: dict[str, Any] = _tuples(json.loads(text))
        fields["call_sites"] = tuple(CallSite(**_tuples(site)) for site in fields["call_sites"])
        fields["consumers"] = tuple(
            ConsumerReads(**{**_tuples(c), "stale": tuple(Arrival(**_tuples(a)) for a in c["stale"])})
            for c in fields["consumers"]
        )
        return cls(**fields)

    def to_text(self) -> str:
        """The plan as tables for a terminal, 160 columns wide and without colours."""
        from rich.console import Console

        console = Console(file=io.StringIO(), width=160, color_system=None, force_terminal=False)
        for renderable in self._tables():
            console.print(renderable)
        for title, lines in (("Problems", self.problems), ("Warnings", self.warnings), ("Reasons", self.reasons)):
            for line in lines:
                console.print(f"{title}: {line}", markup=False, highlight=False)
        output = console.file
        assert isinstance(output, io.StringIO)
        return "\n".join(line.rstrip() for line in output.getvalue().splitlines()) + "\n"

    def _tables(self) -> Iterator[Any]:
        from rich.table import Table

        for variant in self.variants:
            table = Table(title=f"{variant} ({self.strategy}, {self.mode})", title_justify="left")
            for heading in HEADINGS:
                table.add_column(heading)
            for site in self.call_sites:
                if site.variant == variant:
                    table.add_row(*_cells(site))
            yield table

    def _repr_html_(self) -> str:
        parts = []
        headings = "".join(f"<th>{heading}</th>" for heading in HEADINGS)
        for variant in self.variants:
            rows = "".join(_html_row(site) for site in self.call_sites if site.variant == variant)
            caption = html.escape(f"{variant} ({self.strategy}, {self.mode})")
            parts.append(f"<table><caption>{caption}</caption><tr>{headings}</tr>{rows}</table>")
        notes = (*self.problems, *self.warnings, *self.reasons)
        parts.extend(f"<pre>{html.escape(note)}</pre>" for note in notes)
        return "\n".join(parts)


def _tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}


def _listed(names: tuple[str, ...]) -> str:
    return "\n".join(names) if names else "none"


def _cells(site: CallSite) -> tuple[str, ...]:
    """A call site's line of a table, under `HEADINGS`."""
    names = (_listed(site.mirrored_before), _listed(site.mirrored_after), _listed(site.replayed))
    return str(site.index), site.call, site.consumer or "-", *names, site.why


def _html_row(site: CallSite) -> str:
    cells = (html.escape(cell).replace("\n", "<br>") for cell in _cells(site))
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def mirrored_before(analyses: Iterable[Analysis]) -> dict[Node, tuple[str, ...]]:
    """What each mutation node mirrors without the pass; see `CallSite.mirrored_before`."""
    before: dict[Node, set[str]] = {}
    for analysis in analyses:
        mirroring = Mirroring(analysis.program, analysis.traits)
        for event in analysis.program.flat:
            if event.kind is Kind.MUTATION and event.node is not None:
                before.setdefault(event.node, set()).update(mirroring.purpose(event, event.given))
    return {node: tuple(sorted(names)) for node, names in before.items()}


def make_plan(
    analyses: dict[str, Analysis], edits: Edits, strategy: str, mode: str = "graph", reasons: Iterable[str] = ()
) -> MirrorPlan:
    """Describe what a strategy makes of the variants of an orchestrator.

    Args:
        analyses: by variant name.
        edits: what the strategy wants, for all of them.
        strategy: its name.
        mode: see `MirrorPlan`.
        reasons: see `MirrorPlan`; those of unknown calls are added.
    """
    before = mirrored_before(analyses.values())
    sites: list[CallSite] = []
    consumers: list[ConsumerReads] = []
    problems: list[str] = []
    unknown: dict[str, None] = {}
    for variant, analysis in analyses.items():
        sites.extend(_call_sites(variant, analysis, edits, before))
        consumers.extend(_consumers(variant, analysis, edits))
        problems.extend(f"{variant}: {text}" for text in describe_problems(analysis))
        for event in analysis.program.flat:
            if event.kind is Kind.UNKNOWN:
                unknown[f"{variant}: every mirror is up to date at {event.name}: {event.reason}"] = None
    setting = next((a.program.setting for a in analyses.values()), None)
    return MirrorPlan(
        strategy=strategy,
        mode=mode,
        active=tuple(sorted(setting.active)) if setting else (),
        variants=tuple(analyses),
        call_sites=tuple(sites),
        consumers=tuple(consumers),
        problems=tuple(problems),
        warnings=(*edits.warnings, *_widened(edits)),
        reasons=(*reasons, *_whole_moves(analyses, strategy), *unknown, *edits.reasons),
    )


def _whole_moves(analyses: dict[str, Analysis], strategy: str) -> Iterator[str]:
    if strategy == "override" and any(a.traits.narrowed_moves_whole for a in analyses.values()):
        yield "a narrowed call that names what it writes moves the host's whole buffer; copy, replay and auto do not"


def _widened(edits: Edits) -> Iterator[str]:
    for node, missing in edits.widened.items():
        source = node.meta.get("source", "")
        place = f"%{node.name}" + (f", {source}" if source else "")
        yield f"the override of {place} is too narrow: {', '.join(missing)} is read before it is written again; added"


def _call_sites(
    variant: str, analysis: Analysis, edits: Edits, before: dict[Node, tuple[str, ...]]
) -> Iterator[CallSite]:
    refreshes: dict[Node, list[Insertion]] = {}
    for (anchor, if_stale), insertion in edits.insertions.items():
        names = edits.unsent.get(anchor, insertion.names)
        if not if_stale and names:
            refreshes.setdefault(anchor, []).append(replace(insertion, names=names))
    starts = {anchor: start for anchor, start in edits.starts.items() if edits.unsent.get(anchor)}
    mirroring = Mirroring(analysis.program, analysis.traits)
    readers = _readers(analysis)
    index = 0
    for event in analysis.program.flat:
        for insertion in refreshes.pop(event.anchor, []) if event.anchor is not None else []:
            yield _refresh_site(variant, index, insertion, analysis)
            index += 1
        if event.anchor in starts:
            yield _start_site(variant, index, starts.pop(event.anchor), edits, analysis)
            index += 1
        if event.kind is Kind.REFRESH:
            yield _existing_refresh_site(variant, index, event, analysis)
            index += 1
        if event.kind is Kind.MUTATION:
            site = _mutation_site(variant, event, analysis, edits, mirroring, readers.get(event.order, {}))
            yield replace(site, index=index, mirrored_before=before[event.node]) if event.node else site
            index += 1
    for insertion in (i for rest in refreshes.values() for i in rest if i.consumer.node is None):
        yield _refresh_site(variant, index, insertion, analysis)
        index += 1
    for start in (s for s in starts.values() if s.consumer.node is None):
        yield _start_site(variant, index, start, edits, analysis)
        index += 1


def _mutation_site(
    variant: str,
    event: Event,
    analysis: Analysis,
    edits: Edits,
    mirroring: Mirroring,
    readers: dict[str, int],
) -> CallSite:
    table, node = analysis.program.table, event.node
    assert node is not None
    replay = edits.replays.get(node)
    override = edits.overrides.get(node, event.given)
    consumers = analysis.liveness.consumers[event.order]
    reads = 0
    for consumer in consumers:
        reads |= consumer.reads
    return CallSite(
        variant=variant,
        call=event.label,
        index=0,
        node=node.name,
        source=str(node.meta.get("source", "")),
        consumer=", ".join(dict.fromkeys(c.name for c in consumers)),
        reads=table.mirrors(reads),
        writes=table.buffers(event.writes),
        mirrored_before=(),
        mirrored_after=tuple(sorted({*mirroring.purpose(event, override), *edits.sent.get(node, ())})),
        why=_why(event, override, analysis, edits, readers),
        replayed=() if replay is None else tuple(map(mirror_of, replay.names)),
        operand="" if replay is None else _operand(replay.operand),
        copies_operand=replay is not None and isinstance(replay.operand, Snapshot),
    )


def _operand(operand: Known | Snapshot | None) -> str:
    if operand is None:
        return ""
    if isinstance(operand, Known):
        return f"{operand.value} throughout"
    return f"{operand.operand.name}, copied after {operand.after.name}"


def _why(event: Event, override: Any, analysis: Analysis, edits: Edits, readers: dict[str, int]) -> str:
    table = analysis.program.table
    assert event.spec is not None
    if event.spec.restages:
        return "sets every buffer and every mirror from host data"
    if event.status == "noop":
        return "the batch is generate-only already, so the call does nothing"
    sent = "; they travel in that one's transfer" if event.node in edits.sent else ""
    if not event.spec.takes_override:
        if event.spec.mirrors == "written":
            return "mirrors all it writes and cannot be narrowed"
        return "mirrors nothing by itself" if sent else "mirrors nothing"
    if override is None:
        return "stays un-narrowed: a call of unknown effect may read any mirror"
    if event.node in edits.widened:
        return f"the hand-written override lacked {', '.join(edits.widened[event.node])}"
    needed = [f"{name} reads {', '.join(table.mirrors(bits))}" for name, bits in readers.items()]
    hand = ""
    if event.given is not None:
        kept = set(event.given).issubset(override)
        hand = "; hand-written override kept" if kept else "; its hand-written override is not needed"
    if not needed:
        return f"nothing reads a mirror of what it writes before that is written again{hand}"
    unsure = " (unless the batch is generate-only already)" if event.status == "maybe" else ""
    repeated = ""
    if event.node in edits.replays:
        operand = edits.replays[event.node].operand
        brought = ", for which the operand is copied" if isinstance(operand, Snapshot) else ""
        repeated = f"; the host computes what is replayed{brought}"
    return "; ".join(needed) + unsure + repeated + sent + hand


def _readers(analysis: Analysis) -> dict[int, dict[str, int]]:
    """For each write, by event order, who reads which of its mirrors before they are written again."""
    readers: dict[int, dict[str, int]] = {}
    for arrival in analysis.arrivals:
        name = arrival.consumer.name
        for write, bits in arrival.writes:
            names = readers.setdefault(write.order, {})
            names[name] = names.get(name, 0) | bits
    return readers


def _refresh_site(variant: str, index: int, insertion: Insertion, analysis: Analysis) -> CallSite:
    consumer = insertion.consumer
    return CallSite(
        variant=variant,
        call="bring_up_to_date",
        index=index,
        node="",
        source="",
        consumer=consumer.name,
        reads=analysis.program.table.mirrors(consumer.reads),
        writes=(),
        mirrored_before=(),
        mirrored_after=insertion.names,
        why="no mutation's own transfer can bring these up to date",
    )


def _start_site(variant: str, index: int, start: Start, edits: Edits, analysis: Analysis) -> CallSite:
    return CallSite(
        variant=variant,
        call="start_mirrors",
        index=index,
        node="",
        source="",
        consumer=start.consumer.name,
        reads=analysis.program.table.mirrors(start.consumer.reads),
        writes=(),
        mirrored_before=(),
        mirrored_after=edits.unsent[start.anchor],
        why="no mutation wrote these last",
    )


def _existing_refresh_site(variant: str, index: int, event: Event, analysis: Analysis) -> CallSite:
    table = analysis.program.table
    names = table.mirrors(event.freshens)
    consumers = analysis.liveness.consumers[event.order]
    return CallSite(
        variant=variant,
        call=event.label,
        index=index,
        node=event.node.name if event.node else "",
        source=str(event.node.meta.get("source", "")) if event.node else "",
        consumer=", ".join(dict.fromkeys(c.name for c in consumers)),
        reads=table.mirrors(consumers[0].reads) if consumers else (),
        writes=(),
        mirrored_before=names,
        mirrored_after=names,
        why="written by hand",
    )


def _consumers(variant: str, analysis: Analysis, edits: Edits) -> Iterator[ConsumerReads]:
    table = analysis.program.table
    arrivals: dict[int, StaleRead] = {a.consumer.order: a for a in analysis.arrivals}
    events = [e for e in analysis.program.flat if e.kind in (Kind.READ, Kind.UNKNOWN)]
    events.extend(a.consumer for a in analysis.arrivals if a.consumer.node is None)
    sizes: dict[tuple[str, ...], int] = {}
    for event in events:
        transfer = _transfer(event, analysis, edits)
        if transfer not in sizes:
            sizes[transfer] = _capacity(analysis, transfer)
        arrival = arrivals.get(event.order)
        key = (event.anchor, True)
        checked = edits.insertions[key].names if key in edits.insertions else ()  # type: ignore[index]
        yield ConsumerReads(
            variant=variant,
            consumer=event.name,
            node=event.node.name if event.node else "",
            reads=table.mirrors(event.reads),
            stale=tuple([Arrival(table.mirrors(b), w.name, w.node.name) for w, b in arrival.writes if w.node])
            if arrival
            else (),
            checked=checked,
            transfer=transfer,
            transfer_bytes=sizes[transfer],
        )


def _transfer(event: Event, analysis: Analysis, edits: Edits) -> tuple[str, ...]:
    """The mirrors of the transfer that ends right before a consumer."""
    anchor = analysis.program.gm.graph.output_node() if event.node is None else event.anchor
    if anchor is None:
        return ()
    if anchor in edits.starts:
        return edits.starts[anchor].names
    refresh = edits.insertions.get((anchor, False))
    return () if refresh is None else refresh.names


def _capacity(analysis: Analysis, names: Iterable[str]) -> int:
    """As many bytes as some mirrors have; 0 without an interface."""
    info = analysis.program.setting.info
    if info is None:
        return 0
    views = [info._input_buffer.get_view(buffer_of(name)) for name in names]
    return sum(view.numel() * view.element_size() for view in views)


def plan(module: nn.Module, cm: Any, **options: Any) -> MirrorPlan:
    """Return what `scope_host_mirrors` does to a module, or did; the module is not changed.

    Args:
        module: the model, before or after the pass.
        cm: the CachedSequenceInterface; its state is the same afterwards.
        **options: fields of `ScopeOptions`, which are those of the transform's config; without a `strategy` the plan
            is for the one by which the module has been rewritten, before the pass for the default one.

    Raises:
        UntraceableError: the orchestrator cannot be traced, with `mode="graph"`.
        OrchestratorError: it, or the parameter that receives the interface, cannot be found.

    Example:
        >>> print(auto_deploy_ext.plan(model, cm).to_text())
    """
    from auto_deploy_ext.rewriting.scoping import ScopeOptions, plan_module

    return plan_module(module, cm, ScopeOptions(**options), options.get("strategy"))
