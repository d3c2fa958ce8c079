"""Backend `triton`: attention over a paged cache in one Triton kernel that reads device metadata only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from ... import kernels
from .attention_descriptor import AttentionRegistry, ResourceHandlerDict
from .paged_backends import check_dtype, kv_pages
from .torch_attention import SourceAttentionDescriptor, batch_counts

if TYPE_CHECKING:
    from ..shim.interface import KvCacheConfig

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the kernel computes in: float32 exactly, the others with sums in float32."""

_MAX_CONTEXT_LENGTH = 6
"""Where `BatchInfo.serialize()` has the longest sequence that the interface takes."""


@torch.library.custom_op("auto_deploy_ext::triton_paged_cached_attention", mutates_args=("kv_cache",))
def triton_paged_cached_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch_info_host: torch.Tensor,
    cu_seqlen: torch.Tensor,
    cu_num_pages: torch.Tensor,
    seq_len_with_cache: torch.Tensor,
    cache_loc: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """Append to a paged cache and attend over it, for prefill, extend, decode and mixed batches.

    The host gives the counts alone; rows, lengths and pages are read on the device, so nothing has to be mirrored and
    a launch can be captured: of a batch of as many rows and tokens, whatever their lengths.

    Args:
        q: [batch, sequence, heads, dim]; the batch's tokens in order when flattened.
        k: [batch, sequence, kv_heads, dim].
        v: [batch, sequence, kv_heads, dim].
        batch_info_host: int [>= 7] on the host: `BatchInfo.serialize()`.
        cu_seqlen: int32 [>= rows + 1]: where each row's tokens start.
        cu_num_pages: int32 [>= rows + 1]: where each row's pages start.
        seq_len_with_cache: int32 [>= rows]: tokens up to the last new one.
        cache_loc: int32 [>= pages]: page numbers, row after row.
        kv_cache: [pages, 2, kv_heads, tokens_per_block, dim], written in place.
        scale: Factor on the scores; None means dim ** -0.5.

    Returns:
        [batch, sequence, heads, dim] in q's dtype; zero for tokens beyond those that batch_info_host counts.

    Raises:
        TritonMissingError: Triton is not installed.
    """
    counts = batch_counts(batch_info_host)
    num_prefill, prefill_tokens, *_ = counts
    num_rows, num_tokens = sum(counts[0::2]), sum(counts[1::2])
    rows, tokens = (num_prefill, prefill_tokens) if num_prefill else (num_rows, num_tokens)
    return kernels.load("paged_attention").paged_attention(
        q,
        k,
        v,
        kv_cache,
        cu_seqlen,
        cu_num_pages,
        seq_len_with_cache,
        cache_loc,
        num_rows=num_rows,
        num_tokens=num_tokens,
        longest=-(-tokens // max(rows, 1)),
        max_keys=int(batch_info_host[_MAX_CONTEXT_LENGTH]),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
    )


@triton_paged_cached_attention.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch_info_host: torch.Tensor,
    cu_seqlen: torch.Tensor,
    cu_num_pages: torch.Tensor,
    seq_len_with_cache: torch.Tensor,
    cache_loc: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    return q.new_empty(q.shape)


@AttentionRegistry.register("triton")
class TritonPagedAttention(SourceAttentionDescriptor):
    """Backend `triton`: a paged cache; reads device metadata only."""

    @classmethod
    def get_cached_attention_op(cls) -> Callable:
        """See `triton_paged_cached_attention`."""
        return torch.ops.auto_deploy_ext.triton_paged_cached_attention.default

    @classmethod
    def get_standard_metadata_args(cls) -> list[str]:
        """The counts on the host, everything else on the device."""
        return ["batch_info_host", "cu_seqlen", "cu_num_pages", "seq_len_with_cache", "cache_loc"]

    @classmethod
    def check_device(cls, device: torch.device) -> None:
        """Raise ValueError on a CPU, unless Triton interprets its kernels there, and where it is not installed."""
        kernels.load("paged_attention")
        if device.type == "cpu" and not kernels.are_interpreted():
            raise ValueError(
                "attention backend triton runs on a GPU, but device is cpu: set device: cuda, or attn_backend "
                "(draft_attn_backend) to torch or torch_paged; TRITON_INTERPRET=1 runs it slowly, for tests"
            )

    @classmethod
    def get_cache_initializers(cls, source_attn_node: Node, cache_config: KvCacheConfig) -> ResourceHandlerDict:
        """Keys and values in the same pages.

        Raises:
            TritonMissingError: Triton is not installed.
            ValueError: Keys and values differ in width, or the kernel does not compute in the model's type.
        """
        kernels.load("paged_attention")
        check_dtype("triton", source_attn_node, DTYPES)
        return {"kv_cache": kv_pages("triton", source_attn_node, cache_config)}
