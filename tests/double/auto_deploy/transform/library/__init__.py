"""DOUBLE of AutoDeploy's built-in transforms that stand around the plugin's in its default config, for tests."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import GraphModule

from ..interface import BaseTransform, SharedConfig, TransformInfo, TransformRegistry


@TransformRegistry.register("initialize_cache")
class InitializeCache(BaseTransform):
    """Allocates the caches."""

    def _apply_to_full_model(self, mod: nn.Module, cm: Any, factory: Any, shared_config: SharedConfig) -> Any:
        return mod, TransformInfo(skipped=False, num_matches=cm.initialize_resources())


@TransformRegistry.register("resize_kv_cache")
class ResizeKVCache(BaseTransform):
    """Leaves the caches as large as they are."""

    def _apply_to_full_model(self, mod: nn.Module, cm: Any, factory: Any, shared_config: SharedConfig) -> Any:
        return mod, TransformInfo(skipped=True)


class CapturedGraph(nn.Module):
    """What a compile backend leaves in place of a GraphModule: a module that calls it."""

    def __init__(self, model: GraphModule) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


@TransformRegistry.register("compile_model")
class CompileModel(BaseTransform):
    """Replaces every GraphModule that is a submodule, unless `backend` is torch-simple."""

    def _apply_to_full_model(self, mod: nn.Module, cm: Any, factory: Any, shared_config: SharedConfig) -> Any:
        count = 0
        if getattr(self.config, "backend", "torch-simple") != "torch-simple":
            graphs = [(n, m) for n, m in mod.named_modules() if n and isinstance(m, GraphModule)]
            for name, sub in graphs:
                mod.set_submodule(name, CapturedGraph(sub))
            count = len(graphs)
        return mod, TransformInfo(skipped=False, num_matches=count, is_clean=True)
