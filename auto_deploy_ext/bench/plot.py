"""The benchmark's result as a PNG picture."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..commands.report import write_bytes
from .cells import LIMIT, POLICIES
from .results import CELL_KEY, GROUP_KEY

_COLOURS = {
    "none": "#888888",
    "auto": "#0b6e4f",
    "replay": "#3fa34d",
    "copy": "#f0a202",
    "scoped": "#d1495b",
    "full": "#7b2d26",
}
_ERROR_BARS: dict[str, Any] = {"ecolor": "black", "elinewidth": 0.8, "capsize": 1.5}
_LINES: dict[str, Any] = {"auto": "-", "scoped": "--"}


class PlotError(RuntimeError):
    """matplotlib is not installed."""


def check_available() -> None:
    """Raise PlotError where no picture can be drawn; before anything is measured.

    Raises:
        PlotError: with the command that helps.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise PlotError("--plot needs matplotlib: pip install 'auto_deploy_ext[plots]'") from error


def write_plot(result: Mapping[str, Any], path: Path) -> None:
    """Write the picture of a result, see `draw`, as a PNG file.

    Raises:
        PlotError: matplotlib is not installed.
    """
    check_available()
    from matplotlib import rc_context

    picture = io.BytesIO()
    with rc_context({"text.parse_math": False}):  # a $ in a name is one
        draw(result).savefig(picture, dpi=110, format="png")
    write_bytes(path, picture.getvalue())


def draw(result: Mapping[str, Any]) -> Any:
    """Draw what a result holds: a bar per policy and group, and lines over batch size and sequence length.

    Returns:
        matplotlib's Figure.

    Raises:
        PlotError: matplotlib is not installed.
    """
    check_available()
    from matplotlib.figure import Figure

    compiled = list(dict.fromkeys(cell["compile_backend"] for cell in result["cells"]))
    rows = len(compiled) + bool(result["scale"])
    figure = Figure(figsize=(14, 4.2 * max(rows, 1) + 0.6), layout="constrained")
    grid = figure.add_gridspec(max(rows, 1), 2)
    quartiles = _quartiles(result)
    contexts = " or ".join(f"{context:,}" for context in sorted({d["context"] for d in result.get("details", ())}))
    cached = f", {contexts} cached tokens of each row" if contexts else ""
    for row, backend in enumerate(compiled):
        own = [cell for cell in result["cells"] if cell["compile_backend"] == backend]
        _ratio_bars(figure.add_subplot(grid[row, :]), own, quartiles, f"{backend}{cached}")
    if result["scale"]:
        _lines(figure.add_subplot(grid[rows - 1, 0]), result["scale"], over="batch", per="context")
        _lines(figure.add_subplot(grid[rows - 1, 1]), result["scale"], over="context", per="batch")
    device = result["device"]
    note = "" if device["is_gpu"] else ": not a GPU measurement"
    figure.suptitle(f"One Eagle step, {result['config']} on {device['name']}{note}")
    return figure


def _quartiles(result: Mapping[str, Any]) -> dict[tuple[Any, ...], tuple[float, float]]:
    """By cell, the quartiles of its ratio; of results without details none."""
    return {tuple(entry[name] for name in CELL_KEY): entry["ratio_quartiles"] for entry in result.get("details", ())}


