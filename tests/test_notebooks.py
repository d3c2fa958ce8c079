"""Notebooks run from top to bottom, and the rewriting that they show is today's."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from auto_deploy_ext import host

pytestmark = pytest.mark.skipif(host.name != "embedded", reason="shows the embedded host")

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def printed(cell: dict[str, Any]) -> str:
    """What a cell printed when the notebook was saved."""
    return "".join("".join(output.get("text", [])) for output in cell["outputs"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_is_rewritten_today(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    diffs = 0
    for cell in cells:
        source, out = "".join(cell["source"]), io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(source, path.name, "exec"), names)
        if "unified_diff" in source:
            diffs += 1
            assert out.getvalue() == printed(cell), "run the notebook again and save it"
            assert out.getvalue().count("\n+    mutate_") == 4
    assert diffs == 1
