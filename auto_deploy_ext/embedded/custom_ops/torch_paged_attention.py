"""Backend `torch_paged`: attention over a paged cache in plain PyTorch, planned on the host from the host mirrors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.fx import Node

from .attention_descriptor import AttentionRegistry, ResourceHandlerDict
from .paged_backends import kv_pages
from .torch_attention import SourceAttentionDescriptor, batch_counts, grouped_attention

if TYPE_CHECKING:
    from ..shim.interface import KvCacheConfig

K, V = 0, 1
"""Where keys and values lie in dimension 1 of the cache."""


class RowPlan(NamedTuple):
    """What one row of the batch does, in host ints.

    Attributes:
        first_query: Its first token in the flattened batch.
        end_query: One past its last.
        first_page: Its first entry in `cache_loc`.
        end_page: One past its last.
        first_position: Position of its first new token in the sequence.
        num_keys: Cached tokens it attends over, the new ones included.
    """

    first_query: int
    end_query: int
    first_page: int
    end_page: int
    first_position: int
    num_keys: int


def plan_rows(
    batch_info_host: torch.Tensor,
    cu_seqlen_host: torch.Tensor,
    cu_num_pages_host: torch.Tensor,
    last_page_len_host: torch.Tensor,
    seq_len_with_cache_host: torch.Tensor,
    tokens_per_block: int,
) -> list[RowPlan]:
    """Plan each row from the host mirrors alone; the device is neither read nor waited for.

    Args:
        batch_info_host: int [>= 6]: `BatchInfo.serialize()`.
        cu_seqlen_host: int32 [>= rows + 1]: the query ranges.
        cu_num_pages_host: int32 [>= rows + 1]: the page ranges.
        last_page_len_host: int32 [>= rows]: used tokens of each row's last page, which with the number of pages gives
            the number of keys.
        seq_len_with_cache_host: int32 [>= rows]: tokens up to the last new one, which gives the positions.
        tokens_per_block: Tokens in a page.
    """
    num_rows = sum(batch_counts(batch_info_host)[0::2])
    queries = cu_seqlen_host[: num_rows + 1].tolist()
    pages = cu_num_pages_host[: num_rows + 1].tolist()
    last_page_len = last_page_len_host[:num_rows].tolist()
    ends = seq_len_with_cache_host[:num_rows].tolist()
    return [
        RowPlan(
            first_query=queries[row],
            end_query=queries[row + 1],
            first_page=pages[row],
            end_page=pages[row + 1],
            first_position=ends[row] - (queries[row + 1] - queries[row]),
            num_keys=(pages[row + 1] - pages[row] - 1) * tokens_per_block + last_page_len[row],
        )
        for row in range(num_rows)
    ]


@torch.library.custom_op("auto_deploy_ext::torch_paged_cached_attention", mutates_args=("kv_cache",))
def torch_paged_cached_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch_info_host: torch.Tensor,
    cu_seqlen_host: torch.Tensor,
    cu_num_pages_host: torch.Tensor,
    last_page_len_host: torch.Tensor,
    seq_len_with_cache_host: torch.Tensor,
    cache_loc: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """Append to a paged cache and attend over it, for prefill, extend, decode and mixed batches.

    All lengths and ranges come from the host mirrors (see `plan_rows`), as in trtllm, triton_paged and flashinfer: a
    stale mirror makes the op write to or attend over the wrong tokens, and nothing notices. Only the page numbers are
    read on the device. Rows are handled one after the other, so a step costs a few launches per row and never waits.

    Args:
        q: [batch, sequence, heads, dim]; the batch's tokens in order when flattened.
        k: [batch, sequence, kv_heads, dim].
        v: [batch, sequence, kv_heads, dim].
        batch_info_host: See `plan_rows`; this and the next four lie on the host.
        cu_seqlen_host: See `plan_rows`.
        cu_num_pages_host: See `plan_rows`.
        last_page_len_host: See `plan_rows`.
        seq_len_with_cache_host: See `plan_rows`.
        cache_loc: int32 [pages] on the device: page numbers, row after row.
        kv_cache: [pages, 2, kv_heads, tokens_per_block, dim], written in place.
        scale: Factor on the scores; None means dim ** -0.5.

    Returns:
        [batch, sequence, heads, dim] in q's dtype; zero for tokens beyond those of the planned rows.
    """
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    flat_q, flat_k, flat_v, flat_out = (x.flatten(0, 1) for x in (q, k, v, out))
    tokens_per_block = kv_cache.shape[3]
    plan = plan_rows(
        batch_info_host,
        cu_seqlen_host,
        cu_num_pages_host,
        last_page_len_host,
        seq_len_with_cache_host,
        tokens_per_block,
    )
    for row in plan:
        queries = slice(row.first_query, row.end_query)
        new_k, new_v = flat_k[queries], flat_v[queries]
        positions = row.first_position + torch.arange(new_k.shape[0], device=q.device)
        # In range also where a stale mirror says otherwise: wrong numbers, as with the real backends, but no fault.
        entry = (row.first_page + positions // tokens_per_block).clamp(0, cache_loc.shape[0] - 1)
        page = cache_loc[entry].long()
        kv_cache[page, K, :, positions % tokens_per_block] = new_k.to(kv_cache.dtype)
        kv_cache[page, V, :, positions % tokens_per_block] = new_v.to(kv_cache.dtype)

    for row in plan:
        queries = slice(row.first_query, row.end_query)
        pages = cache_loc[row.first_page : row.end_page].long()
        cached = kv_cache[pages].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : max(row.num_keys, 0)]
        new_q = flat_q[queries]
        positions = row.first_position + torch.arange(new_q.shape[0], device=q.device)
        allowed = torch.arange(cached.shape[1], device=q.device) <= positions[:, None]
        attended = grouped_attention(new_q[None], cached[K][None], cached[V][None], allowed[None], scale)
        flat_out[queries] = attended[0]
    return out


@torch_paged_cached_attention.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch_info_host: torch.Tensor,
    cu_seqlen_host: torch.Tensor,
    cu_num_pages_host: torch.Tensor,
    last_page_len_host: torch.Tensor,
    seq_len_with_cache_host: torch.Tensor,
    cache_loc: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    return q.new_empty(q.shape)


@AttentionRegistry.register("torch_paged")
class TorchPagedAttention(SourceAttentionDescriptor):
    """Backend `torch_paged`: a paged cache; plans on the host, so it reads host mirrors."""

    @classmethod
    def get_cached_attention_op(cls) -> Callable:
        """See `torch_paged_cached_attention`."""
        return torch.ops.auto_deploy_ext.torch_paged_cached_attention.default

    @classmethod
    def get_standard_metadata_args(cls) -> list[str]:
        """The plan's mirrors, and the page numbers on the device."""
        return [
            "batch_info_host",
            "cu_seqlen_host",
            "cu_num_pages_host",
            "last_page_len_host",
            "seq_len_with_cache_host",
            "cache_loc",
        ]

    @classmethod
    def get_cache_initializers(cls, source_attn_node: Node, cache_config: KvCacheConfig) -> ResourceHandlerDict:
        """Keys and values in the same pages.

        Raises:
            ValueError: Keys and values differ in width.
        """
        return {"kv_cache": kv_pages("torch_paged", source_attn_node, cache_config)}
