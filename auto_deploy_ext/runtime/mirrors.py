"""Transfers: what one device-to-host copy of metadata moved, and a recorder that lists them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


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
    from auto_deploy_ext.runtime.host_mirrors import observers

    transfers: list[Transfer] = []
    observer = transfers.append
    observers(info).append(observer)
    try:
        yield transfers
    finally:
        # By identity: two open recorders whose lists are equal have equal bound methods.
        known = observers(info)
        del known[next(i for i, other in enumerate(known) if other is observer)]
