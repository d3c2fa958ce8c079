"""What the commands' arguments are checked for: files that can be written in the end, and options that were said."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from auto_deploy_ext.commands.command_line import options_besides, why_not_writable, writable
from auto_deploy_ext.commands.report import write_text


def test_what_is_called_writable_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "there").write_text("old")
    os.symlink(tmp_path / "folder" / "real", tmp_path / "link")
    for name in ("new", "there", "link", "made/below", "n" * 250):
        assert why_not_writable(tmp_path / name) is None
        write_text(tmp_path / name, "new")
        assert (tmp_path / name).read_text() == "new"
    assert (tmp_path / "link").is_symlink() and (tmp_path / "folder" / "real").read_text() == "new"
    assert not list(tmp_path.rglob("*.part"))


def test_what_cannot_be_written_is_told_before(tmp_path: Path) -> None:
    os.symlink("/dev/null/x.json", tmp_path / "dangling")
    os.symlink("loop", tmp_path / "loop")
    reasons = {name: why_not_writable(tmp_path / name) for name in ("dangling", "loop", "b" * 255, "a" * 300, ".")}
    assert reasons == {
        "dangling": "/dev/null is not a directory",
        "loop": "it is a link that leads to itself",
        "b" * 255: "File name too long",
        "a" * 300: "File name too long",
        ".": "it is a directory",
    }
    with pytest.raises(argparse.ArgumentTypeError, match="cannot be written: File name too long; name another file"):
        writable(str(tmp_path / ("a" * 300)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "loop"]


def test_options_are_told_from_defaults_as_a_user_writes_them() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--merge", "--max-steps", "--attn", "--json"):
        parser.add_argument(name)
    said = parser.parse_args(["--merge", "x", "--max-steps", "3", "--attn", "y"])
    assert options_besides({"merge", "json"}, said, parser.parse_args([])) == "--attn, --max-steps"
    assert options_besides({"merge", "max_steps", "attn"}, said, parser.parse_args([])) == ""
