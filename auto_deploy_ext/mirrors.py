"""Transfers: what one device-to-host copy of metadata moved, and a recorder that lists them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

HOST_SUFFIX = "_host"


@dataclass
class Transfer:
    """One device-to-host copy.

    Attributes:
        names: sorted ``_host`` names that were really moved.
        nbytes: bytes moved.
        waited: whether the host waited for the device. For a copy that is started and waited for later it turns
            true at that wait, and stays false when the copy is dropped without one.
        trigger: name of the mutation (or node) that asked for it, ``""`` when unknown.
    """

    names: tuple[str, ...]
    nbytes: int
    waited: bool
    trigger: str = ""


@contextmanager
def record_mirrors(info: Any) -> Iterator[list[Transfer]]:
    """Record every metadata transfer of an interface while the context is open.

    Args:
        info: a SequenceInfo, the embedded host's or AutoDeploy's, or an interface that has one as ``.info``.

    Yields:
        The list that each :class:`Transfer` is appended to, in the order in which they were started.

    Example:
        >>> from auto_deploy_ext.embedded.custom_ops.attention_interface import SequenceInfo
        >>> info = SequenceInfo(max_seq_len=8, max_batch_size=2, max_num_tokens=8)
        >>> _ = info.activate_arg("cu_seqlen_host")
        >>> info.set_example_sequence([[1, 2, 3], [4, 5]])
        >>> with record_mirrors(info) as transfers:
        ...     info.switch_to_generate_(active_args_override={"cu_seqlen_host"})
        >>> transfers
        [Transfer(names=('cu_seqlen_host',), nbytes=12, waited=True, trigger='switch_to_generate_')]
    """
    info = getattr(info, "info", info)
    buffer = info._input_buffer
    transfers: list[Transfer] = []
    if not hasattr(buffer, "transfer_observers"):
        with _record_whole_copies(info, buffer, transfers):
            yield transfers
        return
    observer = transfers.append
    buffer.transfer_observers.append(observer)
    try:
        yield transfers
    finally:
        # By identity: two open recorders whose lists are equal have equal bound methods.
        observers = buffer.transfer_observers
        del observers[next(i for i, known in enumerate(observers) if known is observer)]


@contextmanager
def _record_whole_copies(info: Any, buffer: Any, transfers: list[Transfer]) -> Iterator[None]:
    """Record on a host whose buffer reports nothing: its one copy, of everything, is wrapped on the instance."""
    original = buffer.copy_to_host

    def copy_to_host(non_blocking: bool = False) -> Any:
        result = original(non_blocking=non_blocking)
        names: Sequence[str] = sorted(buffer.tensor_names)
        nbytes = sum(view.numel() * view.element_size() for view in (_moved_view(buffer, name) for name in names))
        trigger = _calling_method(sys._getframe(1), info)
        transfers.append(Transfer(tuple(n + HOST_SUFFIX for n in names), nbytes, not non_blocking, trigger))
        return result

    buffer.copy_to_host = copy_to_host
    try:
        yield
    finally:
        del buffer.copy_to_host


def _moved_view(buffer: Any, name: str) -> Any:
    """Return the view of a buffer that a whole copy moves: current length if truncatable, else the capacity."""
    truncatable = name.startswith("cache_loc")
    return buffer.get_host_view(name, truncate=truncatable)


def _calling_method(frame: FrameType | None, info: Any) -> str:
    """Return the innermost public method of ``info`` on the stack, ``""`` when there is none."""
    while frame is not None:
        name = frame.f_code.co_name
        if frame.f_locals.get("self") is info and not name.startswith("_"):
            return name
        frame = frame.f_back
    return ""
