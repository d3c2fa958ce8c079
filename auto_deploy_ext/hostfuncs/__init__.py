"""Python functions in the order of a stream, also inside captured graphs, and when it is safe to hold the GIL."""

from __future__ import annotations

from .hostfunc import HostFunc, HostFuncError, HostFuncFailure, HostFuncUsageError, hostfunc, inside_hostfunc
from .launch import LaunchError, LaunchLayer, OrderedLayer, ThreadStreams
from .pending import (
    CapturedCalls,
    HostFuncOwner,
    HostFuncStats,
    capture_hostfuncs,
    current_owner,
    drain_hostfuncs,
    hostfuncs_pending,
    use_owner,
)

__all__ = [
    "CapturedCalls",
    "HostFunc",
    "HostFuncError",
    "HostFuncFailure",
    "HostFuncOwner",
    "HostFuncStats",
    "HostFuncUsageError",
    "LaunchError",
    "LaunchLayer",
    "OrderedLayer",
    "ThreadStreams",
    "capture_hostfuncs",
    "current_owner",
    "drain_hostfuncs",
    "hostfunc",
    "hostfuncs_pending",
    "inside_hostfunc",
    "use_owner",
]
