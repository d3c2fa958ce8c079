"""The op that leaves a layer's output in a resource, where the Eagle wrapper picks it up for the drafter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .resource_handlers import ResourceHandler

if TYPE_CHECKING:
    from .sequence_info import SequenceInfo


@torch.library.custom_op("auto_deploy_ext::capture_hidden_states", mutates_args=("cache",))
def capture_hidden_states(hidden_states: torch.Tensor, cache: torch.Tensor) -> None:
    """Copy every token's state into the first rows of the cache.

    Args:
        hidden_states: [batch, sequence, hidden], at most max_num_tokens tokens.
        cache: [max_num_tokens, hidden], written in place.
    """
    flat = hidden_states.flatten(0, 1)
    cache[: flat.shape[0]].copy_(flat)


@capture_hidden_states.register_fake
def _(hidden_states: torch.Tensor, cache: torch.Tensor) -> None:
    return None


class HiddenStatesResourceHandler(ResourceHandler):
    """A hidden state per token of the batch: `[max_num_tokens, hidden]`.

    Args:
        hidden_size: Width of a state.
        dtype: Of the states.
    """

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        self.hidden_size = hidden_size
        self.dtype = dtype

    def allocate(self, sequence_info: SequenceInfo) -> torch.Tensor:
        """Return the rows, zeroed."""
        shape = (sequence_info.max_num_tokens, self.hidden_size)
        return torch.zeros(shape, dtype=self.dtype, device=sequence_info.device)
