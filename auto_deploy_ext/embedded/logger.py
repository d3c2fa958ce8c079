"""The embedded host's logger: it says which rank speaks, and repeats routine messages on rank 0 only."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any

import torch.distributed as dist

_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "LOCAL_RANK")


def _environment_int(names: tuple[str, ...], default: int) -> int:
    for name in names:
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return default


def get_rank() -> int:
    """The rank of this process: from torch.distributed when it is initialised, else from the launcher's variables."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return _environment_int(_RANK_VARIABLES, 0)


def get_world_size() -> int:
    """How many ranks torch.distributed runs; 1 when it is not initialised."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return 1


class RankLogger(logging.LoggerAdapter):  # type: ignore[type-arg]  # not subscriptable before Python 3.11
    """Adds ``[rank N]`` to messages of ranks above 0, and drops what those ranks say below WARNING."""

    def isEnabledFor(self, level: int) -> bool:
        """Whether a message of this level would be emitted by this rank."""
        return (level >= logging.WARNING or get_rank() == 0) and self.logger.isEnabledFor(level)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Put the rank in front of the message, unless it is rank 0."""
        rank = get_rank()
        return (f"[rank {rank}] {msg}" if rank else msg), kwargs


ad_logger = RankLogger(logging.getLogger("auto_deploy_ext"), {})
