"""The benchmark's JSON file: what it holds, how files of partial runs are merged, and which targets are met."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from auto_deploy_ext import configs, transforms

from .cells import LIMIT, POLICIES, Backend, BenchError, Group, Variant
from .launches import Launches
from .session import Findings, LeftOut, Measured

logger = logging.getLogger("auto_deploy_ext")

BENCHMARK = "eagle_step"

#: what a cell in the JSON has, and nothing else.
CELL_FIELDS = (
    "attn_backend",
    "compile_backend",
    "k",
    "batch",
    "policy",
    "fused",
    "step_us",
    "ratio_to_limit",
    "transfers",
    "bytes",
    "host_waits",
    "run_ahead",
)
#: by which cells are told apart, and cells of the same run belong together.
CELL_KEY = CELL_FIELDS[:6]
GROUP_KEY = CELL_FIELDS[:4]

#: what entries of the JSON's lists have; `targets` is made anew of them.
_ENTRY_FIELDS = {
    "cells": CELL_FIELDS,
    "details": (*CELL_KEY, "spread", "ratio_quartiles", "repetition_step_us"),
    "scale": (*CELL_FIELDS, "context"),
    "launches": (*CELL_KEY, *(field.name for field in fields(Launches))),
    "left_out": tuple(field.name for field in fields(LeftOut)),
}
_NAMES = frozenset({"attn_backend", "compile_backend", "policy", "what", "why"})
_SIZES = frozenset({"k", "batch", "context"})
_TIMES = frozenset({"step_us", "ratio_to_limit"})
#: settings that all parts of a result share.
_SAME_SETTINGS = ("context", "capture", "dtype", "tokens_per_block", "model_kwargs", "speculative_model_kwargs")
#: fields that are null where there was nothing to measure.
_MAY_BE_NULL = frozenset({"run_ahead", "per_draft_step", "copies_per_draft_step"})


class MergeError(BenchError):
    """Files that do not belong to one benchmark."""


def sources() -> str:
    """A digest of the package's code and configs, by which the state that measured something is known.

    It is the same for a checkout, where `transforms` and `configs` lie beside the package, and for an installation.
    """
    folders = {"": Path(__file__).resolve().parents[1]}
    folders |= {f"{own.__name__.rpartition('.')[2]}/": Path(own.__path__[0]) for own in (transforms, configs)}
    files = {
        place + path.relative_to(folder).as_posix(): path.read_bytes()
        for place, folder in folders.items()
        for suffix in ("py", "yaml")
        for path in folder.rglob(f"*.{suffix}")
    }
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(name.encode() + b"\0" + content + b"\0")
    return digest.hexdigest()[:12]


def describe_device(device: torch.device) -> dict[str, Any]:
    """What was measured on; `is_gpu` false means that the numbers say nothing about a GPU."""
    if device.type != "cuda":
        return {"type": device.type, "name": platform.processor() or platform.machine(), "is_gpu": False}
    properties = torch.cuda.get_device_properties(device)
    return {
        "type": "cuda",
        "name": properties.name,
        "is_gpu": True,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "driver": _driver_version(),
    }


def _driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


def make_result(findings: Findings, about: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON's content.

    Args:
        findings: of a session.
        about: what else is to be known: config, device, versions, settings.
    """
    result: dict[str, Any] = {
        "benchmark": BENCHMARK,
        **about,
        "cells": [_cell(measured) for measured in findings.cells],
        "details": [_details(measured) for measured in findings.cells],
        "scale": [
            {**_cell(measured), "context": measured.group.context, **_extra(measured)} for measured in findings.scale
        ],
        "launches": [{**_key(group, variant), **asdict(launches)} for group, variant, launches in findings.launches],
        "left_out": [asdict(left_out) for left_out in findings.left_out],
    }
    result["targets"] = [asdict(target) for target in targets(result)]
    return result


def _key(group: Group, variant: Variant) -> dict[str, Any]:
    return {
        "attn_backend": group.backend.attention,
        "compile_backend": group.backend.compiled,
        "k": group.backend.k,
        "batch": group.batch,
        "policy": variant.policy,
        "fused": variant.fused,
    }


