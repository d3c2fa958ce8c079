"""Fixtures of the metadata tests: every one runs on the CPU, and on CUDA where there is one."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(
    params=["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)
