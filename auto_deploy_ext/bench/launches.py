"""Counts what is launched between the models of a draft loop, from a trace of one step."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from .cells import Variant
from .measure import CONSUMERS, Steps

_MARK = "bench:"
DRAFT = "draft_model"


@dataclass(frozen=True)
class Launches:
    """What one step launches.

    Attributes:
        what: "kernels" on a GPU; elsewhere "operators", the outermost ones that PyTorch was called for.
        per_draft_step: launched between one draft call and the next, models apart, on average.
        copies_per_draft_step: copies and fills of memory there, which are no kernels.
        outside_models: launched in the whole step, models apart.
        total: launched in the whole step.
    """

    what: str
    per_draft_step: float | None
    copies_per_draft_step: float | None
    outside_models: int
    total: int


Span = tuple[float, float]


def count_launches(steps: Steps, variant: Variant) -> Launches:
    """Trace one step of a variant; embeddings, heads and `fc` count as the models' like the graphs themselves."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write_trace(steps, variant, path, 1)
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return launches_in(events, on_gpu=steps.on_gpu)


def write_trace(steps: Steps, variant: Variant, path: Path, count: int) -> None:
    """Write a Chrome trace of some steps on end, with a range around each call of a model, or launch of a segment.

    Args:
        steps: warmed up.
        variant: whose steps.
        path: a name that ends in `.gz` makes it a compressed file.
        count: steps.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if steps.on_gpu else [])]
    marks = _Marks()
    wrapper = steps.pipeline.wrapper
    with steps.using(variant):
        steps.run(2)
        steps.synchronize()
        with steps.watching(variant, model_names(wrapper), marks), profile(activities=activities) as trace:
            steps.run(count)
            steps.synchronize()
    path.parent.mkdir(parents=True, exist_ok=True)
    trace.export_chrome_trace(str(path))


def model_names(wrapper: nn.Module) -> list[str]:
    """Names of the consumers and of the modules of theirs that the wrapper calls by itself."""
    modules: list[nn.Module] = []
    for name in CONSUMERS:
        model: Any = wrapper.get_submodule(name)
        modules += [m for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None]
        fc = getattr(model, "fc", None)
        modules += [fc] if isinstance(fc, nn.Module) else []
    names = [next((n for n, m in wrapper.named_modules() if m is module), None) for module in modules]
    return list(dict.fromkeys([*CONSUMERS, *(name for name in names if name is not None)]))


class _Marks:
    """Opens and closes a named range of the trace around each call."""

    def __init__(self) -> None:
        self._open: list[Any] = []

    def before(self, name: str) -> None:
        self._open.append(record_function(_MARK + name))
        self._open[-1].__enter__()

    def after(self, name: str) -> None:
        self._open.pop().__exit__(None, None, None)


def launches_in(events: Iterable[Mapping[str, Any]], on_gpu: bool) -> Launches:
    """Count in the events of a Chrome trace."""
    events = [event for event in events if event.get("ph") == "X"]
    spans: dict[str, list[Span]] = {}
    for event in events:
        if event.get("cat") == "user_annotation" and str(event["name"]).startswith(_MARK):
            spans.setdefault(str(event["name"])[len(_MARK) :], []).append(_span(event))
    models = [span for named in spans.values() for span in named]
    drafts = sorted(spans.get(DRAFT, []))
    gaps = [(before[1], after[0]) for before, after in pairwise(drafts)]
    launched = [event["ts"] for event in events if _is_launch(event)] if on_gpu else _outermost(events)
    copied = [event["ts"] for event in events if on_gpu and _is_copy(event)]
    outside = _not_in(launched, models)
    return Launches(
        what="kernels" if on_gpu else "operators",
        per_draft_step=_per_gap(outside, gaps),
        copies_per_draft_step=_per_gap(_not_in(copied, models), gaps),
        outside_models=len(outside),
        total=len(launched),
    )


def _span(event: Mapping[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _is_call(event: Mapping[str, Any]) -> bool:
    return event.get("cat") in ("cuda_runtime", "cuda_driver")


def _is_launch(event: Mapping[str, Any]) -> bool:
    """A kernel's launch through runtime or driver; a whole graph's counts as one."""
    return _is_call(event) and ("LaunchKernel" in str(event["name"]) or "GraphLaunch" in str(event["name"]))


def _is_copy(event: Mapping[str, Any]) -> bool:
    return _is_call(event) and ("Memcpy" in str(event["name"]) or "Memset" in str(event["name"]))


def _outermost(events: Sequence[Mapping[str, Any]]) -> list[float]:
    """When PyTorch operators begin that no other one has called."""
    found: list[float] = []
    ends: dict[Any, float] = {}
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        begin, end = _span(event)
        with suppress(KeyError):
            if begin < ends[event.get("tid")]:
                continue
        ends[event.get("tid")] = end
        found.append(begin)
    return found


def _not_in(times: Iterable[float], spans: Sequence[Span]) -> list[float]:
    return [t for t in times if not any(begin <= t < end for begin, end in spans)]


def _per_gap(times: Sequence[float], gaps: Sequence[Span]) -> float | None:
    if not gaps:
        return None
    return sum(begin <= t < end for t in times for begin, end in gaps) / len(gaps)
