"""Saves an interface's state, lets tracing change it, and puts it back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from auto_deploy_ext.runtime.host_mirrors import tracked_state


@contextlib.contextmanager
def preserved(interface: Any) -> Iterator[None]:
    """Restore `interface` on exit, also after an error: metadata buffers, mirrors, batch info and plain attributes.

    Caches are not saved; tracing runs no model, so it writes none.

    Args:
        interface: a CachedSequenceInterface of any host.
    """
    info = interface.info
    owned = [info, info._input_buffer, info.batch_info, *tracked_state(info)]
    passive = [interface, *(v for v in vars(interface).values() if _is_plain_object(v) and not _among(v, owned))]
    attributes = [(obj, _copy_containers(vars(obj))) for obj in (*owned, *passive) if hasattr(obj, "__dict__")]
    tensors = [(t, t.clone()) for t in _tensors_of(owned)]
    try:
        yield
    finally:
        for obj, fields in attributes:
            vars(obj).clear()
            vars(obj).update(_copy_containers(fields))
        for tensor, saved in tensors:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(saved)


def _among(value: Any, objects: list[Any]) -> bool:
    return any(value is obj for obj in objects)


def _is_plain_object(value: Any) -> bool:
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (type, torch.Tensor, torch.nn.Module))
        and not callable(value)
    )


def _copy_containers(fields: dict[str, Any]) -> dict[str, Any]:
    return {k: v.copy() if isinstance(v, (dict, list, set)) else v for k, v in fields.items()}


def _tensors_of(objects: list[Any]) -> list[torch.Tensor]:
    """The tensors that the objects hold directly or in their containers, one for each storage and extent."""
    found: dict[tuple[int, int, int], torch.Tensor] = {}
    pending: list[Any] = [value for obj in objects for value in getattr(obj, "__dict__", {}).values()]
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            found[(value.untyped_storage().data_ptr(), int(value.storage_offset()), value.numel())] = value
        elif isinstance(value, dict):
            pending.extend(value.values())
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
    return list(found.values())
