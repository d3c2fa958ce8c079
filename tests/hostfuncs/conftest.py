"""Whatever waits for host functions here does so within a bound."""

from __future__ import annotations

from tests.bounded import bounded

__all__ = ["bounded"]
