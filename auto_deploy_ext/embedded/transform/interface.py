"""What a transform is: its stage and config, what it reports, the base class that runs it, and the registry."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from functools import total_ordering
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, final

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn
from torch.fx import GraphModule, Node

from ...spelling import suggestion
from ..logger import ad_logger
from .graph import (
    ModuleSnapshot,
    TransformError,
    add_graph_input,
    clean_graph,
    named_graph_modules,
    placeholders,
    propagate_shapes,
    replace_module,
)

if TYPE_CHECKING:
    from ..models.factory import ModelFactory
    from ..shim.interface import CachedSequenceInterface

__all__ = [
    "BaseTransform",
    "SharedConfig",
    "Stages",
    "TransformConfig",
    "TransformError",
    "TransformInfo",
    "TransformRegistry",
]

META_KEY = "_autodeploy"
HISTORY_KEY = "transform_history"


@total_ordering
class Stages(Enum):
    """The stages of the pipeline; they compare in the order in which they run."""

    FACTORY = "factory"
    EXPORT = "export"
    POST_EXPORT = "post_export"
    PATTERN_MATCHER = "pattern_matcher"
    SHARDING = "sharding"
    WEIGHT_LOAD = "weight_load"
    POST_LOAD_FUSION = "post_load_fusion"
    CACHE_INIT = "cache_init"
    VISUALIZE = "visualize"
    EXPORT_ONNX = "export_onnx"
    COMPILE = "compile"

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Stages):
            return NotImplemented
        order = list(Stages)
        return order.index(self) < order.index(other)


class TransformConfig(BaseModel):
    """The fields that every transform has; unknown ones are kept, as AutoDeploy keeps them."""

    model_config = ConfigDict(extra="allow")

    stage: Stages = Field(description="The pipeline stage in which the transform runs.")
    run_per_gm: bool = Field(
        default=True, description="Run once per GraphModule in the model; false: once on the whole model."
    )
    enabled: bool = Field(default=True, description="Whether the transform runs at all.")
    skip_on_error: bool = Field(
        default=False, description="On an error, undo the transform, log a warning and go on without it."
    )
    run_graph_cleanup: bool = Field(default=True, description="Clean the graphs after the transform unless clean.")
    run_shape_prop: bool = Field(default=False, description="Propagate shapes after the transform unless valid.")
    requires_clean_graph: bool = Field(default=True, description="Clean the graphs before it unless clean.")
    requires_shape_prop: bool = Field(default=False, description="Propagate shapes before it unless valid.")
    debug_visualize_dir: str | None = Field(
        default=None, description="A directory that gets each graph as text after the transform."
    )
    expect_mem_change: bool = Field(
        default=False, description="Log how much device memory the transform allocated or freed."
    )


class TransformInfo(BaseModel):
    """What one run of a transform did; immutable."""

    model_config = ConfigDict(frozen=True)

    skipped: bool = Field(default=True, description="Whether it did not run.")
    num_matches: int = Field(default=0, description="How many places it found and changed.")
    is_clean: bool = Field(default=False, description="Whether the graphs are as clean as they were before it.")
    has_valid_shapes: bool = Field(default=False, description="Whether the shapes in the graphs are still valid.")

    def __or__(self, other: TransformInfo) -> TransformInfo:
        """Merge, clean and valid where either one is; skipped where both are; matches add up."""
        return TransformInfo(
            skipped=self.skipped and other.skipped,
            num_matches=self.num_matches + other.num_matches,
            is_clean=self.is_clean or other.is_clean,
            has_valid_shapes=self.has_valid_shapes or other.has_valid_shapes,
        )

    def __and__(self, other: TransformInfo) -> TransformInfo:
        """Merge, clean and valid only where both are; skipped where both are; matches add up."""
        return TransformInfo(
            skipped=self.skipped and other.skipped,
            num_matches=self.num_matches + other.num_matches,
            is_clean=self.is_clean and other.is_clean,
            has_valid_shapes=self.has_valid_shapes and other.has_valid_shapes,
        )


class SharedConfig(BaseModel):
    """What all transforms of one pipeline are told about the process they run in."""

    model_config = ConfigDict(extra="allow")

    local_rank: int = Field(default=0, description="This process's rank.")
    world_size: int = Field(default=1, description="How many ranks build the model together.")


class BaseTransform:
    """Runs one transform on a model: cleanup around it, its bookkeeping, its logging, and the undoing of failures.

    A subclass implements `_apply` (once per GraphModule, ``run_per_gm: true``) or `_apply_to_full_model`
    (``run_per_gm: false``), is registered with ``@TransformRegistry.register(key)``, and names its config class by
    overriding `get_config_class`.

    Rules:

    1. ``mod.meta["_autodeploy"]["transform_history"][key]`` holds the `TransformInfo` of each transform that ran, in
       order; the last one says whether graphs are clean and shapes valid, hence whether cleanup is needed.
    2. A disabled transform changes nothing but the history, and passes the last flags on.
    3. A transform that raises leaves the model as it was: graphs, registered parameters, buffers and submodules,
       attributes and `meta` are restored (see `ModuleSnapshot`; a graph it did not touch stays the same object).
       The contents of tensors and the interface's state, such as args activated by then, are not.
       The error then propagates with its own type and a note naming the transform and the graph; with
       ``skip_on_error: true`` it is logged and the transform counts as skipped.
    """

    config: TransformConfig
    _transform_key: ClassVar[str] = ""
    _where: str = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("__init__", "__call__"):
            if name in cls.__dict__:
                hook = "_post_init" if name == "__init__" else "_apply or _apply_to_full_model"
                raise TypeError(f"{cls.__name__} overrides BaseTransform.{name}, which is final; implement {hook}")

    @classmethod
    def get_transform_key(cls) -> str:
        """The key under which the class is registered; empty when it is not."""
        return cls._transform_key

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        """The class that validates this transform's YAML fields."""
        return TransformConfig

    @classmethod
    def from_kwargs(cls: type[_T], **kwargs: Any) -> _T:
        """Build the transform from its config's fields."""
        return cls(cls.get_config_class()(**kwargs))

    @final
    def __init__(self, config: TransformConfig) -> None:
        """Take the config, converted to `get_config_class()` where it is of another class.

        Raises:
            pydantic.ValidationError: the fields do not fit the transform's config class.
        """
        config_class = self.get_config_class()
        if not isinstance(config, config_class):
            config = config_class(**config.model_dump())
        self.config = config
        self._post_init()

    def _post_init(self) -> None:
        """Called at the end of `__init__`; for subclasses."""

    @final
    def __call__(
        self,
        mod: nn.Module | None,
        cm: CachedSequenceInterface,
        factory: ModelFactory,
        shared_config: SharedConfig,
        idx: int = 0,
    ) -> nn.Module | None:
        """Run the transform on a model.

        Args:
            mod: any module; None at the start of the pipeline, when the first transform builds it.
            cm: the interface that holds the model's metadata and caches.
            factory: where the model and its weights come from.
            shared_config: rank and world size.
            idx: the transform's position in the pipeline, used in logs and names of debug files.

        Returns:
            The transformed model: `mod` itself unless the transform replaces it. It carries `mod`'s history.
        """
        key = self.get_transform_key() or type(self).__name__
        history = _history(mod)
        last = next(reversed(history.values()), TransformInfo(is_clean=mod is None))
        start = time.perf_counter()
        memory = _device_memory()

        info = TransformInfo(skipped=True, is_clean=last.is_clean, has_valid_shapes=last.has_valid_shapes)
        if self.config.enabled:
            snapshot = ModuleSnapshot(mod)
            try:
                before = self._prepare(mod, last)
                result, applied = self._apply_everywhere(mod, cm, factory, shared_config)
                # A transform may only vouch for what it did: what was unclean before it still is.
                info = self._finish(result, applied.model_copy(update=_flags(applied, before)))
                mod = result
            except Exception as error:
                snapshot.restore()
                where = f" on {self._where}" if self._where else ""
                self._where = ""
                message = f"transform {key!r} (stage {self.config.stage.value}) failed{where}"
                if not self.config.skip_on_error:
                    self._log_debug(message)
                    _add_note(error, message)
                    raise
                self._log_warning(f"{message} and is skipped: {type(error).__name__}: {error}")

        self._report(info, time.perf_counter() - start, _device_memory() - memory)
        self._dump(mod, idx)
        if mod is not None:
            _set_history(mod, history | {key: info})
        return mod

    def _apply(
        self, gm: GraphModule, cm: CachedSequenceInterface, factory: ModelFactory, shared_config: SharedConfig
    ) -> tuple[GraphModule, TransformInfo]:
        """Transform one GraphModule; used when ``run_per_gm`` is true."""
        raise NotImplementedError(
            f"{type(self).__name__} has no _apply, so it cannot run per GraphModule; set run_per_gm: false for it"
        )

    def _apply_to_full_model(
        self, mod: Any, cm: CachedSequenceInterface, factory: ModelFactory, shared_config: SharedConfig
    ) -> tuple[Any, TransformInfo]:
        """Transform the whole model, None in stage `factory`; used when ``run_per_gm`` is false."""
        raise NotImplementedError(
            f"{type(self).__name__} has no _apply_to_full_model; set run_per_gm: true to run it per GraphModule"
        )

    def _apply_everywhere(
        self, mod: Any, cm: CachedSequenceInterface, factory: ModelFactory, shared_config: SharedConfig
    ) -> tuple[Any, TransformInfo]:
        if not self.config.run_per_gm:
            return self._apply_to_full_model(mod, cm, factory, shared_config)
        merged: TransformInfo | None = None
        for name, gm in named_graph_modules(mod):
            self._where = f"graph {name!r}" if name else "the root graph"
            new, info = self._apply(gm, cm, factory, shared_config)
            mod = replace_module(mod, gm, new)
            merged = info if merged is None else merged & info
        self._where = ""
        return mod, merged or TransformInfo(skipped=True, is_clean=True, has_valid_shapes=True)

    def _prepare(self, mod: nn.Module | None, last: TransformInfo) -> TransformInfo:
        """Cleanup and shapes that the transform requires before it runs."""
        return self._canonicalize(mod, last, self.config.requires_clean_graph, self.config.requires_shape_prop)

    def _finish(self, mod: nn.Module | None, info: TransformInfo) -> TransformInfo:
        """Cleanup and shapes after the transform has run."""
        return self._canonicalize(mod, info, self.config.run_graph_cleanup, self.config.run_shape_prop)

    def _canonicalize(self, mod: nn.Module | None, info: TransformInfo, clean: bool, shapes: bool) -> TransformInfo:
        """Clean graphs unless `info` says they are, and propagate shapes unless it says they are valid."""
        clean = (clean or shapes) and not info.is_clean
        shapes = shapes and not info.has_valid_shapes
        for name, gm in named_graph_modules(mod):
            self._where = f"graph {name!r}" if name else "the root graph"
            if clean:
                clean_graph(gm)
            if shapes:
                propagate_shapes(gm)
        self._where = ""
        return info.model_copy(
            update={"is_clean": info.is_clean or clean, "has_valid_shapes": info.has_valid_shapes or shapes}
        )

    def _add_or_retrieve_input(self, gm: GraphModule, cm: CachedSequenceInterface, name: str) -> Node:
        """The placeholder whose `target` is `name`; where there is none, add it and activate that arg.

        Raises:
            TransformError: the graph has several of that target, or cannot take another argument.
        """
        found = [node for node in placeholders(gm.graph) if node.target == name]
        if len(found) > 1:
            raise TransformError(f"the graph has {len(found)} placeholders with the target {name!r}; expected one")
        if found:
            return found[0]
        node = add_graph_input(gm, name)
        cm.info.activate_arg(name)
        return node

    def _report(self, info: TransformInfo, seconds: float, memory: int) -> None:
        if not self.config.enabled:
            self._log_info("disabled")
        elif info.skipped:
            self._log_info("skipped")
        else:
            self._log_info(f"applied {info.num_matches} matches in {seconds:.2f} s")
        if self.config.expect_mem_change:
            self._log_info(f"device memory changed by {memory / 2**20:+.1f} MiB")

    def _dump(self, mod: nn.Module | None, idx: int) -> None:
        if self.config.debug_visualize_dir is None:
            return
        folder = Path(self.config.debug_visualize_dir)
        folder.mkdir(parents=True, exist_ok=True)
        for name, gm in named_graph_modules(mod):
            file = f"{idx:03d}_{self.config.stage.value}_{self.get_transform_key()}_{name or 'root'}.txt"
            (folder / file).write_text(f"{gm.graph}\n\n{gm.code}", encoding="utf-8")

    def _log_info(self, message: str) -> None:
        """Log for people who watch the pipeline; rank 0 only."""
        ad_logger.info(self._prefixed(message))

    def _log_warning(self, message: str) -> None:
        """Log something that a person should look at; every rank."""
        ad_logger.warning(self._prefixed(message))

    def _log_debug(self, message: str) -> None:
        """Log for people who debug a transform; rank 0 only."""
        ad_logger.debug(self._prefixed(message))

    def _prefixed(self, message: str) -> str:
        return f"[stage={self.config.stage.value}, transform={self.get_transform_key()}] {message}"