def _cell(measured: Measured) -> dict[str, Any]:
    return {
        **_key(measured.group, measured.variant),
        "step_us": round(measured.step_us, 2),
        "ratio_to_limit": round(measured.ratio, 4),
        "transfers": _number(measured.traffic.transfers),
        "bytes": _number(measured.traffic.bytes),
        "host_waits": _number(measured.traffic.waits),
        "run_ahead": None if measured.run_ahead is None else round(measured.run_ahead.share, 4),
    }


def _details(measured: Measured) -> dict[str, Any]:
    return {**_key(measured.group, measured.variant), "context": measured.group.context, **_extra(measured)}


def _extra(measured: Measured) -> dict[str, Any]:
    return {
        "host_us": round(measured.host_us, 2),
        "spread": round(measured.spread, 4),
        "ratio_quartiles": [round(quartile, 4) for quartile in measured.ratio_quartiles],
        "repetitions": len(measured.blocks),
        "steps_per_repetition": measured.steps,
        "repetition_step_us": [round(block.step_us, 1) for block in measured.blocks],
        "run_ahead_passes": [round(share, 4) for share in measured.run_ahead_passes],
        "run_ahead_by_call": [] if measured.run_ahead is None else [round(s, 4) for s in measured.run_ahead.by_call],
    }


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else round(value, 2)


# ---------------------------------------------------------------- merging


def load_result(path: Path) -> dict[str, Any]:
    """Read a file that the benchmark has written.

    Raises:
        MergeError: it is none, or cannot be read, or something in it is missing, impossible, or does not fit the rest.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except OSError as error:
        raise MergeError(f"--merge {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # also of a text that is no UTF-8
        raise MergeError(f"{path} is no JSON file: {error}") from error
    if not isinstance(result, dict) or result.get("benchmark") != BENCHMARK:
        raise MergeError(f"{path} was not written by auto-deploy-ext bench")
    flaw = next(_flaws(result), None) or next(_misfits(result), None)
    if flaw is not None:
        raise MergeError(f"{path} is no whole result of auto-deploy-ext bench: {flaw}; measure that part again")
    return result


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _flaws(result: Mapping[str, Any]) -> Iterator[str]:
    """What a result lacks of that which is read of it."""
    kinds: dict[str, Any] = {"config": str, "device": dict, "versions": dict, "settings": (dict, list)}
    for name, kind in (kinds | dict.fromkeys(_ENTRY_FIELDS, list)).items():
        if name not in result:
            yield f"{name} is missing"
        elif not isinstance(result[name], kind):
            yield f"{name} is {_shown(result[name])}"
    for name, kind in (("name", str), ("is_gpu", bool)):
        if name not in result["device"]:
            yield f"device.{name} is missing"
        elif not isinstance(result["device"][name], kind):
            yield f"device.{name} is {_shown(result['device'][name])}"
    for place, entry in enumerate(_as_list(result["settings"])):
        if not isinstance(entry, dict):
            yield f"settings[{place}] is {_shown(entry)}"
    for part, names in _ENTRY_FIELDS.items():
        for place, entry in enumerate(result[part]):
            if not isinstance(entry, dict):
                yield f"{part}[{place}] is {_shown(entry)}"
                continue
            for name in names:
                if name not in entry:
                    yield f"{part}[{place}].{name} is missing"
                elif not _may_be(name, entry[name]):
                    yield f"{part}[{place}].{name} is {_shown(entry[name])}"


def _may_be(name: str, value: Any) -> bool:
    """Whether a field can have a value."""
    if value is None:
        return name in _MAY_BE_NULL
    if name in _NAMES:
        return isinstance(value, str) and (name != "policy" or value in POLICIES)
    if name == "fused":
        return isinstance(value, bool)
    if name == "ratio_quartiles":
        return isinstance(value, list) and len(value) == 2 and all(map(_is_time, value)) and value[0] <= value[1]
    if name == "repetition_step_us":
        return isinstance(value, list) and len(value) > 0 and all(map(_is_time, value))
    if name in _SIZES:
        return isinstance(value, int) and _is_time(value)
    return _is_time(value) if name in _TIMES else value == 0 or _is_time(value)


def _is_time(value: Any) -> bool:
    """Whether something is a number above 0, as large as a float can be at most; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _misfits(result: Mapping[str, Any]) -> Iterator[str]:
    """What in a result whose entries are whole does not fit together."""
    names = {"cells": CELL_KEY, "details": CELL_KEY, "scale": (*CELL_KEY, "context"), "launches": CELL_KEY}
    keys = {part: [tuple(entry[n] for n in own) for entry in result[part]] for part, own in names.items()}
    for part, found in keys.items():
        for key, count in Counter(found).items():
            if count > 1:
                yield f"{part} has {_named(key)} more than once"
    for part, other in (("cells", "details"), ("details", "cells")):
        known = set(keys[other])
        for key in keys[part]:
            if key not in known:
                yield f"{_named(key)} is in {part} and not in {other}"
    limits = {key for key in keys["cells"] if key[-2] == LIMIT}
    for *group, policy, fused in keys["cells"]:
        if (*group, LIMIT, fused) not in limits:
            yield f"{_named((*group, policy, fused))} has no {LIMIT} beside it"
    ratios = {key: cell["ratio_to_limit"] for key, cell in zip(keys["cells"], result["cells"], strict=True)}
    repetitions: dict[tuple[Any, ...], int] = {}
    for place, (key, entry) in enumerate(zip(keys["details"], result["details"], strict=True)):
        count = len(entry["repetition_step_us"])
        if repetitions.setdefault(key[: len(GROUP_KEY)], count) != count:
            yield f"details[{place}].repetition_step_us has not as many entries as others of its group"
        first, third = entry["ratio_quartiles"]
        if not first <= ratios[key] <= third:
            yield f"details[{place}].ratio_quartiles are {first} and {third}, and the cell's ratio is {ratios[key]}"


