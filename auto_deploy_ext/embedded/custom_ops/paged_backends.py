"""What the attention backends with a paged cache have in common: their caches, and what they refuse at build time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.fx import Node

from .resource_handlers import KVPagedResourceHandler
from .torch_attention import cached_heads

if TYPE_CHECKING:
    from ..shim.interface import KvCacheConfig


class AttentionGeometry(NamedTuple):
    """The sizes of one layer's attention, and the type of its queries."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


def attention_geometry(source_attn_node: Node) -> AttentionGeometry:
    """The geometry of a `torch_attention` node with shapes in `meta["val"]`."""
    query, key = (node.meta["val"] for node in source_attn_node.args[:2])  # type: ignore[union-attr]
    return AttentionGeometry(int(query.shape[2]), int(key.shape[2]), int(query.shape[3]), query.dtype)


def backend_option(source_attn_node: Node) -> str:
    """The config's field that chose the backend of this node's graph."""
    role = getattr(source_attn_node.graph.owning_module, "role", None)
    return "draft_attn_backend" if role == "draft" else "attn_backend"


def check_dtype(backend: str, source_attn_node: Node, dtypes: Sequence[torch.dtype]) -> None:
    """Check that a backend computes in the model's type.

    Raises:
        ValueError: it does not; the message names the field that chose the backend, and the model's dtype.
    """
    dtype = attention_geometry(source_attn_node).dtype
    if dtype not in dtypes:
        names = [_name(known) for known in dtypes]
        option = backend_option(source_attn_node)
        raise ValueError(
            f"{option}: {backend} computes in {' or '.join(names)}, but the model's dtype is {_name(dtype)}: "
            f"set dtype: {names[0]}, or {option} to a backend that computes in {_name(dtype)} (torch_paged does)"
        )


def kv_pages(backend: str, source_attn_node: Node, cache_config: KvCacheConfig) -> KVPagedResourceHandler:
    """The handler of a cache with a layer's keys and values in the same pages.

    Raises:
        ValueError: keys and values differ in width.
    """
    heads, dim, v_dim, dtype = cached_heads(source_attn_node, cache_config)
    if dim != v_dim:
        raise ValueError(f"{backend} keeps keys of width {dim} and values of width {v_dim} in one page; use torch")
    return KVPagedResourceHandler(heads, dim, dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
