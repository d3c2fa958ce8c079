"""A batch that was moved on the device after it was staged, and how the host catches up without a copy.

With overlap scheduling the lengths of a batch depend on what the step before it accepts. `nest_sequences` moves the
rows on the device and no mirror. Whoever knows the offset on the host earlier than a copy of the mirrors could be there
announces it; where a consumer then reads a mirror that only this offset has made stale, the host repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from auto_deploy_ext.runtime import host_mirrors, replay, sanitizer
from auto_deploy_ext.runtime.mirrors import Transfer

_ATTRIBUTE = "_late_offset"
_MUTATION = "offset_pos_and_cache_"
TRIGGER = "offset_with_new_lens_"


@dataclass(frozen=True)
class LateOffset:
    """An offset that the device has applied already.

    Attributes:
        operand: gives it, ``[n]`` int32 on the host, and whether it had to be waited for.
        staged: the versions of the mirrors that it has made stale, as they were staged.
        moved: the versions of their buffers after it.
    """

    operand: Callable[[], tuple[torch.Tensor, bool]]
    staged: dict[str, int]
    moved: dict[str, int]


def announce(info: Any, written: Collection[str], operand: Callable[[], tuple[torch.Tensor, bool]]) -> None:
    """Note right after `nest_sequences` that it moved the batch by an offset that the host will know.

    Args:
        info: a SequenceInfo whose buffer keeps versions.
        written: names of the buffers that the offset wrote, of which those count whose mirrors are stale.
        operand: see `LateOffset`.
    """
    buffer = info._input_buffer
    names = set(written).intersection(host_mirrors.stale_names(info))
    staged = {name: buffer.mirror_version[name] for name in names}
    moved = {name: buffer.device_version[name] for name in names}
    setattr(info, _ATTRIBUTE, LateOffset(operand, staged, moved))


def withdraw(info: Any) -> None:
    """Forget what was announced: the batch is another one now."""
    vars(info).pop(_ATTRIBUTE, None)


def settle(info: Any, names: Collection[str]) -> None:
    """Repeat an announced offset on the mirrors, if one of these is stale by nothing else; all of them are fresh then.

    Args:
        info: a CachedSequenceInterface or a SequenceInfo.
        names: buffers whose mirrors are about to be read.
    """
    info = getattr(info, "info", info)
    late: LateOffset | None = vars(info).get(_ATTRIBUTE)
    if late is None or late.moved.keys().isdisjoint(names):
        return
    withdraw(info)
    buffer = info._input_buffer
    if any(buffer.device_version[name] != version for name, version in late.moved.items()):
        return  # something else was written meanwhile, from which the old values cannot be told apart
    if any(buffer.mirror_version[name] != version for name, version in late.staged.items()):
        return
    offset, waited = late.operand()
    transfer = Transfer((TRIGGER,), offset.numel() * offset.element_size(), waited, TRIGGER)
    for observer in list(host_mirrors.observers(info)):
        observer(transfer)
    with sanitizer.answered_for(buffer):
        replay.replay(info, _MUTATION, late.staged, lambda: offset)
