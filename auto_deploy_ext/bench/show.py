"""The benchmark's result as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .cells import LIMIT, POLICIES
from .results import GROUP_KEY

_NOT_A_GPU = "This machine's numbers are those of Python on a CPU: they say nothing about a decode step on a GPU."


def summary(result: Mapping[str, Any]) -> RenderableType:
    """Everything that was measured."""
    parts: list[RenderableType] = []
    if result["cells"]:
        parts += [step_table(result["cells"]), traffic_table(result["cells"])]
    if result["launches"]:
        parts.append(launch_table(result["launches"]))
    if result["scale"]:
        parts.append(scale_table(result["scale"]))
    if result["targets"]:
        parts.append(target_table(result["targets"]))
    parts += [Text(f"left out: {entry['what']}: {entry['why']}", "yellow") for entry in result["left_out"]]
    if not result["device"]["is_gpu"]:
        parts.append(Text(_NOT_A_GPU, "bold yellow"))
    return Group(*parts)


def step_table(cells: Sequence[Mapping[str, Any]]) -> RenderableType:
    """One line per group and fusion: the limit's step, and each policy as a multiple of it."""
    policies = [p for p in POLICIES if p != LIMIT and any(cell["policy"] == p for cell in cells)]
    table = Table(title="Step time: the limit, and each policy as a multiple of it", title_justify="left")
    for heading in ("attention", "compiled"):
        table.add_column(heading)
    for heading in ("K", "batch"):
        table.add_column(heading, justify="right")
    table.add_column("fused")
    for heading in (f"{LIMIT} us", *policies, "run-ahead auto"):
        table.add_column(heading, justify="right")
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for cell in cells:
        rows.setdefault((*(cell[name] for name in GROUP_KEY), cell["fused"]), {})[cell["policy"]] = cell
    for (attention, compiled, k, batch, fused), by_policy in rows.items():
        limit = by_policy.get(LIMIT)
        ahead = by_policy.get("auto", {}).get("run_ahead")
        table.add_row(
            attention,
            compiled,
            str(k),
            str(batch),
            "yes" if fused else "no",
            f"{limit['step_us']:.0f}" if limit else "-",
            *(f"{by_policy[p]['ratio_to_limit']:.3f}" if p in by_policy else "-" for p in policies),
            "-" if ahead is None else f"{ahead:.2f}",
        )
    return table


def traffic_table(cells: Sequence[Mapping[str, Any]]) -> RenderableType:
    """What a step brings to the host, for the first group of each attention backend."""
    table = Table(title="Device-to-host copies of a step", title_justify="left")
    table.add_column("attention")
    for heading in ("K", "batch"):
        table.add_column(heading, justify="right")
    table.add_column("policy")
    for heading in ("transfers", "bytes", "host waits", "run-ahead"):
        table.add_column(heading, justify="right")
    shown: dict[str, tuple[Any, ...]] = {}
    for cell in cells:
        group = tuple(cell[name] for name in (*GROUP_KEY, "fused"))
        if shown.setdefault(cell["attn_backend"], group) != group:
            continue
        ahead = cell["run_ahead"]
        table.add_row(
            cell["attn_backend"],
            str(cell["k"]),
            str(cell["batch"]),
            cell["policy"],
            *(str(cell[name]) for name in ("transfers", "bytes", "host_waits")),
            "-" if ahead is None else f"{ahead:.2f}",
        )
    return table


def launch_table(launches: Sequence[Mapping[str, Any]]) -> RenderableType:
    """What is launched between the models."""
    what = launches[0]["what"]
    table = Table(title=f"Launched ({what}), models apart", title_justify="left")
    for heading in ("attention", "policy", "fused"):
        table.add_column(heading)
    for heading in ("per draft step", "copies there", "in the step", "with the models"):
        table.add_column(heading, justify="right")
    for entry in launches:
        numbers = [entry["per_draft_step"], entry["copies_per_draft_step"], entry["outside_models"], entry["total"]]
        table.add_row(
            entry["attn_backend"],
            entry["policy"],
            "yes" if entry["fused"] else "no",
            *("-" if number is None else f"{number:g}" for number in numbers),
        )
    return table


def scale_table(scale: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Step time over batch size and sequence length."""
    policies = [p for p in POLICIES if p != LIMIT and any(entry["policy"] == p for entry in scale)]
    table = Table(title="Step time over batch and sequence length, us", title_justify="left")
    table.add_column("attention")
    for heading in ("batch", "context", LIMIT, *policies):
        table.add_column(heading, justify="right")
    rows: dict[tuple[Any, ...], dict[str, float]] = {}
    for entry in scale:
        key = (entry["attn_backend"], entry["batch"], entry["context"])
        rows.setdefault(key, {})[entry["policy"]] = entry["step_us"]
    for (attention, batch, context), steps in sorted(rows.items()):
        numbers = [f"{steps[p]:.0f}" if p in steps else "-" for p in (LIMIT, *policies)]
        table.add_row(attention, str(batch), str(context), *numbers)
    return table


def target_table(targets: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Each target with its worst cell."""
    table = Table(title="Targets, worst cell each", title_justify="left")
    for heading in ("target", "wanted", "measured", "where", "met"):
        table.add_column(heading)
    for target in targets:
        met = Text("yes", "bold green") if target["met"] else Text("NO", "bold red")
        table.add_row(target["name"], target["wanted"], f"{target['measured']:.3f}", target["where"], met)
    return table
