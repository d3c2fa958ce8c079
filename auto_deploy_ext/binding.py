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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType, ModuleType
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
    "InputBuffer": "custom_ops.attention_interface",
}


#: what the plugin calls of each public class; a host without one of these cannot be used.
REQUIRED = {
    "BaseTransform": (
        "from_kwargs",
        "get_config_class",
        "get_transform_key",
        "_post_init",
        "_log_info",
        "_log_warning",
    ),
    "TransformConfig": ("model_fields",),
    "TransformInfo": ("model_fields",),
    "SharedConfig": ("model_fields",),
    "TransformRegistry": ("register", "get", "has", "get_config_class"),
    "Stages": ("CACHE_INIT", "COMPILE"),
    "InferenceOptimizer": (),
    "CachedSequenceInterface": ("named_args", "get_arg"),
    "SequenceInfo": (
        *("activate_arg", "copy_", "get_arg", "nest_sequences", "offset_pos_and_cache_"),
        *("register_host_prepare_for_attention_forward", "switch_to_generate_", "unnest_sequences"),
    ),
    "InputBuffer": (
        *("copy_to_device", "copy_to_host", "get_capacity", "get_current_length", "get_host_view", "get_view"),
        "tensor_names",
    ),
}

#: checked when the package is imported; the others would import kernels with them, and are checked for a forced host.
_AT_IMPORT = ("BaseTransform", "TransformConfig", "TransformInfo", "TransformRegistry", "Stages", "SharedConfig")


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

    def lacks(self, class_names: tuple[str, ...] = tuple(REQUIRED)) -> tuple[str, ...]:
        """Return what the plugin needs of these classes and the host does not have, as dotted names, sorted.

        Raises:
            ImportError: a module of the host cannot be imported because something else is missing.
        """
        missing: list[str] = []
        for class_name in class_names:
            try:
                cls = self.get(class_name)
            except ImportError as error:
                if not (isinstance(error, HostError) or (error.name or "").startswith(self.root)):
                    raise  # something that the host itself needs is not installed
                missing.append(f"{HOST_CLASSES[class_name]}.{class_name}")
                continue
            missing.extend(f"{class_name}.{name}" for name in REQUIRED[class_name] if not hasattr(cls, name))
        return tuple(sorted(missing))

    @cached_property
    def features(self) -> Mapping[str, bool]:
        """What this host can do beyond the least, told from signatures, by name.

        active_args_override: metadata mutations can be narrowed. window_groups: several cache pools. pages_per_pool:
        `nest_sequences` takes pages as lists per pool; without it `switch_to_generate_` writes host twins itself.
        exact_copies: the host's own buffer copies single mirrors and keeps versions. transform_idx: a transform is
        called with its index in the pipeline.
        """
        return MappingProxyType(
            {
                "active_args_override": self.takes_override,
                "window_groups": self.has_window_groups,
                "pages_per_pool": _takes(self.get("SequenceInfo").nest_sequences, "cache_loc_per_pool"),
                "exact_copies": hasattr(self.get("InputBuffer"), "copy_names_to_host"),
                "transform_idx": _takes(self.get("BaseTransform").__call__, "idx"),
            }
        )

    @cached_property
    def takes_override(self) -> bool:
        """Whether the metadata mutations take `active_args_override` (AutoDeploy since mid-2026)."""
        info = self.get("SequenceInfo")
        methods = (info.switch_to_generate_, info.offset_pos_and_cache_)
        return all(_takes(method, "active_args_override") for method in methods)

    @cached_property
    def has_window_groups(self) -> bool:
        """Whether SequenceInfo can register window groups (per-pool buffers `_g1..`)."""
        return hasattr(self.get("SequenceInfo"), "register_window_groups")


def _takes(function: Callable[..., Any], parameter: str) -> bool:
    return parameter in inspect.signature(function).parameters


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


def _bind(name: str, class_names: tuple[str, ...] = _AT_IMPORT) -> Host:
    # Before anything of the host's own, so that a missing package is reported as such.
    importlib.import_module(ROOTS[name])
    found = Host(name, _version(name), ROOTS[name])
    missing = found.lacks(class_names)
    if missing:
        raise HostError(f"{found.root} {found.version} is too old or not what it seems: it lacks {', '.join(missing)}")
    return found


def _find_host() -> Host:
    forced = os.environ.get(ENV_VAR)
    if forced:
        if forced not in ROOTS:
            raise HostError(f"{ENV_VAR}={forced!r} is not one of {', '.join(sorted(ROOTS))}")
        try:
            return _bind(forced, _AT_IMPORT if forced == "embedded" else tuple(REQUIRED))
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


def register_transform(key: str) -> Callable[[type[Any]], type[Any]]:
    """A class decorator that registers one of the plugin's transforms with the host; doing it again is harmless.

    Raises:
        HostError: the key belongs to a transform that is not the plugin's.
    """

    def decorate(transform: type[Any]) -> type[Any]:
        if not TransformRegistry.has(key):
            return TransformRegistry.register(key)(transform)
        known = TransformRegistry.get(key)
        if (known.__module__, known.__qualname__) != (transform.__module__, transform.__qualname__):
            raise HostError(f"transform key {key!r} is taken by {known.__module__}.{known.__qualname__}")
        try:  # the same class defined anew, by a reload
            return TransformRegistry.register(key)(transform)
        except Exception:  # a registry that takes a key once keeps the class that it has
            return transform

    return decorate


def __getattr__(name: str) -> Any:
    if name in HOST_CLASSES:
        return host.get(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