def _ratio_bars(
    axes: Any, cells: Sequence[Mapping[str, Any]], quartiles: Mapping[tuple[Any, ...], tuple[float, float]], title: str
) -> None:
    """Step time over the limit's; the fused cells, where there are any. An error bar goes from quartile to quartile."""
    fused = any(cell["fused"] for cell in cells)
    cells = [cell for cell in cells if cell["fused"] == fused]
    title = f"{title}, {_fusion(fused)}"
    groups = sorted({tuple(cell[name] for name in GROUP_KEY) for cell in cells})
    policies = [p for p in POLICIES if p != LIMIT and any(cell["policy"] == p for cell in cells)]
    limits = {tuple(c[name] for name in GROUP_KEY): c["step_us"] for c in cells if c["policy"] == LIMIT}
    width = 0.8 / max(len(policies), 1)
    lowest, highest = 0.95, 1.05
    for index, policy in enumerate(policies):
        ratios = {tuple(c[name] for name in GROUP_KEY): c["ratio_to_limit"] for c in cells if c["policy"] == policy}
        shift = (index - (len(policies) - 1) / 2) * width
        bars = [(place + shift, ratios[group], group) for place, group in enumerate(groups) if group in ratios]
        places, heights, members = zip(*bars, strict=True)
        nothing = (float("nan"), float("nan"))  # what is not known is not drawn
        ends = [quartiles.get((*group, policy, fused), nothing) for group in members]
        below = [height - first for height, (first, _) in zip(heights, ends, strict=True)]
        above = [third - height for height, (_, third) in zip(heights, ends, strict=True)]
        lowest = min(lowest, *heights, *(first for first, _ in ends if first == first))
        highest = max(highest, *heights, *(third for _, third in ends if third == third))
        axes.bar(
            places, heights, width, label=policy, color=_COLOURS[policy], yerr=(below, above), error_kw=_ERROR_BARS
        )
    axes.axhline(1.0, color=_COLOURS[LIMIT], linewidth=1)
    labels = [
        f"{attention}\nK={k}, batch {batch}\n{limits.get((attention, compiled, k, batch), 0):.0f} us"
        for attention, compiled, k, batch in groups
    ]
    axes.set_xticks(range(len(groups)), labels, fontsize=8)
    axes.set_ylim(lowest - 0.02, highest + 0.08)
    axes.set_ylabel("step / step without any mirror\n(axis does not begin at 0)")
    axes.set_title(f"{title}; whiskers: quartiles of the repetitions; below, the limit's step", fontsize=10)
    axes.legend(ncols=len(policies) or 1, fontsize=8, loc="upper right")


def _fusion(fused: bool) -> str:
    return f"{'fused' if fused else 'unfused'} metadata updates"


def _lines(axes: Any, scale: Sequence[Mapping[str, Any]], over: str, per: str) -> None:
    """Step time over one axis, a colour for each of a few values of the other."""
    from matplotlib import colormaps
    from matplotlib.lines import Line2D
    from matplotlib.ticker import StrMethodFormatter

    attention = scale[0]["attn_backend"]
    entries = [entry for entry in scale if entry["attn_backend"] == attention]
    values = _some(sorted({entry[per] for entry in entries}))
    colours = {
        value: colormaps["viridis"](0.85 * index / max(len(values) - 1, 1)) for index, value in enumerate(values)
    }
    for value in values:
        for policy, line in _LINES.items():
            points = sorted((e[over], e["step_us"] / 1e3) for e in entries if e["policy"] == policy and e[per] == value)
            if points:
                axes.plot(*zip(*points, strict=True), line, color=colours[value], marker=".")
    handles = [Line2D([], [], color=colours[value], label=f"{per} {value}") for value in values]
    handles += [Line2D([], [], color="black", linestyle=line, label=policy) for policy, line in _LINES.items()]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    plain = StrMethodFormatter("{x:g}")  # 8, not 8.0 or 8 x 10^0
    axes.xaxis.set_major_formatter(plain)
    axes.yaxis.set_major_formatter(plain)
    axes.yaxis.set_minor_formatter(plain)
    axes.set_xlabel(over if over == "batch" else "cached tokens of each row")
    axes.set_ylabel("step, ms")
    first = entries[0]
    title = f"{attention}, {first['compile_backend']}, K={first['k']}, {_fusion(first['fused'])}"
    axes.set_title(title, fontsize=10)
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(handles=handles, fontsize=8)


def _some(values: Sequence[int]) -> list[int]:
    """At most four of the values, the ends among them."""
    if len(values) <= 4:
        return list(values)
    last = len(values) - 1
    return [values[round(index * last / 3)] for index in range(4)]
