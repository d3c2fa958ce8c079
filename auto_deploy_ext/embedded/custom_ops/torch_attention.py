"""Attention in plain PyTorch: the source op that models are exported with, and backend `torch` (unpaged cache).

The backend reads device metadata only; of the host it needs nothing but the counts in `batch_info_host`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._ops import OpOverloadPacket
from torch.fx import Node
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from .attention_descriptor import (
    AttentionDescriptor,
    AttentionLayout,
    AttentionRegistry,
    Constant,
    ResourceHandlerDict,
)
from .resource_handlers import UnpagedResourceHandler

if TYPE_CHECKING:
    from ..shim.interface import KvCacheConfig

ATTENTION_IMPLEMENTATION = "auto_deploy_ext"
"""The `attn_implementation` under which transformers' models call the source op."""


def grouped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Masked attention with grouped heads, computed in float32.

    Args:
        q: [n, queries, heads, dim].
        k: [n, keys, kv_heads, dim]; heads is a multiple of kv_heads.
        v: [n, keys, kv_heads, v_dim].
        allowed: bool [n or 1, queries, keys]. What a key that no query may see holds, NaN included, has no influence.
        scale: Factor on the scores; None means dim ** -0.5.

    Returns:
        [n, queries, heads, v_dim] in q's dtype.
    """
    n, num_queries, heads, dim = q.shape
    kv_heads = k.shape[2]
    scale = dim**-0.5 if scale is None else scale
    grouped = q.float().view(n, num_queries, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("nqkgd,nskd->nkgqs", grouped, k.float()) * scale
    weights = scores.masked_fill(~allowed[:, None, None], -torch.inf).softmax(dim=-1)
    seen = allowed.any(dim=1)[:, :, None, None]
    out = torch.einsum("nkgqs,nskd->nqkgd", weights, v.float().masked_fill(~seen, 0.0))
    return out.reshape(n, num_queries, heads, v.shape[-1]).to(q.dtype)


@torch.library.custom_op("auto_deploy_ext::torch_attention", mutates_args=())
def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """Causal attention without a cache: what a model is exported with, to be replaced by a cached backend.

    Args:
        q: [batch, sequence, heads, dim].
        k: [batch, sequence, kv_heads, dim].
        v: [batch, sequence, kv_heads, v_dim].
        scale: Factor on the scores; None means dim ** -0.5.

    Returns:
        [batch, sequence, heads, v_dim], contiguous.
    """
    length = q.shape[1]
    allowed = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    return grouped_attention(q, k, v, allowed[None], scale)


@torch_attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    return q.new_empty(*q.shape[:3], v.shape[-1])


def transformers_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers' attention layers call; see `transformers.AttentionInterface`.

    Args:
        module: The attention layer; it must be causal.
        query: [batch, heads, sequence, dim]; key and value likewise, with kv_heads.
        key: See query.
        value: See query.
        attention_mask: Must be None: transformers builds none for an implementation without a mask function.
        scaling: Factor on the scores.
        dropout: Must be 0.
        **kwargs: Passed by some models; a sliding window, soft cap or sinks are refused.

    Returns:
        The output as [batch, sequence, heads, dim], and no attention weights.

    Raises:
        NotImplementedError: The layer asks for something that the source op does not compute.
    """
    unsupported = [name for name in ("sliding_window", "softcap", "s_aux") if kwargs.get(name) is not None]
    if attention_mask is not None:
        unsupported.append("attention_mask")
    if dropout:
        unsupported.append("dropout")
    if not getattr(module, "is_causal", True):
        unsupported.append("is_causal=False")
    if unsupported:
        raise NotImplementedError(
            f"{type(module).__name__} asks for {', '.join(unsupported)}, which torch_attention does not compute; "
            "use a model with plain causal attention"
        )
    out = torch.ops.auto_deploy_ext.torch_attention(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scaling
    )
    return out, None


def register_with_transformers() -> None:
    """Make the source op available as `attn_implementation="auto_deploy_ext"`.

    No mask function is registered with it, so transformers builds no mask.
    """
    AttentionInterface.register(ATTENTION_IMPLEMENTATION, transformers_attention)


def batch_counts(batch_info_host: torch.Tensor) -> tuple[int, int, int, int, int, int]:
    """Read num_prefill, num_prefill_tokens, num_extend, num_extend_tokens, num_decode, num_decode_tokens."""
    prefill, prefill_tokens, extend, extend_tokens, decode, decode_tokens, *_ = batch_info_host.tolist()
    return prefill, prefill_tokens, extend, extend_tokens, decode, decode_tokens


