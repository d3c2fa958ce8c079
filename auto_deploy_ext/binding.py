"""The one module that knows AutoDeploy: it finds the host and hands out the host's own classes.

The host is the first of `tensorrt_llm._torch.auto_deploy` and `llmc` that is installed, else the embedded one.
`AUTO_DEPLOY_EXT_HOST=embedded|tensorrt_llm|llmc` forces one. Nothing here initialises CUDA.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import os
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

logger = logging.getLogger("auto_deploy_ext")

ENV_VAR = "AUTO_DEPLOY_EXT_HOST"

#: host name -> import root under which AutoDeploy's relative layout lives.
ROOTS = {
    "tensorrt_llm": "tensorrt_llm._torch.auto_deploy",
    "llmc": "llmc",
    "embedded": "auto_deploy_ext.embedded",
}

#: public class -> module below the root.
HOST_CLASSES = {
    "BaseTransform": "transform.interface",
    "TransformConfig": "transform.interface",
    "TransformInfo": "transform.interface",
    "TransformRegistry": "transform.interface",
    "Stages": "transform.interface",
    "SharedConfig": "transform.interface",
    "InferenceOptimizer": "transform.optimizer",
    "CachedSequenceInterface": "shim.interface",
    "SequenceInfo": "custom_ops.attention_interface",
}


class HostError(ImportError):
    """The host that `AUTO_DEPLOY_EXT_HOST` asks for is missing or lacks something the plugin needs."""


@dataclass(frozen=True)
class Host:
    """The AutoDeploy that the plugin is bound to.

    Attributes:
        name: `tensorrt_llm`, `llmc` or `embedded`.
        version: the distribution's version, `"unknown"` when it has no metadata.
        root: the import root of AutoDeploy's layout.
    """

    name: str
    version: str
    root: str

    def module(self, relative: str) -> ModuleType:
        """Import and return `root.relative`, for example `shim.interface`."""
        return importlib.import_module(f"{self.root}.{relative}")

    def get(self, class_name: str) -> Any:
        """Return the host's own class of that name (a key of `HOST_CLASSES`).

        Raises:
            HostError: the host's module has no such class.
        """
        relative = HOST_CLASSES[class_name]
        try:
            return getattr(self.module(relative), class_name)
        except AttributeError as error:
            raise HostError(f"host {self.name!r} has no {class_name} in {self.root}.{relative}") from error

    @cached_property
    def takes_override(self) -> bool:
        """Whether the metadata mutations take `active_args_override` (AutoDeploy since mid-2026)."""
        method = self.get("SequenceInfo").switch_to_generate_
        return "active_args_override" in inspect.signature(method).parameters

    @cached_property
    def has_window_groups(self) -> bool:
        """Whether SequenceInfo can register window groups (per-pool buffers `_g1..`)."""
        return hasattr(self.get("SequenceInfo"), "register_window_groups")


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def _version(name: str) -> str:
    distribution = "auto_deploy_ext" if name == "embedded" else name
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        module = importlib.import_module(ROOTS[name].partition(".")[0])
        return str(getattr(module, "__version__", "unknown"))


def _bind(name: str) -> Host:
    host = Host(name, _version(name), ROOTS[name])
    for class_name in ("BaseTransform", "TransformConfig", "TransformInfo", "TransformRegistry", "Stages"):
        host.get(class_name)
    return host


def _find_host() -> Host:
    forced = os.environ.get(ENV_VAR)
    if forced is not None:
        if forced not in ROOTS:
            raise HostError(f"{ENV_VAR}={forced!r} is not one of {', '.join(sorted(ROOTS))}")
        try:
            return _bind(forced)
        except ImportError as error:
            raise HostError(
                f"{ENV_VAR}={forced} asks for {ROOTS[forced]}, which cannot be used: {error}. "
                f"Install it, or unset {ENV_VAR} to take the host that is there."
            ) from error
    for name in ("tensorrt_llm", "llmc"):
        if _installed(ROOTS[name]):
            try:
                return _bind(name)
            except ImportError as error:
                logger.warning("%s is installed but cannot be used as host (%s); trying the next", name, error)
    return _bind("embedded")


host: Host = _find_host()

BaseTransform = host.get("BaseTransform")
TransformConfig = host.get("TransformConfig")
TransformInfo = host.get("TransformInfo")
TransformRegistry = host.get("TransformRegistry")
Stages = host.get("Stages")
SharedConfig = host.get("SharedConfig")


def __getattr__(name: str) -> Any:
    if name in HOST_CLASSES:
        return host.get(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
