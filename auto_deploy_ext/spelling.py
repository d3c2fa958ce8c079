"""What a misspelled name is answered with; imports nothing heavy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def suggestion(name: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.6) -> str:
    """Continue a sentence about an unknown name with the closest known one; where none is close, with something else.

    Args:
        name: the unknown one.
        known: names that it could have been.
        otherwise: what to say where none is close; empty: nothing.
        cutoff: from 0 to 1, how alike names have to be: `difflib.get_close_matches`.
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    hint = f"did you mean {close[0]!r}?" if close else otherwise
    return f"; {hint}" if hint else ""


def unknown_name_message(kind: str, name: str, known: Iterable[str]) -> str:
    """Say that ``name`` is unknown, with the closest known one as a suggestion."""
    known = sorted(known)
    return f"unknown {kind} {name!r}" + suggestion(name, known, otherwise=f"known: {', '.join(known)}")


def misspelled(given: Iterable[str], known: Iterable[str]) -> str | None:
    """Say which of some fields is nearly a known one; None: none is. Others may be known to somebody else."""
    known = sorted(known)
    for name in given:
        hint = "" if name in known else suggestion(name, known, cutoff=0.8)
        if hint:
            return f"unknown field {name!r}{hint}"
    return None
