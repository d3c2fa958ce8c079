"""What a run measured, as JSON and as tables for a terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..effects import MUTATIONS
from ..reports.mirror_plan import HEADINGS, CallSite, MirrorPlan
from ..runtime.mirrors import Transfer
from .command_line import PART


@dataclass(frozen=True)
class MirrorTotals:
    """Device-to-host traffic of one generation.

    Attributes:
        transfers: copies.
        bytes: bytes that they moved.
        waits: how many of them the host waited for.
    """

    transfers: int
    bytes: int
    waits: int

    @classmethod
    def of(cls, transfers: Iterable[Transfer]) -> MirrorTotals:
        """Sum up what `record_mirrors` recorded."""
        transfers = list(transfers)
        return cls(len(transfers), sum(t.nbytes for t in transfers), sum(t.waited for t in transfers))


#: what the JSON of a run says of a call site.
CALL_SITE_FIELDS = ("call", "index", "consumer", "mirrored_before", "mirrored_after", "replayed", "operand")


@dataclass(frozen=True)
class RunReport:
    """The result of ``auto-deploy-ext run``; its fields are those of the JSON file.

    Attributes:
        config: name or path of the config.
        host: the AutoDeploy that the plugin is bound to: ``name`` and ``version``.
        device: where the model ran.
        generated_tokens: tokens over all prompts.
        tokens_match_greedy: whether they are those of greedy decoding without speculation; None at a temperature
            above 0, where only those of the original forward are compared.
        acceptance_length: mean tokens per verified row.
        acceptance_by_position: share of verified rows whose drafts up to this one were accepted.
        tokens_per_second: with speculation (``speculative``) and with the target alone (``target_alone``); runs
            interleaved, the median of each.
        temperature: of sampling, 0 for greedy.
        mirrors: traffic of the original (``full``) and of the rewritten forward (``scoped``), same prompts.
        call_sites: what each call that writes metadata mirrors; see `distinct_call_sites`.
    """

    config: str
    host: dict[str, str]
    device: str
    generated_tokens: int
    tokens_match_greedy: bool | None
    acceptance_length: float
    acceptance_by_position: tuple[float, ...]
    tokens_per_second: dict[str, float]
    temperature: float
    mirrors: dict[str, MirrorTotals]
    call_sites: tuple[CallSite, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain dicts and lists of the fields; of a call site only `CALL_SITE_FIELDS`."""
        fields = asdict(self)
        fields["call_sites"] = [{key: site[key] for key in CALL_SITE_FIELDS} for site in fields["call_sites"]]
        return json.loads(json.dumps(fields))


