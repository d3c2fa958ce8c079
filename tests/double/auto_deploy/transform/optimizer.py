"""DOUBLE of AutoDeploy's transform/optimizer.py, for tests."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..age import AGE
from . import library  # noqa: F401 - its built-in transforms register themselves
from .interface import SharedConfig, TransformConfig, TransformRegistry


class InferenceOptimizer:
    """Runs the transforms of a config, sorted by stage."""

    def __init__(self, factory: Any, config: dict[str, Any]) -> None:
        self.factory = factory
        self.shared_config = SharedConfig()
        parsed = {}
        for key, value in config.items():
            kind = TransformRegistry.get_config_class(key)
            parsed[key] = value if isinstance(value, TransformConfig) else kind(**value)
        self.config = dict(sorted(parsed.items(), key=lambda item: item[1].stage))

    def __call__(self, cm: Any, mod: nn.Module | None = None) -> nn.Module:
        mod = mod if mod is not None else nn.Module()
        for idx, (key, config) in enumerate(self.config.items()):
            arguments = (mod, cm, self.factory, self.shared_config)
            transform = TransformRegistry.get(key)(config)
            mod = transform(*arguments, idx) if AGE == "current" else transform(*arguments)
        return mod
