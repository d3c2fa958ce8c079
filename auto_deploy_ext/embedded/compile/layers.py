"""The launch layer that captures for a device, and who owns the host functions in what it captures."""

from __future__ import annotations

import torch

from ...hostfuncs import HostFuncOwner, OrderedLayer

_owners: dict[torch.device, HostFuncOwner] = {}


def owner_for(device: torch.device) -> HostFuncOwner:
    """The owner of captured graphs on a device: CUDA graphs there, else ordered calls.

    Args:
        device: with its index, as a tensor tells it.
    """
    if device not in _owners:
        if device.type == "cuda":
            from ...hostfuncs.cuda import CudaLayer

            _owners[device] = HostFuncOwner(f"graphs on {device}", CudaLayer(device))
        else:
            _owners[device] = HostFuncOwner(f"graphs on {device}", OrderedLayer())
    return _owners[device]