_T = TypeVar("_T", bound=BaseTransform)


def _history(mod: nn.Module | None) -> dict[str, TransformInfo]:
    meta = getattr(mod, "meta", None) or {}
    return dict(meta.get(META_KEY, {}).get(HISTORY_KEY, {}))


def _set_history(mod: nn.Module, history: dict[str, TransformInfo]) -> None:
    if not isinstance(getattr(mod, "meta", None), dict):
        mod.meta = {}  # type: ignore[assignment]  # a plain nn.Module has no meta of its own
    meta: dict[str, Any] = mod.meta  # type: ignore[assignment]
    meta[META_KEY] = {**meta.get(META_KEY, {}), HISTORY_KEY: history}


def _flags(applied: TransformInfo, before: TransformInfo) -> dict[str, bool]:
    return {
        "is_clean": applied.is_clean and before.is_clean,
        "has_valid_shapes": applied.has_valid_shapes and before.has_valid_shapes,
    }


def _device_memory() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() and torch.cuda.is_initialized() else 0


def _add_note(error: Exception, note: str) -> None:
    """Exception.add_note, which Python has from 3.11 on; pytest and rich show the notes on 3.10, too."""
    error.__notes__ = [*getattr(error, "__notes__", []), note]  # type: ignore[attr-defined]


