"""Compile backend `torch-cudagraph`: makes a model's consumers, or its whole orchestrator, run as device graphs."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.fx import GraphModule

from ...reports.capture import require_capturable
from ...runtime.hooks import find_consumers
from ..transform.graph import replace_module
from .batch_sizes import checked_batch_sizes
from .captured_forward import CapturedForward
from .captured_module import CapturedModule
from .captured_segments import bind_segments

logger = logging.getLogger("auto_deploy_ext")


def capture_model(
    mod: nn.Module,
    cm: Any,
    capture: str = "consumers",
    batch_sizes: Iterable[int] | None = None,
    backend: str = "torch-cudagraph",
) -> tuple[nn.Module, int]:
    """Have decode batches of the listed sizes run as device graphs. Graphs are captured when such batches come.

    Args:
        mod: a wrapper with exported consumers, or a consumer.
        cm: its interface; on a device without graphs, ordered calls take their place.
        capture: `consumers`, `full`, or `segments`: all that lies between two calls of the host, consumers included.
        batch_sizes: numbers of rows; None: powers of two, and the largest batch.
        backend: the name in messages.

    Returns:
        The model to be called from now on, with attribute `captured_batch_sizes`, and how many parts are captured.

    Raises:
        CaptureError: something that is to be captured cannot be.
        ValueError: batch sizes that the interface has no room for.
    """
    sizes = checked_batch_sizes(batch_sizes, cm.info.max_batch_size)
    require_capturable(mod, cm, backend, capture)
    if cm.info.device.type != "cuda":
        logger.info("%s on %s: ordered calls stand in for device graphs, which saves no time", backend, cm.info.device)
    draft_len = int(getattr(mod, "max_draft_len", 0) or cm.info.batch_info.get_max_draft_len())
    if capture == "full":
        CapturedForward.bind(mod, cm, sizes, draft_len)
        count = 1
    else:
        mod, count = _capture_consumers(mod, cm, sizes, draft_len)
        if capture == "segments":
            bind_segments(mod, cm, sizes, draft_len)
    mod.captured_batch_sizes = sizes  # type: ignore[assignment]
    return mod, count


def _capture_consumers(mod: nn.Module, cm: Any, sizes: tuple[int, ...], draft_len: int) -> tuple[nn.Module, int]:
    """Put a CapturedModule in the place of every GraphModule that takes arguments of the interface."""
    names = {*cm.info.available_args, *cm.named_args}
    found = {"": mod} if isinstance(mod, GraphModule) else {p: mod.get_submodule(p) for p in find_consumers(mod)}
    consumers = {id(m): (p, m) for p, m in found.items() if isinstance(m, GraphModule)}
    count = 0
    for path, module in consumers.values():
        if names.intersection(_arguments(module)):
            captured = CapturedModule(module, names, sizes, draft_len, path or type(module).__name__)
            mod = replace_module(mod, module, captured)
            count += 1
    return mod, count


def _arguments(gm: GraphModule) -> tuple[str, ...]:
    return tuple(str(node.target) for node in gm.graph.find_nodes(op="placeholder"))
