"""Transform `insert_cached_causal_conv`: replaces causal convolutions by a backend's op with a state per sequence."""

from __future__ import annotations

from ...custom_ops import torch_causal_conv  # noqa: F401  (registers the backend)
from ..interface import TransformRegistry
from .insert_cached_attention import InsertCachedOp


@TransformRegistry.register("insert_cached_causal_conv")
class InsertCachedCausalConv(InsertCachedOp):
    """`InsertCachedOp` for the convolutions before an SSM; the backend is `torch_causal_conv` unless told otherwise."""

    default_backend = "torch_causal_conv"