class TransformRegistry:
    """Transform classes by their registry key, which is also the key in YAML."""

    _registry: ClassVar[dict[str, type[BaseTransform]]] = {}

    @classmethod
    def register(cls, name: str) -> Callable[[type[_T]], type[_T]]:
        """A class decorator that registers a transform under `name`; a later one replaces an earlier one.

        Replacing is logged as a warning unless both are the same class defined anew, as in a notebook.
        """

        def decorate(transform: type[_T]) -> type[_T]:
            old = cls._registry.get(name)
            if old is not None and (old.__module__, old.__qualname__) != (transform.__module__, transform.__qualname__):
                ad_logger.warning(
                    f"transform key {name!r}: {transform.__module__}.{transform.__qualname__} replaces "
                    f"{old.__module__}.{old.__qualname__}"
                )
            transform._transform_key = name
            cls._registry[name] = transform
            return transform

        return decorate

    @classmethod
    def get(cls, name: str) -> type[BaseTransform]:
        """The class registered under `name`.

        Raises:
            KeyError: there is none; the message names the nearest key.
        """
        if name not in cls._registry:
            raise KeyError(cls.describe_unknown(name))
        return cls._registry[name]

    @classmethod
    def has(cls, name: str) -> bool:
        """Whether `name` is registered."""
        return name in cls._registry

    @classmethod
    def get_config_class(cls, name: str) -> type[TransformConfig]:
        """The config class of the transform registered under `name`; KeyError as in `get`."""
        return cls.get(name).get_config_class()

    @classmethod
    def keys(cls) -> tuple[str, ...]:
        """All registered keys, sorted."""
        return tuple(sorted(cls._registry))

    @classmethod
    def describe_unknown(cls, name: str) -> str:
        """A sentence for an unknown key: it names the nearest registered key, or else what may be missing."""
        hint = suggestion(name, cls._registry, otherwise="has the package that registers it been imported?")
        return f"unknown transform {name!r}{hint}"
