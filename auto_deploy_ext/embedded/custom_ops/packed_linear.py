"""A linear layer whose weight is kept in oneDNN's packed form: on a CPU, a few tokens cost hardly more than one.

BLAS packs the weight anew in every call with more than one row, which takes about as long as reading it. A step that
verifies four tokens would so cost twice what a step of one token costs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakIdKeyDictionary


class _Packed(NamedTuple):
    """A packed weight, and what the weight was then: its memory (which is not kept alive), its version, the rows."""

    memory: StorageWeakRef
    version: int
    tokens: int
    value: torch.Tensor

    def is_of(self, weight: torch.Tensor, tokens: int) -> bool:
        """Whether the weight has neither been written nor been given other memory, as `nn.Module.to` does."""
        same = self.memory.cdata == weight.untyped_storage()._cdata
        return same and self.version == weight._version and self.tokens == tokens


_packed: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""From a weight to its `_Packed`."""

torch.library.define("auto_deploy_ext::packed_linear", "(Tensor x, Tensor weight, Tensor? bias, int tokens) -> Tensor")


def is_available() -> bool:
    """Whether this build of PyTorch has oneDNN's operators."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@torch.library.impl("auto_deploy_ext::packed_linear", "CPU")
def packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tokens: int) -> torch.Tensor:
    """Compute ``x @ weight.T + bias``; the weight is packed by the first call, and again after it was written.

    Writing through ``weight.data`` is not noticed, as torch does not count that.

    Args:
        x: [..., in] float32 on the CPU, any number of rows.
        weight: [out, in] float32; stays as it is, so packing takes as much memory again. Not packed if it was made in
            inference mode, where torch counts no writes.
        bias: [out] or None.
        tokens: The number of rows to pack for; other numbers work, too.

    Returns:
        [..., out].
    """
    if weight.is_inference():
        return torch.nn.functional.linear(x, weight, bias)
    entry = _packed.get(weight)
    if entry is None or not entry.is_of(weight, tokens):
        value = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), tokens)
        entry = _Packed(StorageWeakRef(weight.untyped_storage()), weight._version, tokens, value)
        _packed[weight] = entry
    return torch.ops.mkldnn._linear_pointwise(x, entry.value, bias, "none", [], "")


@torch.library.register_fake("auto_deploy_ext::packed_linear")
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tokens: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])
