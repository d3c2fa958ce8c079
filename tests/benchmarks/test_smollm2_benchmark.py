"""The command line and the exit code of benchmarks/smollm2.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "smollm2.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smollm2_benchmark", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("option", ["k", "equality-k", "batch", "max-new-tokens", "repeats", "prompts"])
def test_numbers_of_things_are_at_least_one(script, monkeypatch, capsys, option):
    monkeypatch.setattr(sys, "argv", ["smollm2.py", f"--{option}", "0"])
    with pytest.raises(SystemExit) as exit_:
        script.parse_arguments()
    assert exit_.value.code == 2
    assert f"argument --{option}: must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dtype", "demanded"),
    [(torch.float32, True), (torch.float64, True), (torch.float16, False), (torch.bfloat16, False)],
)
def test_a_differing_token_fails_unless_in_half_precision(script, dtype, demanded):
    same, other = {"equal_prompts": 2, "prompts": 2}, {"equal_prompts": 1, "prompts": 2}
    assert script.exit_code([same, other], dtype) == int(demanded)
    assert script.exit_code([same], dtype) == script.exit_code([], dtype) == 0
