"""Triton kernels. This package imports without Triton; its modules do not."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import ModuleType


class TritonMissingError(ImportError):
    """A kernel was asked for, and Triton is not installed."""


@functools.lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def are_interpreted() -> bool:
    """Whether Triton runs kernels in Python, as `TRITON_INTERPRET=1` has it when they are defined."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def load(name: str) -> ModuleType:
    """Import a module of kernels, for example `metadata`.

    Raises:
        TritonMissingError: Triton is not installed.
    """
    if not has_triton():
        raise TritonMissingError(
            f"the kernels in auto_deploy_ext.kernels.{name} need Triton, which is not installed: "
            "pip install 'auto_deploy_ext[gpu]', or choose a backend that needs none"
        )
    return importlib.import_module(f"{__name__}.{name}")
