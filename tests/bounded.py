"""A bound for tests that could hang for good: the process ends, with every thread's traceback, rather than wait."""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Iterator
from typing import Any

import pytest

SECONDS = 120.0
"""For a test and what its fixtures build; a module's `BOUND_SECONDS` is taken instead."""


def arm(seconds: float, file: Any = None) -> None:
    """End this process in so many seconds unless `disarm` is called; also when a thread keeps the GIL for ever."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ if file is None else file)


def disarm() -> None:
    """Undo `arm`."""
    faulthandler.cancel_dump_traceback_later()


def _stderr_of(config: pytest.Config) -> Any:
    """The stderr that pytest does not capture, where its version keeps one."""
    try:
        from _pytest.faulthandler import fault_handler_stderr_fd_key
    except ImportError:
        return None
    return config.stash.get(fault_handler_stderr_fd_key, None)


@pytest.fixture(autouse=True)
def bounded(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test of a module or folder that has this fixture fails rather than hangs; under xdist its worker ends."""
    arm(getattr(request.module, "BOUND_SECONDS", SECONDS), _stderr_of(request.config))
    yield
    disarm()
