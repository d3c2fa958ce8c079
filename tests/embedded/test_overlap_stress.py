"""The stress test of overlap scheduling, shortened; the whole run is `benchmarks/overlap_stress.py`."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.test_decoding_equality import shared_pipeline

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "overlap_stress.py"


@pytest.fixture
def stress():
    spec = importlib.util.spec_from_file_location("overlap_stress", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
