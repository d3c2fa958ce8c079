"""A linear layer whose weight is kept in oneDNN's packed form: on a CPU, a few tokens cost hardly more than one.

BLAS packs the weight anew in every call with more than one row, which takes about as long as reading it. A step that
verifies four tokens would so cost twice what a step of one token costs.
"""

from __future__ import annotations

import torch
from torch.utils.weak import WeakIdKeyDictionary

_packed: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""From a weight to its version when it was packed, the rows it was packed for, and the packed tensor."""

torch.library.define("auto_deploy_ext::packed_linear", "(Tensor x, Tensor weight, Tensor? bias, int tokens) -> Tensor")


def is_available() -> bool:
    """Whether this build of PyTorch has oneDNN's operators."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@torch.library.impl("auto_deploy_ext::packed_linear", "CPU")
def packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tokens: int) -> torch.Tensor:
    """Compute ``x @ weight.T + bias``; the weight is packed by the first call, and again after it was written.

    Args:
        x: [..., in] float32 on the CPU, any number of rows.
        weight: [out, in] float32; stays as it is, so packing takes as much memory again.
        bias: [out] or None.
        tokens: The number of rows to pack for; other numbers work, too.

    Returns:
        [..., out].
    """
    entry = _packed.get(weight)
    if entry is None or entry[0] != weight._version or entry[1] != tokens:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), tokens)
        entry = _packed[weight] = (weight._version, tokens, packed)
    return torch.ops.mkldnn._linear_pointwise(x, entry[2], bias, "none", [], "")


@torch.library.register_fake("auto_deploy_ext::packed_linear")
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tokens: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])