def distinct_call_sites(plan: MirrorPlan) -> tuple[CallSite, ...]:
    """The call sites of all variants; one that several variants share (its `CALL_SITE_FIELDS`) is given once."""
    distinct: dict[tuple[Any, ...], CallSite] = {}
    for site in plan.call_sites:
        distinct.setdefault(tuple(getattr(site, field) for field in CALL_SITE_FIELDS), site)
    return tuple(distinct.values())


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8; see `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file that is there completely or not at all, or straight to a device or pipe; makes its directory."""
    path = Path(os.path.realpath(path))  # what a link leads to is replaced, not the link
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    part = path.with_name(f"{path.name}{PART}")
    try:
        part.write_bytes(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def call_site_table(call_sites: Sequence[CallSite]) -> RenderableType:
    """One line per call site that a mirror could be copied at, numbered as ``explain`` numbers them."""
    table = Table(title="Host mirrors copied per call site", title_justify="left", expand=True)
    if any(site.copies_operand for site in call_sites):
        table.caption, table.caption_justify = (
            "Of a replayed call the operand may have to be copied; it counts below.",
            "left",
        )
    number, call, consumer, before, after, computed, _ = HEADINGS
    table.add_column(number, justify="right")
    table.add_column(call)
    table.add_column(consumer)
    replayed = any(site.replayed for site in call_sites)
    for heading in (before, after, computed) if replayed else (before, after):
        table.add_column(heading, ratio=2, overflow="fold")
    shown = set()  # calls of several variants may differ in their operand alone, which the table does not show
    for site in call_sites:
        row = (site.index, site.call, site.consumer, site.mirrored_before, site.mirrored_after, site.replayed)
        if row in shown or not can_mirror(site):
            continue
        shown.add(row)
        table.add_row(
            str(site.index),
            site.call,
            site.consumer or "-",
            _names(site.mirrored_before, "yellow"),
            _names(site.mirrored_after, "green"),
            *([_names(site.replayed, "cyan")] if replayed else []),
        )
    return table


def can_mirror(site: CallSite) -> bool:
    """Whether mirrors are copied to the host because of the call, before or after the pass."""
    by_itself = site.call not in MUTATIONS or MUTATIONS[site.call].mirrors == "written"
    return by_itself or bool(site.mirrored_after)


def mirror_table(mirrors: dict[str, MirrorTotals], steps: int) -> RenderableType:
    """Traffic per decode step before and after, and in all."""
    table = Table(title=f"Device-to-host traffic over {steps} decode steps", title_justify="left")
    for heading in ("", "transfers/step", "bytes/step", "waits/step", "transfers", "bytes"):
        table.add_column(heading, justify="right" if heading else "left")
    labels = {"full": "before (as written)", "scoped": "after (rewritten)"}
    for key, totals in mirrors.items():
        per_step = [f"{value / max(steps, 1):.2f}" for value in (totals.transfers, totals.bytes, totals.waits)]
        table.add_row(labels.get(key, key), *per_step, str(totals.transfers), str(totals.bytes))
    return table


def run_summary(report: RunReport, steps: int, accepted: Sequence[int]) -> RenderableType:
    """Everything about a run but its texts."""
    histogram = ", ".join(f"{drafts}: {count}" for drafts, count in enumerate(accepted))
    facts = Table.grid(padding=(0, 2))
    facts.add_row("host", f"{report.host['name']} {report.host['version']} on {report.device}")
    facts.add_row("generated", f"{report.generated_tokens} tokens in {steps} steps")
    facts.add_row("acceptance length", f"{report.acceptance_length:.2f} (rows by accepted drafts: {histogram})")
    by_position = ", ".join(f"{share:.0%}" for share in report.acceptance_by_position)
    facts.add_row("drafts accepted", f"{by_position or 'nothing was verified'} (first, first two, ...)")
    speculative, alone = report.tokens_per_second["speculative"], report.tokens_per_second["target_alone"]
    facts.add_row(
        "tokens per second",
        f"{speculative:.1f} with speculation, {alone:.1f} without: {speculative / alone:.2f} times as fast",
    )
    if report.temperature > 0:
        facts.add_row("temperature", f"{report.temperature:g}: tokens are drawn, so no greedy ones to compare with")
    else:
        verdict = Text("yes", "bold green") if report.tokens_match_greedy else Text("NO", "bold red")
        facts.add_row("same tokens as greedy", verdict)
    return Group(call_site_table(report.call_sites), mirror_table(report.mirrors, steps), facts)


def output_table(prompts: Sequence[str], continuations: Sequence[str]) -> RenderableType:
    """Prompts and what followed."""
    table = Table(title="Output", title_justify="left", expand=True)
    table.add_column("prompt", ratio=1)
    table.add_column("continuation", ratio=2)
    for prompt, continuation in zip(prompts, continuations, strict=True):
        table.add_row(Text(prompt), Text(continuation))
    return table


def to_dot(plan: MirrorPlan) -> str:
    """A plan as a Graphviz graph: calls in program order, and an edge to whoever reads the mirrors next.

    An edge is labelled with the mirrors that the call copies; dashed and grey with those that the pass has removed.
    """
    lines = ["digraph mirrors {", "  rankdir=LR;", "  node [fontname=monospace, fontsize=10];"]
    for number, variant in enumerate(plan.variants):
        sites = [site for site in plan.call_sites if site.variant == variant]
        lines += [f"  subgraph cluster_{number} {{", f"    label={_quoted(variant)};"]
        names = [f"v{number}_call{site.index}" for site in sites]
        consumers = {site.consumer: f"v{number}_consumer{k}" for k, site in enumerate(sites) if site.consumer}
        lines += [
            f"    {name} [label={_quoted(f'{site.index} {site.call}')}];"
            for name, site in zip(names, sites, strict=True)
        ]
        lines += [f"    {name} [label={_quoted(consumer)}, shape=box];" for consumer, name in consumers.items()]
        if len(names) > 1:
            lines.append(f"    {' -> '.join(names)} [style=dotted, arrowhead=none];")
        for name, site in zip(names, sites, strict=True):
            removed = sorted({*site.mirrored_before} - {*site.mirrored_after})
            if site.consumer and site.mirrored_after:
                lines.append(f"    {name} -> {consumers[site.consumer]} [label={_quoted(*site.mirrored_after)}];")
            if site.consumer and removed:
                style = "style=dashed, color=gray, fontcolor=gray"
                lines.append(f"    {name} -> {consumers[site.consumer]} [label={_quoted(*removed)}, {style}];")
        lines.append("  }")
    return "\n".join([*lines, "}", ""])


def _quoted(*texts: str) -> str:
    """Lines of text as one Graphviz string."""
    return json.dumps("\n".join(texts))


def make_console(stderr: bool = False) -> Console:
    """A console that is wide enough for the tables also where there is no terminal."""
    console = Console(stderr=stderr)
    return console if console.is_terminal else Console(stderr=stderr, width=160)


def _names(names: Sequence[str], style: str) -> Text:
    return Text("\n".join(names), style) if names else Text("none", "dim")
