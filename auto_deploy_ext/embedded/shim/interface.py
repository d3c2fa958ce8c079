"""CachedSequenceInterface: the arguments of a model's forward, metadata and caches together."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from ...spelling import misspelled, unknown_name_message
from ..custom_ops.attention_interface import (
    KVPagedResourceHandler,
    ResourceHandler,
    SequenceInfo,
    StateResourceHandler,
)

#: type of the error that pydantic reports for a misspelled field.
UNKNOWN_FIELD = "unknown_field"
INTERMEDIATE_PREFIX = "intermediate_"


class KvCacheConfig(BaseModel):
    """How the caches are laid out and how large they may grow."""

    model_config = ConfigDict(extra="allow")

    tokens_per_block: int = Field(default=32, ge=1, description="Tokens in a page.")
    dtype: str = Field(default="auto", description="Of the cached keys and values; auto: the model's.")
    free_gpu_memory_fraction: float = Field(
        default=0.9, gt=0, le=1, description="Share of the free GPU memory that the paged caches may take."
    )
    max_tokens: int | None = Field(
        default=None, ge=1, description="Tokens that the paged caches hold at most; by default what a full batch needs."
    )

    @model_validator(mode="after")
    def _check_spelling(self) -> KvCacheConfig:
        """AutoDeploy has more fields than these; one that is nearly one of these is a mistake."""
        message = misspelled(self.model_extra or (), type(self).model_fields)
        if message is not None:
            raise PydanticCustomError(UNKNOWN_FIELD, "{message}", {"message": message})
        return self


class KvCacheManager:
    """What the caches are: their pages and the tensors by resource name.

    Args:
        interface: whose caches these are.
    """

    def __init__(self, interface: CachedSequenceInterface) -> None:
        self._interface = interface

    @property
    def info(self) -> SequenceInfo:
        """The metadata of the batch."""
        return self._interface.info

    @property
    def resources(self) -> Mapping[str, torch.Tensor]:
        """The interface's caches by name, read-only."""
        return MappingProxyType(self._interface._caches)

    @property
    def num_blocks(self) -> int:
        """Pages in each paged cache."""
        return self.info.num_blocks

    @property
    def tokens_per_block(self) -> int:
        """Tokens in a page."""
        return self.info.tokens_per_block

    def get_resource(self, name: str) -> torch.Tensor:
        """Return a cache by its resource name.

        Raises:
            KeyError: there is none of that name.
        """
        if name not in self.resources:
            raise KeyError(unknown_name_message("resource", name, self.resources))
        return self.resources[name]


