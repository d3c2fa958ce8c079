"""Transform `build_model`: makes the model that the factory describes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ConfigDict
from torch import nn

from ..interface import BaseTransform, SharedConfig, TransformConfig, TransformInfo, TransformRegistry

if TYPE_CHECKING:
    from ...models.factory import ModelFactory
    from ...shim.interface import CachedSequenceInterface


class BuildModelConfig(TransformConfig):
    """Config of `build_model`."""

    model_config = ConfigDict(extra="forbid")


@TransformRegistry.register("build_model")
class BuildModel(BaseTransform):
    """Build target, drafter and wrapper on the CPU; a model that is there already is left alone."""

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        """See `BuildModelConfig`."""
        return BuildModelConfig

    def _apply_to_full_model(
        self, mod: nn.Module | None, cm: CachedSequenceInterface, factory: ModelFactory, shared_config: SharedConfig
    ) -> tuple[nn.Module, TransformInfo]:
        if mod is not None:
            return mod, TransformInfo(skipped=True, is_clean=True, has_valid_shapes=True)
        return factory.build_model(), TransformInfo(skipped=False, num_matches=1, is_clean=True, has_valid_shapes=True)