def _row_groups(batch_info_host: torch.Tensor) -> Iterator[tuple[int, int, int, int]]:
    """Give (first row, rows, first token, tokens) of the prefill, the extend and the decode rows that there are."""
    counts = batch_counts(batch_info_host)
    row = token = 0
    for rows, tokens in zip(counts[0::2], counts[1::2], strict=True):
        if rows:
            yield row, rows, token, tokens
        row, token = row + rows, token + tokens


def _attend_row_by_row(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float | None,
    out: torch.Tensor,
    rows: list[tuple[int, int, int, int]],
) -> None:
    """What `torch_cached_attention` does, where reading metadata costs nothing: few operations on true lengths.

    Args:
        q: As there, like all up to `scale`.
        k: See q.
        v: See q.
        k_cache: See q.
        v_cache: See q.
        scale: See q.
        out: Like q with v's last dimension, written in place.
        rows: First token, new tokens, cached tokens and slot of each row.
    """
    flat_q, flat_k, flat_v, flat_out = (x.flatten(0, 1) for x in (q, k, v, out))
    for start, length, past, slot in rows:
        tokens, total = slice(start, start + length), past + length
        keys, values = k_cache[slot, :total], v_cache[slot, :total]
        keys[past:] = flat_k[tokens]
        values[past:] = flat_v[tokens]
        allowed = None
        if length > 1:
            allowed = torch.ones(length, total, dtype=torch.bool).tril(past)
        query, key, value = (x.to(q.dtype).transpose(0, 1).unsqueeze(0) for x in (flat_q[tokens], keys, values))
        attended = scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=scale, enable_gqa=True)
        flat_out[tokens] = attended[0].transpose(0, 1)


@torch.library.custom_op("auto_deploy_ext::torch_cached_attention", mutates_args=("k_cache", "v_cache"))
def torch_cached_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch_info_host: torch.Tensor,
    seq_len: torch.Tensor,
    input_pos: torch.Tensor,
    slot_idx: torch.Tensor,
    cu_seqlen: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """Append to an unpaged cache and attend over it, for prefill, extend, decode and mixed batches.

    Nothing is planned on the host: rows, positions and slots come from device tensors. The price: on CUDA, where
    reading a length would wait for the device, each group of rows (prefill, extend, decode) is padded to a bound known
    from the counts, and attends over max_seq_len keys: rows * tokens * max_seq_len scores for a group of several rows
    of several tokens. On the CPU each row is computed by itself, at its true length.

    Args:
        q: [batch, sequence, heads, dim]; the batch's tokens in order when flattened.
        k: [batch, sequence, kv_heads, dim].
        v: [batch, sequence, kv_heads, v_dim].
        batch_info_host: int [>= 6] on the host: `BatchInfo.serialize()`.
        seq_len: int32 [>= rows]: new tokens of each row.
        input_pos: int32 [>= rows]: tokens of each row that the cache holds already.
        slot_idx: int64 [>= rows]: cache slot of each row.
        cu_seqlen: int32 [>= rows + 1]: where each row's tokens start.
        k_cache: [slots, max_seq_len, kv_heads, dim], written in place.
        v_cache: [slots, max_seq_len, kv_heads, v_dim], written in place.
        scale: Factor on the scores; None means dim ** -0.5.

    Returns:
        [batch, sequence, heads, v_dim] in q's dtype; zero for tokens beyond those that batch_info_host counts.
    """
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    counts = batch_counts(batch_info_host)
    num_rows, num_tokens = sum(counts[0::2]), sum(counts[1::2])
    if num_tokens == 0:
        return out
    if q.device.type == "cpu":
        columns = [tensor[:num_rows].tolist() for tensor in (cu_seqlen, seq_len, input_pos, slot_idx)]
        _attend_row_by_row(q, k, v, k_cache, v_cache, scale, out, list(zip(*columns, strict=True)))
        return out
    flat_q, flat_k, flat_v, flat_out = (x.flatten(0, 1) for x in (q, k, v, out))
    starts = cu_seqlen[:num_rows].long()
    ends = cu_seqlen[1 : num_rows + 1].contiguous()
    tokens = torch.arange(num_tokens, device=q.device, dtype=ends.dtype)
    row = torch.searchsorted(ends, tokens, right=True).clamp(max=num_rows - 1)
    offset = tokens.long() - starts[row]
    slots = slot_idx[:num_rows].long()
    past = input_pos[:num_rows].long()

    place = (slots[row], past[row] + offset)
    k_cache.index_put_(place, flat_k[:num_tokens].to(k_cache.dtype))
    v_cache.index_put_(place, flat_v[:num_tokens].to(v_cache.dtype))

    for first_row, rows, first_token, group_tokens in _row_groups(batch_info_host):
        in_rows, in_tokens = slice(first_row, first_row + rows), slice(first_token, first_token + group_tokens)
        lengths = seq_len[in_rows]
        totals = past[in_rows] + lengths
        queries, keys = group_tokens - rows + 1, k_cache.shape[1]
        steps = torch.arange(queries, device=q.device)
        padded = flat_q[(starts[in_rows, None] + steps).clamp(max=num_tokens - 1)]
        positions = past[in_rows, None] + steps
        key_positions = torch.arange(keys, device=q.device)
        # The second condition matters for padding only, whose queries come after the row's last key.
        allowed = (key_positions <= positions[:, :, None]) & (key_positions < totals[:, None, None])
        attended = grouped_attention(
            padded, k_cache[slots[in_rows], :keys], v_cache[slots[in_rows], :keys], allowed, scale
        )
        flat_out[in_tokens] = attended[row[in_tokens] - first_row, offset[in_tokens].clamp(max=queries - 1)]
    return out


