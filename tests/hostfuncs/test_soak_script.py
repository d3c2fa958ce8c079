"""What the soak's script concludes from what it has measured."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("xgrammar", reason="guided decoding needs extra guided")
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "guided_soak.py"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("guided_soak", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(SCRIPT.parent))  # as for a script that is run
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(SCRIPT.parent))


def test_equal_times_are_within_one_percent(script):
    shown = script.compare([1.0, 1.1, 0.9, 1.0], [1.0, 1.1, 0.9, 1.0])
    assert shown["ratio"] == 1 and shown["confidence_95"] == [1, 1] and shown["within_1_percent"]
    assert shown["sign_test_p"] == 1


def test_an_engine_that_needs_a_twentieth_more_is_seen_to_be_slower(script):
    under = [1.0 + 0.2 * (n % 3) for n in range(20)]
    shown = script.compare([1.05 * seconds for seconds in under], under)
    assert shown["ratio"] == pytest.approx(1 / 1.05) and not shown["within_1_percent"]
    assert shown["confidence_95"] == pytest.approx([1 / 1.05] * 2)
    assert (shown["rounds_faster"], shown["sign_test_p"]) == (0, pytest.approx(2 / 2**20))


def test_noise_of_ten_percent_in_few_rounds_shows_nothing(script):
    shown = script.compare([1.1, 0.9, 1.1, 0.9, 1.0], [1.0] * 5)
    low, high = shown["confidence_95"]
    assert low < 1 < high and not shown["within_1_percent"]


def summary(**changes: int) -> dict:
    counts = {
        "forward": 3,
        "schedule": 3,
        "prefetch": 3,
        "skipped": 3,
        "partial": 3,
        "ahead": 3,
        "replays": 3,
        "drains": 3,
    } | changes
    ways = {way: counts[way] for way in ("forward", "schedule", "prefetch")}
    return {
        "stop": 3,
        "images_encoded": {
            "images": ways,
            "calls_ahead": counts["ahead"],
            "prefetch_skipped": counts["skipped"],
            "partial_hits": counts["partial"],
        },
        "hostfuncs": {"replays": counts["replays"], "drains": counts["drains"]},
    }


def test_a_soak_says_what_it_did_not_exercise(script):
    assert script.absent(summary(), "both") == []
    assert script.absent(summary(forward=0), "schedule") == []
    assert script.absent(summary(forward=0, partial=0), "both") == [
        "images encoded by way of forward",
        "partial hits of the encoder cache",
    ]
    assert script.absent(summary(ahead=0, schedule=0), "forward") == []
    for name in ("schedule", "ahead", "prefetch", "skipped", "replays", "drains"):
        assert len(script.absent(summary(**{name: 0}), "both")) == 1


def test_where_a_control_hung_is_told_by_the_thread_that_encodes(script):
    trace = """Timeout (0:00:08)!
Thread 0x01 (most recent call first):
  <no Python frame>

Thread 0x02 (most recent call first):
  File "soak.py", line 3 in hold
  File "/x/torch/nn/modules/module.py", line 2 in inner
  File "encoding.py", line 1 in schedule

Thread 0x03 (most recent call first):
  File "launch.py", line 9 in _work
"""
    assert script.where_of(trace) == ['File "soak.py", line 3 in hold', 'File "encoding.py", line 1 in schedule']
    assert script.where_of(trace.replace("hold", "other")) == ['File "launch.py", line 9 in _work']
    assert script.where_of("") == []


def test_a_report_keeps_what_other_parts_wrote(script, tmp_path, capsys):
    path = tmp_path / "result.json"
    script.Report(path).put("control", {"hangs": 1})
    later = script.Report(path)
    later.put("soak", {"unfinished": True}, at_most_every=1000)
    later.put("soak", {"hangs": 0})
    written = json.loads(path.read_text())
    assert (written["control"], written["soak"]) == ({"hangs": 1}, {"hangs": 0})
    assert written["machine"]["torch"] and '"hangs": 0' in capsys.readouterr().out


def test_a_child_gets_the_options_of_its_parent(script):
    arguments = argparse.Namespace(parts=["soak"], json=None, part=None, encode="both", batch_size=6)
    assert script.command_of(arguments, "soak")[2:] == ["--part=soak", "--encode=both", "--batch-size=6"]
