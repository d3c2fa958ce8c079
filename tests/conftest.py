"""Settings for all tests: one thread per process, a process per core; without a GPU, Triton kernels are interpreted."""

from __future__ import annotations

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
