"""Depthwise causal convolution in plain PyTorch: the source op that is exported and its cached twin.

A slot's state is the last ``kernel - 1`` inputs of its sequence. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch._ops import OpOverloadPacket
from torch.fx import Node

from .attention_interface import (
    AttentionDescriptor,
    AttentionLayout,
    AttentionRegistry,
    BatchInfo,
    ResourceHandlerDict,
    StateResourceHandler,
)
from .state_rows import IntermediateStateResourceHandler, example_value, extend_length, rows_of_tokens

if TYPE_CHECKING:
    from ..shim.interface import KvCacheConfig


@torch.library.custom_op("auto_deploy_ext::torch_causal_conv1d", mutates_args={})
def torch_causal_conv1d(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Depthwise causal convolution without a cache: zeros stand before every sequence.

    Args:
        input: ``[b, s, channels]``.
        weight: ``[channels, 1, kernel]``, as ``nn.Conv1d`` keeps it; the last tap meets the newest token.
        bias: ``[channels]`` or None.

    Returns:
        ``[b, s, channels]`` on the device and in the dtype of ``input``.
    """
    padded = F.pad(input.transpose(1, 2).to(weight.dtype), (weight.shape[-1] - 1, 0))
    y = F.conv1d(padded, weight, bias, groups=weight.shape[0])
    return y.transpose(1, 2).to(input.dtype).contiguous()


