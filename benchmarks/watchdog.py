"""Runs a child process and kills it when it makes no progress; nothing here waits for the child without a bound.

The child writes to a file rather than a pipe: whatever it leaves behind cannot keep a reader waiting for the end.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Watched:
    """What became of a child.

    Attributes:
        lines: what it wrote.
        killed: why it was killed: `start`: it never said that it was ready; `progress`: it was silent for too long
            afterwards; `total`: it took too long altogether, or from there on; empty: it ended by itself.
        exit_code: its exit code; None when even killing it did not end it.
        start_seconds: until it was ready, or the whole time.
        seconds: from there on.
    """

    lines: tuple[str, ...]
    killed: str
    exit_code: int | None
    start_seconds: float
    seconds: float

    @property
    def hung(self) -> bool:
        """Whether it was ready and then came to a stop."""
        return self.killed == "progress"


def watch_child(
    command: Sequence[str],
    *,
    bound: float,
    start_bound: float,
    total_bound: float,
    ready_bound: float = math.inf,
    on_line: Callable[[str], None] | None = None,
    cwd: str | os.PathLike[str] | None = None,
) -> Watched:
    """Run a command to its end, or kill it and its children.

    Args:
        command: writes a line that contains `ready` once it has started up, and further lines as it gets on.
        bound: seconds of silence, once it is ready, that count as a hang.
        start_bound: seconds until it has to be ready.
        total_bound: seconds that it may take altogether.
        ready_bound: seconds that it may take once it is ready.
        on_line: told every line as it comes.
        cwd: where it runs.
    """
    lines: list[str] = []
    killed, rest = "", ""
    start = last = time.monotonic()
    ready: float | None = None
    with tempfile.NamedTemporaryFile("w") as sink, open(sink.name) as source:
        process = subprocess.Popen(command, stdout=sink, stdin=subprocess.DEVNULL, start_new_session=True, cwd=cwd)
        try:
            while True:
                ended = process.poll() is not None
                now = time.monotonic()
                rest += source.read()
                *new, rest = rest.split("\n")
                for line in new:
                    last = now
                    lines.append(line)
                    if ready is None and "ready" in line:
                        ready = now
                    if on_line is not None:
                        on_line(line)
                if ended:
                    break
                if now - start > total_bound or (ready is not None and now - ready > ready_bound):
                    killed = "total"
                elif ready is None and now - start > start_bound:
                    killed = "start"
                elif ready is not None and now - last > bound:
                    killed = "progress"
                if killed:
                    break
                time.sleep(0.02)
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
    end = time.monotonic()
    begun = end if ready is None else ready
    return Watched(tuple(lines), killed, process.returncode, begun - start, end - begun)
