"""Settings for all tests: one thread per process, because the suite runs in a process per core."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
