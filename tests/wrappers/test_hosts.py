"""The same wrappers, configs and tests on a double of AutoDeploy under both roots and in three ages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from auto_deploy_ext import host
from tests.double.tree import plant

pytestmark = pytest.mark.skipif(host.name != "embedded", reason="runs in the processes that it starts")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

HOSTS = [
    ("tensorrt_llm", "current"),
    ("llmc", "current"),
    ("tensorrt_llm", "older"),
    ("llmc", "older"),
    ("tensorrt_llm", "early"),
]


def environment(path: Path | None = None, forced: str | None = None) -> dict[str, str]:
    env = {k: v for k, v in os.environ.items() if k != "AUTO_DEPLOY_EXT_HOST"}
    env["PYTHONPATH"] = os.pathsep.join(str(p) for p in (path, ROOT) if p)
    return env | ({"AUTO_DEPLOY_EXT_HOST": forced} if forced else {})


def run_tests(folder: Path, root: str, age: str) -> subprocess.CompletedProcess[str]:
    """Run this folder's tests in a process bound to a double; what starts processes itself only on the first.

    The wrappers' tests, which take longest, run on each age once, and on each root.
    """
    plant(folder, root, age)
    names = ["test_in_the_host.py", "test_host_mirrors.py", "../runtime/test_hooks.py"]
    if (root, age) != ("llmc", "older"):
        names.insert(0, "test_wrappers.py")
    files = [str(HERE / name) for name in names]
    chosen = [] if (root, age) == HOSTS[0] else ["-k", "not spawned and not custom_module"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, *chosen]
    return subprocess.run(command, cwd=ROOT, env=environment(folder), capture_output=True, text=True)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Future[Any]]]:
    """The processes, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        yield {
            (root, age): pool.submit(run_tests, tmp_path_factory.mktemp(f"{root}_{age}"), root, age)
            for root, age in HOSTS
        }


@pytest.mark.parametrize(("root", "age"), HOSTS)
def test_the_wrappers_pass_on(root: str, age: str, started: dict[tuple[str, str], Future[Any]]) -> None:
    done = started[root, age].result()
    assert done.returncode == 0, done.stdout[-6000:]


def bound(path: Path, forced: str | None = None) -> subprocess.CompletedProcess[str]:
    program = "import auto_deploy_ext; print(auto_deploy_ext.host.name)"
    return subprocess.run(
        [sys.executable, "-c", program], cwd=path, env=environment(path, forced), capture_output=True, text=True
    )


def test_tensorrt_llm_comes_before_llmc_and_both_before_the_embedded_host(tmp_path: Path) -> None:
    plant(tmp_path, "llmc", "current")
    plant(tmp_path, "tensorrt_llm", "current")
    assert bound(tmp_path).stdout == "tensorrt_llm\n"
    assert bound(tmp_path, "embedded").stdout == "embedded\n"


def test_a_forced_host_that_is_missing_or_too_old_says_what_it_lacks(tmp_path: Path) -> None:
    missing = bound(tmp_path, "llmc").stderr
    assert "HostError" in missing and "No module named 'llmc'" in missing and "unset AUTO_DEPLOY_EXT_HOST" in missing
    plant(tmp_path, "llmc", "early")
    interface = tmp_path / "llmc" / "custom_ops" / "attention_interface.py"
    interface.write_text(interface.read_text().replace("def copy_to_host", "def bring_back"))
    (tmp_path / "llmc" / "transform" / "optimizer.py").unlink()
    too_old = bound(tmp_path, "llmc").stderr
    assert "it lacks InputBuffer.copy_to_host, transform.optimizer.InferenceOptimizer" in too_old
