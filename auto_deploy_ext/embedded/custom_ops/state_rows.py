"""What the cached ops that keep one state per slot (SSM and causal convolution) share: caches and index arithmetic."""

from __future__ import annotations

import torch
from torch.fx import Node

from .resource_handlers import StateResourceHandler
from .sequence_info import SequenceInfo


class IntermediateStateResourceHandler(StateResourceHandler):
    """The state after each token of an extend row: ``[slots, 1 + max_draft_len, *state_shape]``.

    The draft length is the one in the interface's ``batch_info`` when the cache is allocated.
    """

    def allocate(self, sequence_info: SequenceInfo) -> torch.Tensor:
        """Return the states, zeroed."""
        depth = 1 + sequence_info.batch_info.get_max_draft_len()
        shape = (sequence_info.max_num_state_slots, depth, *self.state_shape)
        return torch.zeros(shape, dtype=self.dtype, device=sequence_info.device)


def example_value(node: Node, index: int) -> torch.Tensor:
    """The fake tensor that export recorded for an argument of a node.

    Raises:
        TypeError: that argument is no tensor in the graph.
    """
    argument = node.args[index]
    if not isinstance(argument, Node):
        raise TypeError(f"argument {index} of {node.format_node()} is {argument!r}, not a tensor in the graph")
    return argument.meta["val"]


def rows_of_tokens(cu_seqlen: torch.Tensor, num_rows: int, num_tokens: int) -> torch.Tensor:
    """Row of each of the first ``num_tokens`` tokens, ``[num_tokens]`` int64 on the device of ``cu_seqlen``.

    Args:
        cu_seqlen: ``[>= num_rows + 1]`` int32 cumulated lengths, starting with 0.
        num_rows: rows that the tokens belong to, counted on the host.
        num_tokens: tokens of those rows, counted on the host.
    """
    tokens = torch.arange(num_tokens, device=cu_seqlen.device, dtype=cu_seqlen.dtype)
    return torch.bucketize(tokens, cu_seqlen[1 : num_rows + 1], right=True)


def extend_length(num_extend: int, num_tokens: int, intermediate_cache: torch.Tensor) -> int:
    """Tokens in each extend row; all rows of a batch have equally many.

    Args:
        num_extend: number of extend rows.
        num_tokens: their tokens together.
        intermediate_cache: ``[slots, depth, ...]`` cache that has to hold one state for every token of a row.

    Raises:
        ValueError: the rows differ in length or are longer than ``depth``.
    """
    length, rest = divmod(num_tokens, num_extend)
    if rest:
        raise ValueError(f"{num_extend} extend rows with {num_tokens} tokens: extend rows must be equally long")
    depth = intermediate_cache.shape[1]
    if length > depth:
        raise ValueError(
            f"extend rows of {length} tokens, but the intermediate state cache holds {depth} states per slot: "
            f"set max_draft_len to at least {length - 1} before the caches are initialised"
        )
    return length
