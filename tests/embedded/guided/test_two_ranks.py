"""Two real ranks whose devices are at different places decide alike about prefetch, because they ask the host."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.embedded.guided import ranks

pytest.importorskip("xgrammar", reason="guided decoding needs extra guided")

BOUND_SECONDS = 300


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What both ranks saw; this process is rank 0."""
    root, folder = Path(__file__).resolve().parents[3], tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.embedded.guided.ranks", str(folder / "store")]
    with (folder / "output").open("w") as sink:
        other = subprocess.Popen(command, cwd=root, stdout=sink, stderr=subprocess.STDOUT)
    try:
        mine = ranks.main(request.getfixturevalue("pipeline"), 0, str(folder / "store"))
        code = other.wait(60)
    finally:
        other.kill()
    assert code == 0, (folder / "output").read_text()[-3000:]
    yield mine


def decisions(both: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """What each rank decided at every gate."""
    first, second = ([allowed for step in both["gates"] for allowed, _ in step[rank]] for rank in range(2))
    return first, second


def test_ranks_with_different_progress_take_the_same_decisions_and_the_same_tokens(seen):
    first, second = decisions(seen["host"])
    assert first == second and {True, False} == set(first)
    assert seen["host"]["tokens"][0] == seen["host"]["tokens"][1]
    assert seen["host"]["images"][0] == seen["host"]["images"][1]
    assert seen["host"]["images"][0]["prefetch"] == first.count(True)


def test_their_devices_really_were_at_different_places_when_they_decided(seen):
    closed = [
        (is_done, is_done_too)
        for mine, others in seen["host"]["gates"]
        for (allowed, is_done), (_, is_done_too) in zip(mine, others, strict=True)
        if not allowed
    ]
    assert closed and (True, False) in closed


def test_a_gate_that_asks_the_device_lets_them_part(seen):
    first, second = decisions(seen["device"])
    assert set(first) == {True} and False in second
    # In the same step one rank is in the encoder, whose reductions its peer never joins.
    assert any(len(mine) != len(others) or mine[0][0] != others[0][0] for mine, others in seen["device"]["gates"])
