"""FX passes for AutoDeploy that mirror exactly the host metadata a speculative draft loop reads.

Importing the package registers its transforms with the AutoDeploy that is installed, else with the embedded host.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

_CHECKOUT = Path(__file__).resolve().parent.parent
if (_CHECKOUT / "transforms" / "__init__.py").is_file() and (_CHECKOUT / "pyproject.toml").is_file():
    # In a checkout `transforms/` and `configs/` lie beside the package, not in it.
    __path__.append(str(_CHECKOUT))

from .binding import (  # noqa: E402
    HOST_CLASSES,
    BaseTransform,
    SharedConfig,
    Stages,
    TransformConfig,
    TransformInfo,
    TransformRegistry,
    host,
)

if TYPE_CHECKING:
    from .effects import register_host_reader, register_mutation
    from .hostfuncs import drain_hostfuncs, hostfunc, hostfuncs_pending
    from .orchestrator import UntraceableError, orchestrator_graphs, trace_orchestrator
    from .reports.mirror_plan import MirrorPlan, plan
    from .runtime.mirrors import record_mirrors
    from .runtime.sanitizer import StaleHostMirrorError, sanitize

#: public name -> the submodule that defines it; imported when first used.
_LAZY = {
    "MirrorPlan": "reports.mirror_plan",
    "StaleHostMirrorError": "runtime.sanitizer",
    "UntraceableError": "orchestrator",
    "drain_hostfuncs": "hostfuncs",
    "hostfunc": "hostfuncs",
    "hostfuncs_pending": "hostfuncs",
    "orchestrator_graphs": "orchestrator",
    "plan": "reports.mirror_plan",
    "record_mirrors": "runtime.mirrors",
    "register_host_reader": "effects",
    "register_mutation": "effects",
    "sanitize": "runtime.sanitizer",
    "trace_orchestrator": "orchestrator",
}

__all__ = [
    "BaseTransform",
    "CachedSequenceInterface",
    "InferenceOptimizer",
    "MirrorPlan",
    "SequenceInfo",
    "SharedConfig",
    "Stages",
    "StaleHostMirrorError",
    "TransformConfig",
    "TransformInfo",
    "TransformRegistry",
    "UntraceableError",
    "drain_hostfuncs",
    "host",
    "hostfunc",
    "hostfuncs_pending",
    "orchestrator_graphs",
    "plan",
    "record_mirrors",
    "register_host_reader",
    "register_mutation",
    "sanitize",
    "trace_orchestrator",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    elif name in HOST_CLASSES:
        value = host.get(name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


importlib.import_module(f"{__name__}.transforms")  # registers them
