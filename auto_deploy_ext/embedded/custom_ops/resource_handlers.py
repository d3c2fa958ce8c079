"""Resource handlers: what a cache looks like and how it is allocated once the number of pages and slots is known."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .sequence_info import SequenceInfo


class ResourceHandler(ABC):
    """Describes one cache; the interface allocates it."""

    #: Whether the cache's size follows the number of pages, so that it is allocated anew when that changes.
    is_paged: bool = False

    @abstractmethod
    def allocate(self, sequence_info: SequenceInfo) -> torch.Tensor:
        """Return the cache, zeroed, on ``sequence_info.device``."""


class KVPagedResourceHandler(ResourceHandler):
    """Keys and values in pages, HND: ``[num_blocks, 2, num_kv_heads, tokens_per_block, head_dim]``.

    Element 0 of the second dimension holds keys, element 1 values.

    Args:
        num_kv_heads: heads of keys and values.
        head_dim: size of a head.
        dtype: of the cache.
    """

    is_paged = True

    def __init__(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype

    def bytes_per_block(self, tokens_per_block: int) -> int:
        """Return the size of one page."""
        return 2 * self.num_kv_heads * tokens_per_block * self.head_dim * self.dtype.itemsize

    def allocate(self, sequence_info: SequenceInfo) -> torch.Tensor:
        """Return the pages, zeroed."""
        shape = (sequence_info.num_blocks, 2, self.num_kv_heads, sequence_info.tokens_per_block, self.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=sequence_info.device)


class UnpagedResourceHandler(ResourceHandler):
    """Something per token, one row per slot: ``[num_slots, max_seq_len, *token_shape]``.

    ``num_slots`` is ``SequenceInfo.max_num_state_slots``: one per row of a batch and, last, one of scratch.

    Args:
        token_shape: shape of what one token keeps.
        dtype: of the cache.
    """

    def __init__(self, *token_shape: int, dtype: torch.dtype) -> None:
        self.token_shape = token_shape
        self.dtype = dtype

    def allocate(self, sequence_info: SequenceInfo) -> torch.Tensor:
        """Return the rows, zeroed."""
        shape = (sequence_info.max_num_state_slots, sequence_info.max_seq_len, *self.token_shape)
        return torch.zeros(shape, dtype=self.dtype, device=sequence_info.device)


class StateResourceHandler(ResourceHandler):
    """A state per slot: ``[num_slots, *state_shape]``, with ``num_slots`` as for the unpaged handler.

    Having one makes the interface's cache manager a hybrid one. A state whose resource name is that of another with
    ``intermediate_`` in front keeps that state after each token of an extend row, ``[num_slots, depth, *state_shape]``.

    Args:
        state_shape: shape of one slot's state.
        dtype: of the state.
    """

    def __init__(self, *state_shape: int, dtype: torch.dtype) -> None:
        self.state_shape = state_shape
        self.dtype = dtype

    def allocate(self, sequence_info: SequenceInfo) -> torch.Tensor:
        """Return the states, zeroed."""
        shape = (sequence_info.max_num_state_slots, *self.state_shape)
        return torch.zeros(shape, dtype=self.dtype, device=sequence_info.device)
