"""The deadlock of a GIL-holding encoder is real, and the transform removes it; the stream is a worker thread here."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BOUND_SECONDS = 300
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "hostfunc_deadlock.py"


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("hostfunc_deadlock", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(SCRIPT.parent))  # as for a script that is run
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(SCRIPT.parent))


@pytest.mark.skipif(sys.platform != "linux", reason="the wait that keeps the GIL is a POSIX semaphore")
def test_an_encoder_that_keeps_the_gil_hangs_without_the_transform_and_never_with_it(benchmark):
    without = benchmark.watch("threads", with_transform=False, runs=3, bound=3.0, total_bound=120.0)
    assert without["hung"] and (without["killed"], without["completed"]) == ("progress", 0), without
    with_it = benchmark.watch("threads", with_transform=True, runs=100, bound=20.0, total_bound=120.0)
    assert (with_it["killed"], with_it["exit_code"]) == ("", 0), with_it
    assert with_it["completed"] == with_it["ran"] == with_it["drains"] == 100


@pytest.mark.skipif(sys.platform != "linux", reason="the wait that keeps the GIL is a POSIX semaphore")
def test_the_bound_of_a_test_holds_while_the_gil_is_kept():
    code = (
        "import ctypes; from tests.bounded import arm; arm(0.5); libc = ctypes.PyDLL(None);"
        "semaphore = ctypes.create_string_buffer(64); libc.sem_init(semaphore, 0, 0); libc.sem_wait(semaphore)"
    )
    root = SCRIPT.parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "Timeout" in done.stderr and 'File "<string>"' in done.stderr


def child(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def watch(benchmark: ModuleType, code: str, **bounds: float) -> Any:
    return benchmark.watch_child(child(code), **{"bound": 0.5, "start_bound": 20.0, "total_bound": 30.0, **bounds})


def test_the_watchdog_lets_a_child_end_by_itself(benchmark):
    watched = watch(benchmark, "print('ready'); print('run'); raise SystemExit(3)")
    assert (watched.killed, watched.exit_code, watched.lines) == ("", 3, ("ready", "run"))


@pytest.mark.parametrize(
    ("code", "bounds", "killed"),
    [
        ("import time; time.sleep(60)", {"start_bound": 0.5}, "start"),
        ("import time; print('ready', flush=True); time.sleep(60)", {}, "progress"),
        (
            "import time; print('ready', flush=True)\nwhile True: print(1, flush=True); time.sleep(0.01)",
            {"total_bound": 1.5},
            "total",
        ),
        (
            "import time; print('ready', flush=True)\nwhile True: print(1, flush=True); time.sleep(0.01)",
            {"ready_bound": 0.5},
            "total",
        ),
    ],
)
def test_the_watchdog_kills_what_does_not_start_does_not_get_on_or_does_not_end(benchmark, code, bounds, killed):
    watched = watch(benchmark, code, **bounds)
    assert (watched.killed, watched.exit_code, watched.hung) == (killed, -signal.SIGKILL, killed == "progress")


def test_the_watchdog_does_not_wait_for_what_a_child_leaves_behind(benchmark):
    """A process that inherited the child's output and outlives it kept a reader of a pipe waiting."""
    orphan = "import subprocess; print('ready', subprocess.Popen(['sleep', '60'], start_new_session=True).pid)"
    watched = watch(benchmark, orphan)
    assert watched.killed == ""
    os.kill(int(watched.lines[0].split()[1]), signal.SIGKILL)  # there is one to kill, so nobody waited for its end
