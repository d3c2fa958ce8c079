"""Runs a pipeline of transforms, stage by stage, on one model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from ..logger import get_rank, get_world_size
from .interface import SharedConfig, TransformConfig, TransformRegistry

if TYPE_CHECKING:
    from ..models.factory import ModelFactory
    from ..shim.interface import CachedSequenceInterface

OptimizerConfig = Mapping[str, "TransformConfig | Mapping[str, Any]"]


class InferenceOptimizer:
    """The transforms of a config, sorted by stage, ready to be applied to a model.

    Args:
        factory: where the model comes from; handed to each transform.
        config: from registry key to that transform's fields, or to its config. Inside a stage the mapping's order
            decides, because the sort is stable.

    Raises:
        KeyError: a key that no imported package has registered.
        pydantic.ValidationError: fields that the transform's config class does not accept.
    """

    def __init__(self, factory: ModelFactory, config: OptimizerConfig) -> None:
        self.factory = factory
        self.shared_config = SharedConfig(local_rank=get_rank(), world_size=get_world_size())
        self.config: dict[str, TransformConfig] = self._sorted_config(config)

    @staticmethod
    def _sorted_config(config: OptimizerConfig) -> dict[str, TransformConfig]:
        checked: dict[str, TransformConfig] = {}
        for key, fields in config.items():
            config_class = TransformRegistry.get_config_class(key)
            if isinstance(fields, config_class):
                checked[key] = fields
            else:
                given = fields.model_dump() if isinstance(fields, TransformConfig) else fields
                checked[key] = config_class(**given)
        return dict(sorted(checked.items(), key=lambda item: item[1].stage))

    def __call__(self, cm: CachedSequenceInterface, mod: nn.Module | None = None) -> nn.Module | None:
        """Apply every transform in turn.

        Args:
            cm: the interface that holds the model's metadata and caches.
            mod: the model to start from; None where the pipeline's own first transform builds it.

        Returns:
            The transformed model.
        """
        for idx, (key, config) in enumerate(self.config.items()):
            transform = TransformRegistry.get(key)(config)
            mod = transform(mod, cm, self.factory, self.shared_config, idx)
        return mod
