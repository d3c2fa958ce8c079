"""DOUBLE of AutoDeploy's transform/interface.py, written from the description of its import surface, for tests."""

from __future__ import annotations

from enum import Enum
from functools import total_ordering
from typing import Any, final

import torch
from pydantic import BaseModel, Field
from torch import nn
from torch.fx import GraphModule, Node

from ..age import AGE

_ORDER = ["factory", "export", "post_export", "pattern_matcher", "sharding", "weight_load", "post_load_fusion"]
_ORDER += ["cache_init", "visualize", "export_onnx"] if AGE == "current" else ["visualize", "cache_init"]


@total_ordering
class _Ordered(Enum):
    """Compares in the order of definition."""

    def __lt__(self, other: Enum) -> bool:
        return list(type(self)).index(self) < list(type(self)).index(other)


Stages = _Ordered("Stages", {name.upper(): name for name in [*_ORDER, "compile"]})  # type: ignore[call-overload]


class TransformConfig(BaseModel):
    """What every transform can be told."""

    model_config = {"extra": "allow"}

    stage: Stages
    run_per_gm: bool = True
    enabled: bool = True
    skip_on_error: bool = False
    run_graph_cleanup: bool = True
    run_shape_prop: bool = False
    requires_clean_graph: bool = True
    requires_shape_prop: bool = False
    debug_visualize_dir: str | None = None
    expect_mem_change: bool = False


class TransformInfo(BaseModel):
    """What a transform did."""

    model_config = {"frozen": True}

    skipped: bool = True
    num_matches: int = 0
    is_clean: bool = False
    has_valid_shapes: bool = False

    def __or__(self, other: TransformInfo) -> TransformInfo:
        return self._merge(other, any)

    def __and__(self, other: TransformInfo) -> TransformInfo:
        return self._merge(other, all)

    def _merge(self, other: TransformInfo, how: Any) -> TransformInfo:
        return TransformInfo(
            skipped=self.skipped and other.skipped,
            num_matches=self.num_matches + other.num_matches,
            is_clean=how((self.is_clean, other.is_clean)),
            has_valid_shapes=how((self.has_valid_shapes, other.has_valid_shapes)),
        )


class SharedConfig(BaseModel):
    """What all transforms share."""

    model_config = {"extra": "allow"}

    local_rank: int = 0
    world_size: int = 1
    note: str = Field(default="", exclude=True)


class BaseTransform:
    """Runs `_apply` or `_apply_to_full_model` with bookkeeping and cleanup around it."""

    config: TransformConfig
    _key = ""

    @classmethod
    def get_transform_key(cls) -> str:
        return cls._key

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        return TransformConfig

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> BaseTransform:
        return cls(cls.get_config_class()(**kwargs))

    @final
    def __init__(self, config: TransformConfig) -> None:
        wanted = self.get_config_class()
        self.config = config if isinstance(config, wanted) else wanted(**config.model_dump())
        self._post_init()

    def _post_init(self) -> None:
        pass

    def _run(self, mod: nn.Module, cm: Any, factory: Any, shared_config: SharedConfig) -> nn.Module:
        if not self.config.enabled:
            return mod
        if self.config.requires_clean_graph:
            _clean(mod)
        info = TransformInfo(skipped=True)
        if self.config.run_per_gm:
            for name, sub in [(n, m) for n, m in mod.named_modules() if isinstance(m, GraphModule)]:
                new, sub_info = self._apply(sub, cm, factory, shared_config)
                info = info | sub_info
                if new is not sub:
                    mod.set_submodule(name, new)
        else:
            mod, info = self._apply_to_full_model(mod, cm, factory, shared_config)
        if self.config.run_graph_cleanup and not info.is_clean:
            _clean(mod)
        meta = mod.__dict__.setdefault("meta", {})
        meta.setdefault("_autodeploy", {}).setdefault("transform_history", {})[self._key] = info
        return mod

    if AGE == "current":

        @final
        def __call__(self, mod: nn.Module, cm: Any, factory: Any, shared_config: SharedConfig, idx: int) -> nn.Module:
            return self._run(mod, cm, factory, shared_config)

    else:

        @final
        def __call__(self, mod: nn.Module, cm: Any, factory: Any, shared_config: SharedConfig) -> nn.Module:
            return self._run(mod, cm, factory, shared_config)

    def _apply(self, gm: GraphModule, cm: Any, factory: Any, shared_config: SharedConfig) -> Any:
        raise NotImplementedError

    def _apply_to_full_model(self, mod: nn.Module, cm: Any, factory: Any, shared_config: SharedConfig) -> Any:
        raise NotImplementedError

    def _add_or_retrieve_input(self, gm: GraphModule, cm: Any, name: str) -> Node:
        for node in gm.graph.nodes:
            if node.op == "placeholder" and node.target == name:
                return node
        cm.info.activate_arg(name)
        last = [node for node in gm.graph.nodes if node.op == "placeholder"][-1]
        with gm.graph.inserting_after(last):
            return gm.graph.placeholder(name)

    def _log_info(self, *parts: Any) -> None:
        print(f"[{self._key}]", *parts)

    _log_warning = _log_debug = _log_info


def _clean(mod: nn.Module) -> None:
    with torch.no_grad():
        for sub in mod.modules():
            if isinstance(sub, GraphModule):
                sub.graph.eliminate_dead_code()
                sub.recompile()
                sub.graph.lint()


class TransformRegistry:
    """Transforms by their YAML key."""

    _registry: dict[str, type[BaseTransform]] = {}  # noqa: RUF012

    @classmethod
    def register(cls, name: str) -> Any:
        def inner(transform: type[BaseTransform]) -> type[BaseTransform]:
            if AGE != "current" and name in cls._registry:
                raise KeyError(f"{name} is registered")
            cls._registry[name] = transform
            transform._key = name
            return transform

        return inner

    @classmethod
    def get(cls, name: str) -> type[BaseTransform]:
        return cls._registry[name]

    @classmethod
    def has(cls, name: str) -> bool:
        return name in cls._registry

    @classmethod
    def get_config_class(cls, name: str) -> type[TransformConfig]:
        return cls._registry[name].get_config_class()
