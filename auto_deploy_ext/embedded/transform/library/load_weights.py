"""Transform `load_weights`: loads the checkpoint, if there is one, and moves the model to its device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ConfigDict
from torch import nn

from ..interface import BaseTransform, SharedConfig, TransformConfig, TransformInfo, TransformRegistry

if TYPE_CHECKING:
    from ...models.factory import ModelFactory
    from ...shim.interface import CachedSequenceInterface


class LoadWeightsConfig(TransformConfig):
    """Config of `load_weights`."""

    model_config = ConfigDict(extra="forbid")


@TransformRegistry.register("load_weights")
class LoadWeights(BaseTransform):
    """Fill the parameters and move them to the interface's device; matches are the weights that were loaded."""

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        """See `LoadWeightsConfig`."""
        return LoadWeightsConfig

    def _apply_to_full_model(
        self, mod: nn.Module, cm: CachedSequenceInterface, factory: ModelFactory, shared_config: SharedConfig
    ) -> tuple[nn.Module, TransformInfo]:
        count = factory.load_or_random_init(mod, cm.device)
        return mod, TransformInfo(skipped=False, num_matches=count, is_clean=True, has_valid_shapes=True)
