"""Which versions of the software are there: for results of benchmarks, and for whoever reports an error."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

_OWN = "auto_deploy_ext"
_OTHERS = ("transformers", "triton", "flashinfer-python")


def versions() -> dict[str, str | None]:
    """Versions by name of the distribution, that of Python, and CUDA's that torch was built for; None: not there."""
    return {
        "python": platform.python_version(),
        _OWN: _version(_OWN) or "not installed, but run from its sources",
        "torch": torch.__version__,
        **{name: _version(name) for name in _OTHERS},
        "cuda": torch.version.cuda,
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
