"""Backend `flashinfer`: FlashInfer's paged attention, planned once per forward from the host mirrors."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.fx import Graph, Node

from ... import kernels
from .attention_descriptor import AttentionRegistry, Constant, PrepareMetadataInfo, ResourceHandlerDict
from .flashinfer_planner import Mirrors, PlanGeometry, known_planner, load_flashinfer, planner, planner_for, run
from .paged_backends import attention_geometry, backend_option, check_dtype, kv_pages
from .plan_ops import register_plan_op
from .torch_attention import SourceAttentionDescriptor, attention_scale

if TYPE_CHECKING:
    from ..shim.interface import KvCacheConfig

DTYPES = (torch.bfloat16, torch.float16)
"""What FlashInfer's kernels compute in, with sums in float32."""
HEAD_DIMS = (64, 128, 256)
"""Widths of heads that its kernels are made for."""


def flashinfer_plan(
    batch_info_host: torch.Tensor,
    cu_seqlen_host: torch.Tensor,
    cu_num_pages_host: torch.Tensor,
    last_page_len_host: torch.Tensor,
    seq_len_with_cache_host: torch.Tensor,
    cache_loc: torch.Tensor,
    tokens_per_block: int,
    planner_handle: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
) -> torch.Tensor:
    """Plan the attention of one forward, on the host and from host mirrors alone.

    While a stream is being captured nothing is planned: who captures calls this before, and before every replay (see
    `plan_ops`).

    Args:
        batch_info_host: int [>= 6]: `BatchInfo.serialize()`.
        cu_seqlen_host: int32 [max_rows + 1]: the query ranges.
        cu_num_pages_host: int32 [max_rows + 1]: the page ranges.
        last_page_len_host: int32 [max_rows]: used tokens of each row's last page.
        seq_len_with_cache_host: int32 [max_rows]: tokens up to the last new one, which gives the places of new ones.
        cache_loc: int32 [capacity] on the device; only its size and device count.
        tokens_per_block: Tokens in a page.
        planner_handle: Number of the consumer's planner.
        num_heads: Of the queries.
        num_kv_heads: Of keys and values.
        head_dim: Width of a head.
        dtype: Name of the type of queries, keys and values.

    Returns:
        int32 on the device, the same tensor at each call: what the plan's attention reads (see `TableLayout`).

    Raises:
        ImportError: FlashInfer is not installed.
        RuntimeError: a stream is being captured, and nothing of these sizes was planned before.
    """
    geometry = PlanGeometry(num_heads, num_kv_heads, head_dim, tokens_per_block, getattr(torch, dtype))
    max_rows, num_entries, device = last_page_len_host.shape[0], cache_loc.shape[0], cache_loc.device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return known_planner(planner_handle, geometry, max_rows, num_entries, device).table
    return planner_for(planner_handle, geometry, max_rows, num_entries, device).plan(
        Mirrors(batch_info_host, cu_seqlen_host, cu_num_pages_host, last_page_len_host, seq_len_with_cache_host)
    )


# Not by `custom_op`: what that does around each call costs the host more than the plan.
_LIBRARY = torch.library.Library("auto_deploy_ext", "FRAGMENT")
_LIBRARY.define("flashinfer_plan" + torch.library.infer_schema(flashinfer_plan, mutates_args=()))
_LIBRARY.impl("flashinfer_plan", flashinfer_plan, "CompositeExplicitAutograd")


@torch.library.register_fake("auto_deploy_ext::flashinfer_plan")
def _(
    batch_info_host: torch.Tensor,
    cu_seqlen_host: torch.Tensor,
    cu_num_pages_host: torch.Tensor,
    last_page_len_host: torch.Tensor,
    seq_len_with_cache_host: torch.Tensor,
    cache_loc: torch.Tensor,
    tokens_per_block: int,
    planner_handle: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
) -> torch.Tensor:
    return cache_loc.new_empty(4 * last_page_len_host.shape[0])


register_plan_op(torch.ops.auto_deploy_ext.flashinfer_plan, flashinfer_plan)


@torch.library.custom_op("auto_deploy_ext::flashinfer_cached_attention", mutates_args=("kv_cache",))
def flashinfer_cached_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache_loc: torch.Tensor,
    plan: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float | None,
    planner_handle: int,
) -> torch.Tensor:
    """Append to a paged cache and attend over it, for prefill, extend, decode and mixed batches.

    Everything but the page numbers comes from the plan, and so from the host mirrors: a stale one makes the op write to
    or attend over the wrong tokens, within the cache, and nothing notices.

    Args:
        q: [batch, sequence, heads, dim]; the batch's tokens in order when flattened.
        k: [batch, sequence, kv_heads, dim].
        v: [batch, sequence, kv_heads, dim].
        cache_loc: int32 [capacity]: page numbers, row after row.
        plan: What `flashinfer_plan` returned.
        kv_cache: [pages, 2, kv_heads, tokens_per_block, dim], written in place.
        scale: Factor on the scores; None means dim ** -0.5.
        planner_handle: Number of the consumer's planner.

    Returns:
        [batch, sequence, heads, dim] in q's dtype; zero for tokens beyond those of the plan.
    """
    own = planner(planner_handle)
    planned = own.current
    if planned is None:
        return torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    queries, pages, _, ends = planned.parts
    append = kernels.load("paged_attention").append_to_pages if q.is_cuda else append_reference
    append(
        k,
        v,
        kv_cache,
        queries,
        pages,
        ends,
        cache_loc,
        own.indices,
        num_rows=planned.rows,
        num_tokens=planned.tokens,
    )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    attended = run(planned, q.reshape(-1, *q.shape[2:])[: planned.tokens], kv_cache, scale)
    if attended.shape[0] == q.shape[0] * q.shape[1]:
        return attended.view(q.shape)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    out.view(-1, *q.shape[2:])[: planned.tokens] = attended
    return out


