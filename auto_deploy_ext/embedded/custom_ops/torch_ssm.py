"""Mamba2 state space ops in plain PyTorch: the source op that is exported and its cached twin, backend ``torch_ssm``.

The recurrence, per head, with ``dt = clamp(softplus(dt_raw + dt_bias), time_step_min, time_step_max)``::

    state_t = exp(A * dt_t) * state_{t-1} + dt_t * outer(x_t, B_t)
    y_t     = state_t @ C_t + D * x_t

Nothing here waits for the device: rows are told apart by counts that live on the host and by device index arithmetic.
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
    Constant,
    ResourceHandlerDict,
    StateResourceHandler,
)
from .state_rows import IntermediateStateResourceHandler, example_value, extend_length, rows_of_tokens

if TYPE_CHECKING:
    from ..shim.interface import KvCacheConfig


def _discretise(dt: torch.Tensor, dt_bias: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Step sizes ``[..., num_heads]`` in float32 from their raw projections."""
    return torch.clamp(F.softplus(dt.float() + dt_bias.float()), min=low, max=high)


def _per_head(grouped: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Repeat a ``[..., n_groups, d_state]`` projection so that every head has its group's copy, in float32."""
    return grouped.float().repeat_interleave(num_heads // grouped.shape[-2], dim=-2, output_size=num_heads)


def segmented_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    rows: torch.Tensor,
    states: torch.Tensor,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the recurrence over several sequences that lie one after the other, ``chunk_size`` tokens at a time.

    A table of one running state per row is carried from chunk to chunk, so a sequence may start, end or continue
    anywhere inside a chunk and no length is needed on the host.

    Args:
        x: ``[tokens, heads, head_dim]`` float32.
        dt: ``[tokens, heads]`` float32 step sizes.
        A: ``[heads]`` float32, negative.
        B: ``[tokens, heads, d_state]`` float32.
        C: ``[tokens, heads, d_state]`` float32.
        rows: ``[tokens]`` int64, ascending: the row of ``states`` that each token belongs to.
        states: ``[rows, heads, head_dim, d_state]`` float32, the state before each row's first token.
        chunk_size: tokens handled by one dense step; memory grows with its square.

    Returns:
        ``(y, final_states)`` of the shapes of ``x`` and ``states``; the ``D`` term is not added.
    """
    outputs = []
    row_ids = torch.arange(states.shape[0], device=states.device)
    for first in range(0, x.shape[0], chunk_size):
        part = slice(first, first + chunk_size)
        row, B_part, C_part = rows[part], B[part], C[part]
        log_decay, inflow = A * dt[part], x[part] * dt[part, :, None]

        earlier = (row[:, None] == row[None, :]).tril()
        since_start = torch.einsum("ls,sh->lh", earlier.float(), log_decay)
        between = since_start[:, None] - since_start[None, :]
        weights = between.masked_fill(~earlier[..., None], -torch.inf).exp()
        scores = torch.einsum("lhn,shn->lsh", C_part, B_part) * weights
        y = torch.einsum("lsh,shp->lhp", scores, inflow)
        y = y + torch.einsum("lhn,lhpn->lhp", C_part, states[row]) * since_start.exp()[..., None]
        outputs.append(y)

        member = (row_ids[:, None] == row[None, :]).float()
        total = member @ log_decay
        until_end = (total[row] - since_start).exp()
        added = (inflow * until_end[..., None])[..., None] * B_part[:, :, None, :]
        states = states * total.exp()[..., None, None] + (member @ added.flatten(1)).view_as(states)
    return (torch.cat(outputs) if outputs else torch.zeros_like(x)), states


def _step(
    state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each row: ``(y [rows, heads, head_dim], new state [rows, heads, head_dim, d_state])``."""
    decay = torch.exp(A * dt)[..., None, None]
    state = state * decay + (x * dt[..., None])[..., None] * B[..., None, :]
    return (state * C[..., None, :]).sum(-1), state


@torch.library.custom_op("auto_deploy_ext::torch_ssm", mutates_args={})
def torch_ssm(
    hidden_states: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt: torch.Tensor,
    dt_bias: torch.Tensor,
    time_step_min: float,
    time_step_max: float,
    chunk_size: int,
) -> torch.Tensor:
    """Mamba2 recurrence without a cache: every sequence of the batch starts from a zero state.

    Args:
        hidden_states: ``[b, s, num_heads, head_dim]``, any float dtype; computed in float32.
        A: ``[num_heads]`` float, negative.
        B: ``[b, s, n_groups, d_state]``.
        C: ``[b, s, n_groups, d_state]``.
        D: ``[num_heads]``, the skip connection.
        dt: ``[b, s, num_heads]`` raw step sizes, before bias and softplus.
        dt_bias: ``[num_heads]``.
        time_step_min: lower bound on the step size after softplus.
        time_step_max: upper bound on it, may be infinite.
        chunk_size: tokens that are handled densely at once.

    Returns:
        ``[b, s, num_heads, head_dim]`` on the device and in the dtype of ``hidden_states``.
    """
    batch, length, num_heads, head_dim = hidden_states.shape
    x = hidden_states.float().reshape(-1, num_heads, head_dim)
    steps = _discretise(dt, dt_bias, time_step_min, time_step_max).reshape(-1, num_heads)
    B_heads = _per_head(B, num_heads).reshape(batch * length, num_heads, -1)
    C_heads = _per_head(C, num_heads).reshape(batch * length, num_heads, -1)
    rows = torch.arange(batch, device=x.device).repeat_interleave(length, output_size=batch * length)
    states = x.new_zeros(batch, num_heads, head_dim, B.shape[-1])
    y, _ = segmented_scan(x, steps, A.float(), B_heads, C_heads, rows, states, chunk_size)
    y = y + D.float()[:, None] * x
    return y.reshape(hidden_states.shape).to(hidden_states.dtype)


@torch_ssm.register_fake
def _torch_ssm_fake(
    hidden_states: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt: torch.Tensor,
    dt_bias: torch.Tensor,
    time_step_min: float,
    time_step_max: float,
    chunk_size: int,
) -> torch.Tensor:
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "auto_deploy_ext::torch_cached_ssm", mutates_args=("ssm_state_cache", "intermediate_ssm_state_cache")
)
def torch_cached_ssm(
    hidden_states: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt: torch.Tensor,
    dt_bias: torch.Tensor,
    batch_info_host: torch.Tensor,
    cu_seqlen: torch.Tensor,
    slot_idx: torch.Tensor,
    use_initial_states: torch.Tensor,
    any_prefill_use_initial_states_host: torch.Tensor,
    ssm_state_cache: torch.Tensor,
    intermediate_ssm_state_cache: torch.Tensor,
    time_step_min: float,
    time_step_max: float,
    chunk_size: int,
) -> torch.Tensor:
    """Mamba2 recurrence over a batch of prefill, extend and decode rows (in this order) with one state per slot.

    Prefill rows start from their slot's state where ``use_initial_states`` says so, provided that
    ``any_prefill_use_initial_states_host`` is true, else from zero, and store the state after their last token. Extend
    rows start from their slot's state, leave it as it is and store the state after each of their tokens in the
    intermediate cache, from which verification promotes one. Decode rows update their slot's state in place.

    Args:
        hidden_states: ``[b, s, num_heads, head_dim]``, the batch's tokens row after row; ``b * s`` may exceed them.
        A, B, C, D, dt, dt_bias: as in :func:`torch_ssm`.
        batch_info_host: int host tensor that :class:`BatchInfo` reads.
        cu_seqlen: ``[>= rows + 1]`` int32, on the device of ``hidden_states``.
        slot_idx: ``[>= rows]`` int64, same device.
        use_initial_states: ``[>= rows]`` bool, same device.
        any_prefill_use_initial_states_host: ``[1]`` bool host tensor; false: no prefill row loads a state.
        ssm_state_cache: ``[slots, num_heads, head_dim, d_state]``, same device, written.
        intermediate_ssm_state_cache: ``[slots, 1 + max_draft_len, num_heads, head_dim, d_state]``, likewise.
        time_step_min: as in :func:`torch_ssm`.
        time_step_max: as in :func:`torch_ssm`.
        chunk_size: tokens that prefill handles densely at once.

    Returns:
        Like ``hidden_states``; positions beyond the batch's tokens are zero.

    Raises:
        ValueError: extend rows are longer than the intermediate cache is deep.
    """
    num_heads, head_dim = hidden_states.shape[-2:]
    x = hidden_states.float().reshape(-1, num_heads, head_dim)
    steps = _discretise(dt, dt_bias, time_step_min, time_step_max).reshape(-1, num_heads)
    B_heads = _per_head(B, num_heads).reshape(x.shape[0], num_heads, -1)
    C_heads = _per_head(C, num_heads).reshape(x.shape[0], num_heads, -1)
    A = A.float()
    y = torch.zeros_like(x)

    batch_info = BatchInfo(batch_info_host)
    num_prefill, num_extend, num_decode = batch_info.get_num_sequences()
    prefill_end, extend_tokens, decode_tokens = batch_info.get_num_tokens()
    extend_end = prefill_end + extend_tokens

    if num_prefill:
        slots = slot_idx[:num_prefill]
        states = x.new_zeros(num_prefill, *ssm_state_cache.shape[1:])
        if bool(any_prefill_use_initial_states_host[0]):
            load = use_initial_states[:num_prefill].view(-1, 1, 1, 1)
            states = torch.where(load, ssm_state_cache[slots].float(), states)
        rows = rows_of_tokens(cu_seqlen, num_prefill, prefill_end)
        tokens = slice(0, prefill_end)
        y[tokens], states = segmented_scan(
            x[tokens], steps[tokens], A, B_heads[tokens], C_heads[tokens], rows, states, chunk_size
        )
        ssm_state_cache[slots] = states.to(ssm_state_cache.dtype)

    if num_extend:
        length = extend_length(num_extend, extend_tokens, intermediate_ssm_state_cache)
        slots = slot_idx[num_prefill : num_prefill + num_extend]
        state = ssm_state_cache[slots].float()
        for i in range(length):
            tokens = slice(prefill_end + i, extend_end, length)
            y[tokens], state = _step(state, x[tokens], steps[tokens], A, B_heads[tokens], C_heads[tokens])
            intermediate_ssm_state_cache[slots, i] = state.to(intermediate_ssm_state_cache.dtype)

    if num_decode:
        slots = slot_idx[num_prefill + num_extend : num_prefill + num_extend + num_decode]
        tokens = slice(extend_end, extend_end + decode_tokens)
        state = ssm_state_cache[slots].float()
        y[tokens], state = _step(state, x[tokens], steps[tokens], A, B_heads[tokens], C_heads[tokens])
        ssm_state_cache[slots] = state.to(ssm_state_cache.dtype)

    total = extend_end + decode_tokens
    y[:total] += D.float()[:, None] * x[:total]
    return y.reshape(hidden_states.shape).to(hidden_states.dtype)


@torch_cached_ssm.register_fake
def _torch_cached_ssm_fake(
    hidden_states: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt: torch.Tensor,
    dt_bias: torch.Tensor,
    batch_info_host: torch.Tensor,
    cu_seqlen: torch.Tensor,
    slot_idx: torch.Tensor,
    use_initial_states: torch.Tensor,
    any_prefill_use_initial_states_host: torch.Tensor,
    ssm_state_cache: torch.Tensor,
    intermediate_ssm_state_cache: torch.Tensor,
    time_step_min: float,
    time_step_max: float,
    chunk_size: int,
) -> torch.Tensor:
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


@AttentionRegistry.register("torch_ssm")
class TorchSSM(AttentionDescriptor):
    """Backend ``torch_ssm``: states in float32, one slot per sequence."""

    @classmethod
    def get_attention_layout(cls) -> AttentionLayout:
        """Tokens before heads."""
        return "bsnd"

    @classmethod
    def get_num_qkv_args(cls) -> int:
        """hidden_states, A, B, C, D, dt, dt_bias."""
        return 7

    @classmethod
    def get_source_attention_op(cls) -> OpOverloadPacket:
        """The op that models are exported with."""
        return torch.ops.auto_deploy_ext.torch_ssm

    @classmethod
    def get_cached_attention_op(cls) -> Callable:
        """The op that takes its place."""
        return torch.ops.auto_deploy_ext.torch_cached_ssm.default

    @classmethod
    def get_standard_metadata_args(cls) -> list[str]:
        """Counts and the flag about initial states on the host, the rest on the device."""
        return [
            "batch_info_host",
            "cu_seqlen",
            "slot_idx",
            "use_initial_states",
            "any_prefill_use_initial_states_host",
        ]

    @classmethod
    def get_cache_initializers(cls, source_attn_node: Node, cache_config: KvCacheConfig) -> ResourceHandlerDict:
        """The state, and the state after each token of an extend row."""
        shape = (*example_value(source_attn_node, 0).shape[-2:], example_value(source_attn_node, 2).shape[-1])
        return {
            "ssm_state_cache": StateResourceHandler(*shape, dtype=torch.float32),
            "intermediate_ssm_state_cache": IntermediateStateResourceHandler(*shape, dtype=torch.float32),
        }

    @classmethod
    def get_constants(cls, source_attn_node: Node) -> list[Constant]:
        """time_step_min, time_step_max, chunk_size."""
        time_step_min, time_step_max, chunk_size = source_attn_node.args[cls.get_num_qkv_args() :]
        assert isinstance(time_step_min, float) and isinstance(time_step_max, float) and isinstance(chunk_size, int)
        return [time_step_min, time_step_max, chunk_size]
