"""Makes PyTorch raise where the host would wait for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def synchronising_is_an_error() -> Iterator[None]:
    """While active, what waits for a CUDA device raises, as far as PyTorch's debug mode sees it."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