class HybridCacheManager(KvCacheManager):
    """The cache manager of a model that keeps states (SSM, convolution) beside its pages."""

    def state_pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (states ``[slots, *shape]``, states after each token ``[slots, depth, *shape]``) per resource."""
        caches = self.resources
        return [
            (state, caches[INTERMEDIATE_PREFIX + name])
            for name, state in caches.items()
            if INTERMEDIATE_PREFIX + name in caches
        ]

    def update_mamba_states(self, slot_idx: torch.Tensor, new_tokens_lens: torch.Tensor) -> None:
        """Make the state after the last accepted token the state of each extend row of the batch.

        Prefill rows, whose state is final already, and decode rows are left alone.

        Args:
            slot_idx: ``[n]`` int64 on the device, the rows' slots.
            new_tokens_lens: ``[n]`` integer on the device, accepted tokens of each row, at least 1.
        """
        num_prefill, num_extend, _ = self.info.batch_info.get_num_sequences()
        if num_extend == 0:
            return
        rows = slice(num_prefill, num_prefill + num_extend)
        slots = slot_idx[rows]
        last_accepted = new_tokens_lens[rows].to(torch.int64) - 1
        for states, intermediate in self.state_pairs():
            states.index_copy_(0, slots, intermediate[slots, last_accepted].to(states.dtype))


class CachedSequenceInterface:
    """Metadata (``.info``) and caches of the sequences that a model works on.

    Args:
        max_seq_len: longest sequence.
        max_batch_size: most sequences in a batch.
        max_num_tokens: most tokens in a batch.
        device: where everything lives; ``None``: CUDA if there is any, else the CPU.
        kv_cache_config: layout and size of the caches.
        vocab_size_padded: kept in ``.info``.
        spec_config: speculative decoding; its ``max_draft_len`` (attribute or key) goes to ``batch_info``.
        requires_uniform_kv_caches: whether all paged caches must be of one shape and dtype.

    Example:
        >>> csi = CachedSequenceInterface(max_seq_len=8, max_batch_size=2, max_num_tokens=8, device="cpu")
        >>> csi.add_resource("kv_cache_0", KVPagedResourceHandler(1, 4, torch.float32))
        'kv_cache_0'
        >>> csi.initialize_resources()
        1
        >>> csi.get_arg("kv_cache_0").shape
        torch.Size([4, 2, 1, 32, 4])
    """

    def __init__(
        self,
        max_seq_len: int,
        max_batch_size: int,
        max_num_tokens: int,
        device: torch.device | str | None = None,
        kv_cache_config: KvCacheConfig | None = None,
        vocab_size_padded: int | None = None,
        spec_config: Any | None = None,
        requires_uniform_kv_caches: bool = False,
    ) -> None:
        self.kv_cache_config = kv_cache_config or KvCacheConfig()
        self.spec_config = spec_config
        self.requires_uniform_kv_caches = requires_uniform_kv_caches
        self.info = SequenceInfo(
            max_seq_len=max_seq_len,
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            tokens_per_block=self.kv_cache_config.tokens_per_block,
            vocab_size_padded=vocab_size_padded,
        )
        self.info.batch_info.update_max_draft_len(_max_draft_len(spec_config))
        self._handlers: dict[str, ResourceHandler] = {}
        self._caches: dict[str, torch.Tensor] = {}
        self._kv_cache_manager: KvCacheManager | None = None
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.to(device)

    # Limits and device.

    @property
    def max_seq_len(self) -> int:
        """Longest sequence."""
        return self.info.max_seq_len

    @property
    def max_batch_size(self) -> int:
        """Most sequences in a batch."""
        return self.info.max_batch_size

    @property
    def max_num_tokens(self) -> int:
        """Most tokens in a batch."""
        return self.info.max_num_tokens

    @property
    def device(self) -> torch.device:
        """Where metadata and caches live."""
        return self.info.device

    def to(self, *args: Any, **kwargs: Any) -> CachedSequenceInterface:
        """Move metadata and caches (``torch.Tensor.to``'s arguments, only the device counts). Returns itself."""
        self.info.to(*args, **kwargs)
        self._caches = {name: cache.to(self.device) for name, cache in self._caches.items()}
        return self

    # Arguments.

    @property
    def named_args(self) -> dict[str, torch.Tensor]:
        """The metadata's active arguments, its extra arguments, and the caches, by name."""
        return {**self.info.named_args, **self._caches}

    @property
    def args(self) -> tuple[torch.Tensor, ...]:
        """The values of ``named_args``."""
        return tuple(self.named_args.values())

    def get_arg(self, name: str, truncate: bool | None = None, unflatten: bool | None = None) -> torch.Tensor:
        """Return a cache, or metadata as ``SequenceInfo.get_arg`` gives it.

        Raises:
            ValueError: there is neither.
        """
        cache = self._caches.get(name)
        if cache is not None:
            return cache
        if not self.info.has_arg(name):
            raise ValueError(unknown_name_message("argument", name, {*self.info.available_args, *self._caches}))
        return self.info.get_arg(name, truncate, unflatten)

    # Caches.

    def add_resource(self, suffix: str, handler: ResourceHandler) -> str:
        """Ask for a cache; it exists after :meth:`initialize_resources`.

        Args:
            suffix: the wanted name.
            handler: what to allocate.

        Returns:
            The name: the wanted one, or with ``_1``, ``_2``, .. behind it when that is taken.
        """
        name, count = suffix, 0
        while name in self._handlers or name in self.info.available_args:
            count += 1
            name = f"{suffix}_{count}"
        self._handlers[name] = handler
        return name

    def initialize_resources(self) -> int:
        """Decide on the number of pages and allocate every cache, zeroed.

        Pages: ``kv_cache_config.max_tokens`` if given, else what a full batch of the longest sequences and one extra
        page for each can own.

        Returns:
            The number of caches.

        Raises:
            ValueError: paged caches differ where ``requires_uniform_kv_caches`` forbids it.
        """
        self._check_uniform()
        self.info.update_cache_information(self._wanted_blocks())
        self._caches = {name: handler.allocate(self.info) for name, handler in self._handlers.items()}
        hybrid = any(isinstance(handler, StateResourceHandler) for handler in self._handlers.values())
        manager = HybridCacheManager if hybrid else KvCacheManager
        self._kv_cache_manager = manager(self)
        return len(self._caches)

    def resize(self, num_blocks: int | None = None) -> int:
        """Allocate the paged caches anew, zeroed, with another number of pages.

        Args:
            num_blocks: pages; ``None``: what fits ``free_gpu_memory_fraction`` of the free memory (the caches' present
                memory counts as free), at most what :meth:`initialize_resources` chooses. On the CPU that limit is
                not looked at.

        Returns:
            The number of pages.
        """
        paged = {name: handler for name, handler in self._handlers.items() if handler.is_paged}
        if num_blocks is None:
            num_blocks = min(self._wanted_blocks(), self._affordable_blocks(paged))
        if num_blocks < 1:
            raise ValueError(f"the paged caches need at least one page, got {num_blocks}")
        if num_blocks != self.info._num_blocks:
            for name in paged:
                self._caches.pop(name, None)
            self.info.update_cache_information(num_blocks)
            # In the order of registration, as before.
            self._caches = {
                name: handler.allocate(self.info) if handler.is_paged else self._caches[name]
                for name, handler in self._handlers.items()
            }
        return num_blocks

    def _wanted_blocks(self) -> int:
        max_tokens = self.kv_cache_config.max_tokens
        if max_tokens is not None:
            return -(-max_tokens // self.info.tokens_per_block)
        return max(2, self.max_batch_size) * (self.info.max_blocks_per_seq + 1)

    def _affordable_blocks(self, paged: Mapping[str, ResourceHandler]) -> int:
        block = sum(
            handler.bytes_per_block(self.info.tokens_per_block)
            for handler in paged.values()
            if isinstance(handler, KVPagedResourceHandler)
        )
        if self.device.type != "cuda" or block == 0:
            return self._wanted_blocks()
        held = sum(self._caches[name].nbytes for name in paged if name in self._caches)
        free, _ = torch.cuda.mem_get_info(self.device)
        return int((free + held) * self.kv_cache_config.free_gpu_memory_fraction) // block

    def _check_uniform(self) -> None:
        if not self.requires_uniform_kv_caches:
            return
        kinds: dict[tuple[int, int, torch.dtype], str] = {}
        for name, handler in self._handlers.items():
            if isinstance(handler, KVPagedResourceHandler):
                kinds.setdefault((handler.num_kv_heads, handler.head_dim, handler.dtype), name)
        if len(kinds) > 1:
            described = "; ".join(f"{name}: {h} heads of {d}, {dtype}" for (h, d, dtype), name in kinds.items())
            raise ValueError(f"the paged caches must be of one shape and dtype, but there are {described}")

    @property
    def kv_cache_manager(self) -> KvCacheManager | None:
        """The cache manager, a :class:`HybridCacheManager` when a state is cached; ``None`` before initialisation."""
        return self._kv_cache_manager


def _max_draft_len(spec_config: Any | None) -> int:
    """Return a speculative configuration's draft length, 0 when it has none."""
    if isinstance(spec_config, Mapping):
        return int(spec_config.get("max_draft_len") or 0)
    return int(getattr(spec_config, "max_draft_len", 0) or 0)
