"""Plants the double under one of AutoDeploy's import roots, in one of its ages, so that a fresh process imports it."""

from __future__ import annotations

import shutil
from pathlib import Path

SOURCE = Path(__file__).parent / "auto_deploy"
ROOTS = {"tensorrt_llm": "tensorrt_llm/_torch/auto_deploy", "llmc": "llmc"}
#: current: mutations take active_args_override; older: they do not; early: see the contract's list of differences.
AGES = ("current", "older", "early")


def plant(where: Path, root: str, age: str) -> Path:
    """Write the double into a folder, which then goes on PYTHONPATH; returns the folder."""
    assert age in AGES
    target = where / ROOTS[root]
    shutil.copytree(SOURCE, target, ignore=shutil.ignore_patterns("__pycache__"))
    (target / "age.py").write_text(f'"""Which release this double stands for."""\n\nAGE = "{age}"\n')
    for package in [target, *target.parents]:
        if package == where:
            break
        (package / "__init__.py").touch()
    (where / Path(ROOTS[root]).parts[0] / "__init__.py").write_text(f'__version__ = "0.0.{AGES.index(age)}+double"\n')
    return where