def _named(key: Iterable[Any]) -> str:
    return " ".join(map(str, key))


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."


def merge_results(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One result out of partial ones; where two have measured the same group, the later one counts.

    Raises:
        MergeError: they were measured with different configs, on different devices, with different software, or other
            models, caches or captures. That they were measured in different states of the code is logged.
    """
    first = results[0]
    settings = [entry for result in results for entry in _as_list(result["settings"])]
    for what in ("config", "device", "versions"):
        _check_alike(what, [result[what] for result in results])
    for what in _SAME_SETTINGS:
        _check_alike(what, [entry.get(what) for entry in settings])
    if len({entry.get("sources") for entry in settings}) > 1:
        logger.warning("the parts were measured in different states of the code (settings: sources)")
    merged = dict(first)
    merged["settings"] = [entry for place, entry in enumerate(settings) if entry not in settings[:place]]
    for part in ("cells", "details"):
        merged[part] = _later_groups(results, part, GROUP_KEY)
    merged["scale"] = _later_groups(results, "scale", (*GROUP_KEY, "context"))
    merged["launches"] = _later_groups(results, "launches", GROUP_KEY)
    merged["left_out"] = _still_left_out(merged, [entry for result in results for entry in result["left_out"]])
    merged["targets"] = [asdict(target) for target in targets(merged)]
    return merged


def _still_left_out(merged: Mapping[str, Any], left_out: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What no part has measured, each with the reason that was given last."""
    entries = [entry for part in ("details", "scale") for entry in merged[part]]
    groups = [Group(Backend(*(e[name] for name in GROUP_KEY[:3])), e["batch"], e.get("context", 0)) for e in entries]
    measured = {f"{group} context={group.context}" for group in groups}
    left = {entry["what"]: entry for entry in left_out}
    return [entry for what, entry in left.items() if what.removeprefix("scale: ") not in measured]


def _check_alike(what: str, values: Sequence[Any]) -> None:
    for value in values[1:]:
        if value != values[0]:
            raise MergeError(f"the files differ in {what}: {values[0]} and {value}; measure all parts alike")


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _later_groups(results: Sequence[Mapping[str, Any]], part: str, key: Sequence[str]) -> list[dict[str, Any]]:
    """The entries of all results; of a group that several have, only the last one's, because ratios belong together."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for result in results:
        own: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for entry in result[part]:
            own.setdefault(tuple(entry[name] for name in key), []).append(entry)
        groups |= own
    return [entry for entries in groups.values() for entry in entries]


# ---------------------------------------------------------------- targets


@dataclass(frozen=True)
class Target:
    """Something that the benchmark is to show on a GPU.

    Attributes:
        name: what.
        wanted: the bound, as text.
        measured: the worst cell's value.
        where: that cell.
        met: whether it keeps to the bound.
    """

    name: str
    wanted: str
    measured: float
    where: str
    met: bool


def targets(result: Mapping[str, Any]) -> list[Target]:
    """What the cells say about each target; none that has no cells, and none at all without a GPU."""
    if not result["device"]["is_gpu"]:
        return []
    cells = {tuple(cell[name] for name in CELL_KEY): cell for cell in result["cells"]}
    auto = [cell for cell in cells.values() if cell["policy"] == "auto" and cell["fused"]]
    graphs = [cell for cell in auto if cell["compile_backend"] == "torch-cudagraph"]
    simple = [cell for cell in auto if cell["compile_backend"] == "torch-simple"]
    found = [
        _worst("auto / limit with CUDA graphs", graphs, lambda cell: cell["ratio_to_limit"], most=1.02),
        _worst("auto / limit with torch-simple", simple, lambda cell: cell["ratio_to_limit"], most=1.05),
        _worst("run-ahead with CUDA graphs", graphs, lambda cell: cell["run_ahead"], least=0.95),
    ]
    planned = [c for c in graphs if (c["attn_backend"], c["k"], c["batch"]) == ("flashinfer", 6, 8)]
    steps = {tuple(entry[name] for name in CELL_KEY): entry["repetition_step_us"] for entry in result["details"]}
    ratios = {id(c): _ratio(steps, c, policy="scoped") for c in planned}
    found.append(
        _worst("scoped / auto where the draft reads mirrors", planned, lambda cell: ratios[id(cell)], least=1.10)
    )
    ones = [cell for cell in simple if cell["batch"] == 1]
    unfused = {id(c): _ratio(steps, c, fused=False) for c in ones}
    found.append(
        _worst("unfused / fused with torch-simple at batch 1", ones, lambda cell: unfused[id(cell)], least=1.0)
    )
    found.append(_launch_target(result["launches"]))
    return [target for target in found if target is not None]


def _ratio(steps: Mapping[tuple[Any, ...], Sequence[float]], cell: Mapping[str, Any], **other: Any) -> float | None:
    """The median over repetitions of the step of a cell that differs in some fields from `cell`, over that of `cell`.

    None where one of them was not measured.
    """
    beside, own = (steps.get(tuple(c[name] for name in CELL_KEY)) for c in ({**cell, **other}, cell))
    if beside is None or own is None:
        return None
    return statistics.median(other_step / step for other_step, step in zip(beside, own, strict=True))


def _worst(
    name: str, cells: Iterable[Mapping[str, Any]], value: Any, most: float | None = None, least: float | None = None
) -> Target | None:
    known = [(value(cell), cell) for cell in cells if value(cell) is not None]
    if not known:
        return None
    pick = max if most is not None else min
    worst, cell = pick(known, key=lambda pair: pair[0])
    met = worst <= most if most is not None else worst >= (least or 0.0)
    bound = f"<= {most}" if most is not None else f">= {least}"
    where = " ".join(str(cell[field]) for field in GROUP_KEY[:2]) + f" K={cell['k']} batch={cell['batch']}"
    return Target(name, bound, round(worst, 4), where, met)


def _launch_target(launches: Sequence[Mapping[str, Any]]) -> Target | None:
    """Fused and unfused launches of the same policy and pipeline."""
    by_key = {tuple(entry[name] for name in CELL_KEY): entry["per_draft_step"] for entry in launches}
    ratios = [
        {**entry, "ratio": by_key[key] / entry["per_draft_step"]}
        for entry in launches
        if entry["fused"] and entry["per_draft_step"]
        for key in [tuple({**entry, "fused": False}[name] for name in CELL_KEY)]
        if by_key.get(key)
    ]
    return _worst(
        "launches of a draft step outside the models, unfused / fused", ratios, lambda e: e["ratio"], least=3.0
    )


__all__ = ["LeftOut", "MergeError", "Target", "load_result", "make_result", "merge_results", "targets"]
