"""DOUBLE of AutoDeploy's shim/interface.py, for tests."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import BaseModel

from ..custom_ops.attention_interface import SequenceInfo


class KvCacheConfig(BaseModel):
    """How caches are laid out."""

    model_config = {"extra": "allow"}

    tokens_per_block: int = 32
    dtype: str = "auto"
    free_gpu_memory_fraction: float = 0.9


class CachedSequenceInterface:
    """Metadata and caches together."""

    def __init__(
        self,
        max_seq_len: int,
        max_batch_size: int,
        max_num_tokens: int,
        device: Any = None,
        kv_cache_config: KvCacheConfig | None = None,
        vocab_size_padded: int | None = None,
        spec_config: Any = None,
        requires_uniform_kv_caches: bool = False,
    ) -> None:
        config = kv_cache_config or KvCacheConfig()
        self._spec_config = spec_config
        self._handlers: dict[str, Any] = {}
        self._caches: dict[str, torch.Tensor] = {}
        self.kv_cache_manager: Any = None
        self.info = SequenceInfo(
            max_seq_len, max_batch_size, max_num_tokens, config.tokens_per_block, vocab_size_padded
        )
        self.info.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    @property
    def device(self) -> torch.device:
        return self.info.device

    @property
    def named_args(self) -> dict[str, torch.Tensor]:
        return {**self.info.named_args, **self._caches}

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.named_args.values())

    def get_arg(self, name: str, truncate: bool | None = None, unflatten: bool | None = None) -> torch.Tensor:
        if name in self._caches:
            return self._caches[name]
        return self.info.get_arg(name, truncate, unflatten)

    def add_resource(self, suffix: str, handler: Any) -> str:
        self._handlers[suffix] = handler
        return suffix

    def initialize_resources(self) -> int:
        self._caches = {name: handler.allocate(self.info) for name, handler in self._handlers.items()}
        return len(self._caches)

    def to(self, *args: Any, **kwargs: Any) -> None:
        self.info.to(*args, **kwargs)
        self._caches = {name: cache.to(self.device) for name, cache in self._caches.items()}
