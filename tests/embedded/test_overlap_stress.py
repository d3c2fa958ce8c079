"""The stress test of overlap scheduling, shortened; the whole run is `benchmarks/overlap_stress.py`."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from auto_deploy_ext.runtime.replay import PreparedReplay
from tests.test_decoding_equality import shared_pipeline

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "overlap_stress.py"


@pytest.fixture
def stress():
    spec = importlib.util.spec_from_file_location("overlap_stress", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fused_runs_take_the_short_way_under_load(stress, tmp_path, capsys, monkeypatch):
    """Without the sanitizer, which follows each mutation one by one."""
    calls = []
    prepared = PreparedReplay.__call__
    monkeypatch.setattr(PreparedReplay, "__call__", lambda self, *a: calls.append(1) or prepared(self, *a))
    report = tmp_path / "report.json"
    options = ["--device", "cpu", "--steps", "40", "--prompts", "3", "--no-sanitizer", "--json", str(report)]
    assert stress.main([*options, "--cases", "torch_paged_fused"]) == 0, capsys.readouterr()
    (found,) = json.loads(report.read_text())["cases"]
    assert (found["ties"], found["errors"], found["checked"]) == (0, [], 0)
    assert len(calls) > 40


def test_an_output_that_is_too_short_is_no_tie(stress, monkeypatch):
    monkeypatch.setattr(stress, "is_tie", lambda *_: True)
    report = stress.Report("torch")
    outputs = [SimpleNamespace(prompt=(1,), tokens=(5, 6)), SimpleNamespace(prompt=(1,), tokens=(5, 7, 8))]
    stress.compare(None, outputs, [(5, 6, 7), (5, 6, 7)], 1.0, report)
    assert report.ties == 1
    assert report.errors == ["request 0 differs at token 2: (5, 6) instead of (5, 6, 7)"]


@pytest.mark.parametrize("case", ["torch_paged", "torch_graphs"])
def test_random_load_gives_every_request_its_greedy_tokens(stress, case, tmp_path, capsys, monkeypatch):
    if case == "torch_paged":
        monkeypatch.setattr(stress, "build", lambda *_: shared_pipeline("eagle3_llama_paged")[0])
    report = tmp_path / "report.json"
    options = ["--device", "cpu", "--steps", "40", "--prompts", "3", "--json", str(report)]
    assert stress.main([*options, "--cases", case]) == 0, capsys.readouterr()
    (found,) = json.loads(report.read_text())["cases"]
    assert found["steps"] >= 40 and found["requests"] > 10
    assert (found["ties"], found["errors"]) == (0, [])
    assert min(found["for_nothing"], found["mixed"]) > 0
    assert (found["checked"] > 0) == (found["transfers"] > 0) == (case == "torch_paged")
    assert (found["filled"] > 0) == (case == "torch_graphs")


def test_wrong_tokens_are_found(stress, capsys, monkeypatch):
    random_request = stress.random_request

    def wrong(prompt, rng):
        request, expected = random_request(prompt, rng)
        return request, (*expected[:-1], (expected[-1] + 1) % 256)

    monkeypatch.setattr(stress, "random_request", wrong)
    monkeypatch.setattr(stress, "build", lambda *_: shared_pipeline("eagle3_llama_paged")[0])
    options = ["--device", "cpu", "--steps", "4", "--prompts", "2", "--cases", "torch_paged", "--no-sanitizer"]
    assert stress.main(options) == 1
    assert "differs at token" in capsys.readouterr().err