@flashinfer_cached_attention.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache_loc: torch.Tensor,
    plan: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float | None,
    planner_handle: int,
) -> torch.Tensor:
    return q.new_empty(q.shape)


def append_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    cu_seqlen: torch.Tensor,
    cu_num_pages: torch.Tensor,
    seq_len_with_cache: torch.Tensor,
    cache_loc: torch.Tensor,
    indices: torch.Tensor,
    *,
    num_rows: int,
    num_tokens: int,
) -> None:
    """What `kernels.paged_attention.append_to_pages` does, in plain PyTorch; see there."""
    page_size = kv_cache.shape[3]
    tokens = torch.arange(num_tokens, device=k.device)
    row = torch.searchsorted(cu_seqlen[1 : num_rows + 1].long(), tokens, right=True).clamp(max=num_rows - 1)
    position = seq_len_with_cache.long()[row] - cu_seqlen.long()[row + 1] + tokens
    entry = (cu_num_pages.long()[row] + position // page_size).clamp(0, cache_loc.shape[0] - 1)
    page = cache_loc[entry].long().clamp(0, kv_cache.shape[0] - 1)
    written = position >= 0
    place = (page[written], slice(None), position[written] % page_size)
    for side, new in enumerate((k, v)):
        flat = new.flatten(0, 1)[:num_tokens][written]
        kv_cache[:, side][place] = flat.to(kv_cache.dtype)
    used = int(cu_num_pages[num_rows])
    indices[:used] = cache_loc[:used].clamp(0, kv_cache.shape[0] - 1)


# -- the descriptor ----------------------------------------------------------------------------------------------------

_numbers = itertools.count(1)
_handles: weakref.WeakKeyDictionary[Graph, int] = weakref.WeakKeyDictionary()


def planner_handle(graph: Graph) -> int:
    """The number of a graph's planner; graphs are numbered in the order in which they are first asked for."""
    if graph not in _handles:
        _handles[graph] = next(_numbers)
    return _handles[graph]


@AttentionRegistry.register("flashinfer")
class FlashInferAttention(SourceAttentionDescriptor):
    """Backend `flashinfer`: a paged cache; plans on the host, so it reads host mirrors, but only for the plan."""

    @classmethod
    def get_cached_attention_op(cls) -> Callable:
        """See `flashinfer_cached_attention`."""
        return torch.ops.auto_deploy_ext.flashinfer_cached_attention.default

    @classmethod
    def get_standard_metadata_args(cls) -> list[str]:
        """The page numbers; all else comes through the plan."""
        return ["cache_loc"]

    @classmethod
    def get_prepare_extra_metadata_info(cls, any_source_attn_node: Node) -> PrepareMetadataInfo:
        """See `flashinfer_plan`.

        Raises:
            ImportError: FlashInfer or Triton is not installed.
            ValueError: FlashInfer has no kernel for the model's type or head width, or layers differ, which one plan
                cannot serve.
        """
        load_flashinfer()
        kernels.load("paged_attention")
        check_dtype("flashinfer", any_source_attn_node, DTYPES)
        geometry = attention_geometry(any_source_attn_node)
        option = backend_option(any_source_attn_node)
        if geometry.head_dim not in HEAD_DIMS:
            raise ValueError(
                f"{option}: flashinfer has kernels for heads of width {', '.join(map(str, HEAD_DIMS))}, but the "
                f"model's are {geometry.head_dim} wide: set {option} to triton or torch_paged"
            )
        layers = [node for node in any_source_attn_node.graph.nodes if node.target is any_source_attn_node.target]
        if any(attention_geometry(node) != geometry for node in layers):
            raise ValueError(
                f"{option}: flashinfer plans once per forward, but the layers' heads differ in number or width: set "
                f"{option} to triton or torch_paged"
            )
        handle = planner_handle(any_source_attn_node.graph)
        constants: list[Constant] = [handle, *geometry[:3], str(geometry.dtype).removeprefix("torch.")]
        return torch.ops.auto_deploy_ext.flashinfer_plan.default, 1, constants

    @classmethod
    def get_cache_initializers(cls, source_attn_node: Node, cache_config: KvCacheConfig) -> ResourceHandlerDict:
        """Keys and values in the same pages.

        Raises:
            ValueError: Keys and values differ in width, or the cache's type is not the model's.
        """
        pages = kv_pages("flashinfer", source_attn_node, cache_config)
        dtype = attention_geometry(source_attn_node).dtype
        if pages.dtype != dtype:
            raise ValueError(
                f"{backend_option(source_attn_node)}: flashinfer needs a cache of the model's dtype, {dtype}, but "
                f"kv_cache_config.dtype is {cache_config.dtype}: set it to auto"
            )
        return {"kv_cache": pages}

    @classmethod
    def get_constants(cls, source_attn_node: Node) -> list[Constant]:
        """scale, and the planner's number."""
        return [attention_scale(source_attn_node), planner_handle(source_attn_node.graph)]

    @classmethod
    def plans_before_capture(cls) -> bool:
        """The plan is an op of its own, see `plan_ops`."""
        return True