@torch_cached_attention.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch_info_host: torch.Tensor,
    seq_len: torch.Tensor,
    input_pos: torch.Tensor,
    slot_idx: torch.Tensor,
    cu_seqlen: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    return q.new_empty(*q.shape[:3], v.shape[-1])


def cached_heads(source_attn_node: Node, cache_config: KvCacheConfig) -> tuple[int, int, int, torch.dtype]:
    """Give (kv_heads, dim, v_dim, cache dtype) for a `torch_attention` node with shapes in `meta["val"]`.

    Raises:
        ValueError: `cache_config.dtype` is no floating point type of torch.
    """
    tensors: Any = source_attn_node.args[1:3]
    key, value = (node.meta["val"] for node in tensors)
    if cache_config.dtype == "auto":
        dtype = key.dtype
    else:
        dtype = getattr(torch, cache_config.dtype, None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(
                f"kv_cache_config.dtype: {cache_config.dtype!r} is no floating point type; use auto, float32, "
                "float16 or bfloat16"
            )
    return int(key.shape[2]), int(key.shape[3]), int(value.shape[3]), dtype


def attention_scale(source_attn_node: Node) -> float | None:
    """The `scale` argument of a `torch_attention` node."""
    args = source_attn_node.args
    return args[3] if len(args) > 3 else source_attn_node.kwargs.get("scale")  # type: ignore[return-value]


class SourceAttentionDescriptor(AttentionDescriptor):
    """What all backends that replace `torch_attention` have in common."""

    @classmethod
    def get_attention_layout(cls) -> AttentionLayout:
        """Tokens before heads."""
        return "bsnd"

    @classmethod
    def get_num_qkv_args(cls) -> int:
        """q, k, v."""
        return 3

    @classmethod
    def get_source_attention_op(cls) -> OpOverloadPacket:
        """The op that models are exported with."""
        return torch.ops.auto_deploy_ext.torch_attention

    @classmethod
    def get_constants(cls, source_attn_node: Node) -> list[Constant]:
        """scale."""
        return [attention_scale(source_attn_node)]


@AttentionRegistry.register("torch")
class TorchAttention(SourceAttentionDescriptor):
    """Backend `torch`: an unpaged cache, a row per slot; reads device metadata only."""

    @classmethod
    def get_cached_attention_op(cls) -> Callable:
        """See `torch_cached_attention`."""
        return torch.ops.auto_deploy_ext.torch_cached_attention.default

    @classmethod
    def get_standard_metadata_args(cls) -> list[str]:
        """The counts on the host, everything else on the device."""
        return ["batch_info_host", "seq_len", "input_pos", "slot_idx", "cu_seqlen"]

    @classmethod
    def get_cache_initializers(cls, source_attn_node: Node, cache_config: KvCacheConfig) -> ResourceHandlerDict:
        """Keys and values apart."""
        heads, dim, v_dim, dtype = cached_heads(source_attn_node, cache_config)
        return {
            "k_cache": UnpagedResourceHandler(heads, dim, dtype=dtype),
            "v_cache": UnpagedResourceHandler(heads, v_dim, dtype=dtype),
        }
