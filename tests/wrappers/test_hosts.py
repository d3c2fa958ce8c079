"""The same wrappers, configs and tests on a double of AutoDeploy under both roots and in three ages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.parametrize(("root", "age"), HOSTS)
def test_the_wrappers_pass_on(root: str, age: str, tmp_path: Path) -> None:
    plant(tmp_path, root, age)
    files = [str(HERE / name) for name in ("test_wrappers.py", "test_in_the_host.py", "test_host_mirrors.py")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:]


def features(path: Path, forced: str | None = None) -> subprocess.CompletedProcess[str]:
    program = (
        "import auto_deploy_ext as a; print(a.host.name, a.host.version, *(k for k, v in a.host.features.items() if v))"
    )
    return subprocess.run(
        [sys.executable, "-c", program], cwd=path, env=environment(path, forced), capture_output=True, text=True
    )


def test_features_are_told_from_signatures(tmp_path: Path) -> None:
    found = {}
    for age in ("current", "older", "early"):
        name, version, *rest = features(plant(tmp_path / age, "llmc", age)).stdout.split()
        assert (name, version[-7:]) == ("llmc", "+double")
        found[age] = set(rest)
    assert found == {
        "current": {"active_args_override", "window_groups", "pages_per_pool", "transform_idx"},
        "older": {"window_groups", "pages_per_pool"},
        "early": set(),
    }


def test_tensorrt_llm_comes_before_llmc_and_both_before_the_embedded_host(tmp_path: Path) -> None:
    plant(tmp_path, "llmc", "current")
    assert features(tmp_path).stdout.split()[0] == "llmc"
    plant(tmp_path, "tensorrt_llm", "current")
    assert features(tmp_path).stdout.split()[0] == "tensorrt_llm"
    assert features(tmp_path, "embedded").stdout.split()[0] == "embedded"


def test_a_forced_host_that_is_missing_or_too_old_says_what_it_lacks(tmp_path: Path) -> None:
    missing = features(tmp_path, "llmc").stderr
    assert "HostError" in missing and "No module named 'llmc'" in missing and "unset AUTO_DEPLOY_EXT_HOST" in missing
    plant(tmp_path, "llmc", "early")
    interface = tmp_path / "llmc" / "custom_ops" / "attention_interface.py"
    interface.write_text(interface.read_text().replace("def copy_to_host", "def bring_back"))
    (tmp_path / "llmc" / "transform" / "optimizer.py").unlink()
    too_old = features(tmp_path, "llmc").stderr
    assert "it lacks InputBuffer.copy_to_host, transform.optimizer.InferenceOptimizer" in too_old
