"""What the commands share: types of arguments, and how many threads they compute with; imports nothing heavy."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager


def positive(text: str) -> int:
    """A whole number of at least 1, as a type for argparse.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from error
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


@contextmanager
def one_thread(wanted: bool) -> Iterator[None]:
    """Compute on one CPU thread inside, if that is wanted and the environment does not say how many."""
    import torch

    before = torch.get_num_threads()
    if wanted and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
