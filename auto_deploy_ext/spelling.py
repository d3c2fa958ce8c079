"""What a misspelled name is answered with; imports nothing heavy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def unknown_name_message(kind: str, name: str, known: Iterable[str]) -> str:
    """Say that ``name`` is unknown, with the closest known one as a suggestion."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
    return f"unknown {kind} {name!r}; {hint}"


def misspelled(given: Iterable[str], known: Iterable[str]) -> str | None:
    """Say which of some fields is nearly a known one; None: none is. Others may be known to somebody else."""
    known = sorted(known)
    for name in given:
        near = [] if name in known else difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if near:
            return f"unknown field {name!r}; did you mean {near[0]!r}?"
    return None
