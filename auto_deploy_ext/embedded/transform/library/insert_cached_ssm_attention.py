"""Transform `insert_cached_ssm_attention`: replaces the SSM source op by a backend's op with a state per sequence."""

from __future__ import annotations

from ...custom_ops import torch_ssm  # noqa: F401  (registers the backend)
from ..interface import TransformRegistry
from .insert_cached_attention import InsertCachedOp


@TransformRegistry.register("insert_cached_ssm_attention")
class InsertCachedSSMAttention(InsertCachedOp):
    """`InsertCachedOp` for Mamba2's recurrence; the backend is `torch_ssm` unless others are registered."""

    default_backend = "torch_ssm"
