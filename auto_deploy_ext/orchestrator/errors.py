"""The error that says why an orchestrator cannot be traced, and where."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType, TracebackType

import torch

_OWN = (str(Path(__file__).parent), str(Path(torch.__file__).parent))


class UntraceableError(RuntimeError):
    """The orchestrator does something that no graph can stand for.

    Attributes:
        reason: what it does.
        where: `file:line` in the orchestrator's source, `None` when no such frame was on the stack.
    """

    def __init__(self, reason: str, where: str | None = None) -> None:
        self.reason = reason
        self.where = where
        super().__init__(f"{where}: {reason}" if where else reason)

    def __reduce__(self) -> tuple[type, tuple[str, str | None]]:
        return type(self), (self.reason, self.where)


def is_own_frame(frame: FrameType) -> bool:
    """Whether a frame belongs to the tracer or to torch rather than to the orchestrator."""
    name = frame.f_code.co_filename
    return name.startswith(_OWN) or name.startswith("<eval_with_key")


def where_in_source() -> str | None:
    """`file:line` of the innermost frame of the orchestrator's own source that is now running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_own_frame(frame):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def where_in_traceback(traceback: TracebackType | None) -> str | None:
    """`file:line` of the innermost frame of the orchestrator's own source in `traceback`."""
    where = None
    while traceback is not None:
        if not is_own_frame(traceback.tb_frame):
            where = f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return where
