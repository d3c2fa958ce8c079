"""Transform `resize_kv_cache`: gives the paged caches as many pages as the memory that is left allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ConfigDict, Field
from torch import nn

from ..interface import BaseTransform, SharedConfig, TransformConfig, TransformInfo, TransformRegistry

if TYPE_CHECKING:
    from ...models.factory import ModelFactory
    from ...shim.interface import CachedSequenceInterface


class ResizeKvCacheConfig(TransformConfig):
    """Config of `resize_kv_cache`."""

    model_config = ConfigDict(extra="forbid")

    num_blocks: int | None = Field(
        default=None, ge=1, description="Pages of each paged cache; null takes what free_gpu_memory_fraction allows."
    )


@TransformRegistry.register("resize_kv_cache")
class ResizeKvCache(BaseTransform):
    """Allocate the paged caches anew with another number of pages; matches are the pages."""

    @classmethod
    def get_config_class(cls) -> type[TransformConfig]:
        """See `ResizeKvCacheConfig`."""
        return ResizeKvCacheConfig

    def _apply_to_full_model(
        self, mod: nn.Module, cm: CachedSequenceInterface, factory: ModelFactory, shared_config: SharedConfig
    ) -> tuple[nn.Module, TransformInfo]:
        assert isinstance(self.config, ResizeKvCacheConfig)
        pages = cm.resize(self.config.num_blocks)
        return mod, TransformInfo(skipped=False, num_matches=pages, is_clean=True, has_valid_shapes=True)