@torch_causal_conv1d.register_fake
def _torch_causal_conv1d_fake(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


def _convolve(windows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``[..., channels]`` from input windows ``[..., channels, kernel]``."""
    y = (windows * weight[:, 0].float()).sum(-1)
    return y if bias is None else y + bias.float()


def _prefill(
    x: torch.Tensor, cu_seqlen: torch.Tensor, num_rows: int, states: torch.Tensor, kernel: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of sequences that lie one after the other, and the state after each of them.

    Args:
        x: ``[tokens, channels]``.
        cu_seqlen: ``[>= num_rows + 1]`` int32.
        num_rows: sequences in ``x``.
        states: ``[num_rows, channels, kernel - 1]``, the inputs before each sequence's first token.
        kernel: taps.

    Returns:
        ``(windows [tokens, channels, kernel], states [num_rows, channels, kernel - 1])``.
    """
    past = kernel - 1
    source = torch.cat([states.transpose(1, 2).reshape(num_rows * past, -1), x])

    def inputs_before(end: torch.Tensor, row: torch.Tensor, count: int) -> torch.Tensor:
        """The ``count`` inputs up to and without token ``end`` of each row, reaching into the row's old state."""
        token = end[:, None] - torch.arange(count, 0, -1, device=x.device)
        within = token - cu_seqlen[row].long()[:, None]
        index = torch.where(within >= 0, num_rows * past + token, row[:, None] * past + past + within)
        return source[index].transpose(1, 2)

    row_of_token = rows_of_tokens(cu_seqlen, num_rows, x.shape[0])
    windows = inputs_before(torch.arange(1, x.shape[0] + 1, device=x.device), row_of_token, kernel)
    every_row = torch.arange(num_rows, device=x.device)
    return windows, inputs_before(cu_seqlen[1 : num_rows + 1].long(), every_row, past)


def _dense(x: torch.Tensor, states: torch.Tensor, kernel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of equally long rows, and the state after each of their tokens.

    Args:
        x: ``[rows, length, channels]``.
        states: ``[rows, channels, kernel - 1]``.
        kernel: taps.

    Returns:
        ``(windows [rows, length, channels, kernel], states [rows, length, channels, kernel - 1])``.
    """
    windows = torch.cat([states, x.transpose(1, 2)], dim=-1).unfold(-1, kernel, 1).transpose(1, 2)
    return windows, windows[..., 1:]


@torch.library.custom_op(
    "auto_deploy_ext::torch_cached_causal_conv1d", mutates_args=("conv_state_cache", "intermediate_conv_state_cache")
)
def torch_cached_causal_conv1d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    batch_info_host: torch.Tensor,
    cu_seqlen: torch.Tensor,
    slot_idx: torch.Tensor,
    use_initial_states: torch.Tensor,
    conv_state_cache: torch.Tensor,
    intermediate_conv_state_cache: torch.Tensor,
) -> torch.Tensor:
    """Depthwise causal convolution over a batch of prefill, extend and decode rows with one state per slot.

    Prefill rows begin with their slot's state where ``use_initial_states`` says so, else with zeros, and store the
    state after their last token. Extend rows begin with their slot's state, leave it as it is and store the state after
    each of their tokens in the intermediate cache. Decode rows update their slot's state in place.

    Args:
        input: ``[b, s, channels]``, the batch's tokens row after row; ``b * s`` may exceed them.
        weight: ``[channels, 1, kernel]``.
        bias: ``[channels]`` or None.
        batch_info_host: int host tensor that :class:`BatchInfo` reads.
        cu_seqlen: ``[>= rows + 1]`` int32, on the device of ``input``.
        slot_idx: ``[>= rows]`` int64, same device.
        use_initial_states: ``[>= rows]`` bool, same device.
        conv_state_cache: ``[slots, channels, kernel - 1]``, same device, written.
        intermediate_conv_state_cache: ``[slots, 1 + max_draft_len, channels, kernel - 1]``, same device, written.

    Returns:
        Like ``input``; positions beyond the batch's tokens are zero.

    Raises:
        ValueError: extend rows are longer than the intermediate cache is deep.
    """
    kernel = weight.shape[-1]
    x = input.float().reshape(-1, input.shape[-1])
    y = torch.zeros_like(x)

    batch_info = BatchInfo(batch_info_host)
    num_prefill, num_extend, num_decode = batch_info.get_num_sequences()
    prefill_end, extend_tokens, decode_tokens = batch_info.get_num_tokens()
    extend_end = prefill_end + extend_tokens

    if num_prefill:
        slots = slot_idx[:num_prefill]
        states = conv_state_cache[slots].float()
        states = torch.where(use_initial_states[:num_prefill].view(-1, 1, 1), states, torch.zeros_like(states))
        windows, states = _prefill(x[:prefill_end], cu_seqlen, num_prefill, states, kernel)
        y[:prefill_end] = _convolve(windows, weight, bias)
        conv_state_cache[slots] = states.to(conv_state_cache.dtype)

    if num_extend:
        length = extend_length(num_extend, extend_tokens, intermediate_conv_state_cache)
        slots = slot_idx[num_prefill : num_prefill + num_extend]
        rows = x[prefill_end:extend_end].view(num_extend, length, -1)
        windows, states = _dense(rows, conv_state_cache[slots].float(), kernel)
        y[prefill_end:extend_end] = _convolve(windows, weight, bias).flatten(0, 1)
        intermediate_conv_state_cache[slots, :length] = states.to(intermediate_conv_state_cache.dtype)

    if num_decode:
        slots = slot_idx[num_prefill + num_extend : num_prefill + num_extend + num_decode]
        rows = x[extend_end : extend_end + decode_tokens].view(num_decode, 1, -1)
        windows, states = _dense(rows, conv_state_cache[slots].float(), kernel)
        y[extend_end : extend_end + decode_tokens] = _convolve(windows, weight, bias).flatten(0, 1)
        conv_state_cache[slots] = states[:, 0].to(conv_state_cache.dtype)

    return y.reshape(input.shape).to(input.dtype)


@torch_cached_causal_conv1d.register_fake
def _torch_cached_causal_conv1d_fake(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    batch_info_host: torch.Tensor,
    cu_seqlen: torch.Tensor,
    slot_idx: torch.Tensor,
    use_initial_states: torch.Tensor,
    conv_state_cache: torch.Tensor,
    intermediate_conv_state_cache: torch.Tensor,
) -> torch.Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)


@AttentionRegistry.register("torch_causal_conv")
class TorchCausalConv(AttentionDescriptor):
    """Backend ``torch_causal_conv``: states in the inputs' dtype, one slot per sequence."""

    @classmethod
    def get_attention_layout(cls) -> AttentionLayout:
        """Tokens before channels."""
        return "bsnd"

    @classmethod
    def get_num_qkv_args(cls) -> int:
        """input, weight, bias."""
        return 3

    @classmethod
    def get_source_attention_op(cls) -> OpOverloadPacket:
        """The op that models are exported with."""
        return torch.ops.auto_deploy_ext.torch_causal_conv1d

    @classmethod
    def get_cached_attention_op(cls) -> Callable:
        """The op that takes its place."""
        return torch.ops.auto_deploy_ext.torch_cached_causal_conv1d.default

    @classmethod
    def get_standard_metadata_args(cls) -> list[str]:
        """Counts on the host, the rest on the device."""
        return ["batch_info_host", "cu_seqlen", "slot_idx", "use_initial_states"]

    @classmethod
    def get_cache_initializers(cls, source_attn_node: Node, cache_config: KvCacheConfig) -> ResourceHandlerDict:
        """The state, and the state after each token of an extend row."""
        inputs, weight = example_value(source_attn_node, 0), example_value(source_attn_node, 1)
        shape = (weight.shape[0], weight.shape[-1] - 1)
        return {
            "conv_state_cache": StateResourceHandler(*shape, dtype=inputs.dtype),
            "intermediate_conv_state_cache": IntermediateStateResourceHandler(*shape, dtype=inputs.dtype),
        }
