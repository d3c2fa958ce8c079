"""The deadlock of a GIL-holding encoder is real, and the transform removes it; the stream is a worker thread here."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "hostfunc_deadlock.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hostfunc_deadlock", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(sys.platform != "linux", reason="the wait that keeps the GIL is a POSIX semaphore")
def test_an_encoder_that_keeps_the_gil_hangs_without_the_transform_and_never_with_it(benchmark):
    without = benchmark.watch("threads", with_transform=False, runs=3, bound=4.0)
    assert without["started"] and without["hung"] and without["completed"] == 0
    with_it = benchmark.watch("threads", with_transform=True, runs=100, bound=20.0)
    assert not with_it["hung"] and with_it["completed"] == with_it["ran"] == with_it["drains"] == 100
