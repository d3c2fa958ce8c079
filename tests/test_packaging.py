"""The wheel holds every module and config, and the package imports from the wheel and from a bare checkout."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "auto_deploy_ext": "auto_deploy_ext",
    "transforms": "auto_deploy_ext/transforms",
    "configs": "auto_deploy_ext/configs",
}
PROBE = """
import auto_deploy_ext.transforms
from auto_deploy_ext.embedded.config import available_configs
from auto_deploy_ext.embedded.transform import interface
print(auto_deploy_ext.transforms.__file__, interface.__file__, *available_configs(), sep="\\n")
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of what is packaged; building in the checkout itself would leave files there."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout, tmp_path_factory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=checkout, check=True, capture_output=True)
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def imported_from(path: Path) -> tuple[list[str], list[str]]:
    """The files that a Python which finds the package at `path` imports, relative to it, and the configs it lists."""
    environment = os.environ | {"PYTHONPATH": str(path), "AUTO_DEPLOY_EXT_HOST": "embedded"}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=path, env=environment, check=True, capture_output=True, text=True
    )
    transforms, interface, *configs = done.stdout.splitlines()
    return [str(Path(file).relative_to(path)) for file in (transforms, interface)], configs


def shipped_configs() -> list[str]:
    return sorted(path.stem for path in (ROOT / "configs" / "embedded").glob("*.yaml"))


def test_the_wheel_holds_every_module_and_config(wheel):
    expected = {
        f"{target}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, target in FOLDERS.items()
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".yaml")
    }
    packed = {name for name in wheel.namelist() if name.endswith((".py", ".yaml"))}
    assert packed == expected


def test_the_wheel_carries_the_licence_and_the_command(wheel):
    names = wheel.namelist()
    (licence,) = (name for name in names if name.endswith("licenses/LICENSE"))
    assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
    (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
    assert b"auto-deploy-ext = auto_deploy_ext.commands.cli:main" in wheel.read(entry_points)


def test_the_package_imports_from_an_unpacked_wheel(wheel, tmp_path):
    wheel.extractall(tmp_path)
    assert imported_from(tmp_path) == (
        ["auto_deploy_ext/transforms/__init__.py", "auto_deploy_ext/embedded/transform/interface.py"],
        shipped_configs(),
    )


def test_the_package_imports_from_a_checkout(checkout):
    assert imported_from(checkout) == (
        ["transforms/__init__.py", "auto_deploy_ext/embedded/transform/interface.py"],
        shipped_configs(),
    )


def test_the_constraints_pin_what_the_package_and_its_tests_require():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pinned}
    required = [Requirement(line) for line in importlib.metadata.requires("auto_deploy_ext") or ()]
    needed = [need for need in required if need.marker is None or need.marker.evaluate({"extra": "test"})]
    unfit = [str(need) for need in needed if versions.get(canonicalize_name(need.name), "0") not in need.specifier]
    assert len(needed) >= 10
    assert unfit == []
