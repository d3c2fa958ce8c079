"""Transform `initialize_cache`: allocates the caches that the earlier transforms asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ConfigDict
from torch import nn

from ..interface import BaseTransform, SharedConfig, TransformConfig, TransformInfo, TransformRegistry

if TYPE_CHECKING:
    from ...models.factory import ModelFactory
    from ...shim.interface import CachedSequenceInterface


class InitializeCacheConfig(TransformConfig):
    """Config of `initialize_cache`."""

    model_config = ConfigDict(extra="forbid")


@TransformRegistry.register("initialize_cache")
class InitializeCache(BaseTransform):
    """Allocate every resource of the interface, zeroed; matches are the resources."""

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        """See `InitializeCacheConfig`."""
        return InitializeCacheConfig

    def _apply_to_full_model(
        self, mod: nn.Module, cm: CachedSequenceInterface, factory: ModelFactory, shared_config: SharedConfig
    ) -> tuple[nn.Module, TransformInfo]:
        count = cm.initialize_resources()
        return mod, TransformInfo(skipped=False, num_matches=count, is_clean=True, has_valid_shapes=True)
