"""One small guided pipeline with a vision encoder for all tests, and what makes requests for it."""

from __future__ import annotations

import pytest
import torch

from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.guided import Vocabulary
from auto_deploy_ext.embedded.pipeline import Pipeline, build_pipeline
from auto_deploy_ext.hostfuncs import OrderedLayer, ThreadStreams
from tests.bounded import bounded

__all__ = ["bounded"]

VOCAB_SIZE, EOS, IMAGE = 258, 256, 257
OVERRIDES = {
    "model_kwargs.num_hidden_layers": 2,
    "speculative_config.eagle3_layers_to_capture": [0, 1],
    "speculative_model_kwargs.num_captured_layers": 2,
    "max_batch_size": 4,
    "max_num_tokens": 128,
    "max_seq_len": 160,
}


@pytest.fixture(scope="session")
def pipeline() -> Pipeline:
    return build_pipeline(load_config("guided_vlm", overrides=OVERRIDES))


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return Vocabulary.of_bytes(VOCAB_SIZE, EOS)


@pytest.fixture(params=["ordered", "threads"])
def layer(request):
    if request.param == "ordered":
        yield OrderedLayer()
        return
    layer = ThreadStreams()
    yield layer
    layer.close()


@pytest.fixture
def image():
    """A function that makes the image of a number, with sides in patches."""

    def make(number: int, height: int = 2, width: int = 2) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(3, 8 * height, 8 * width, generator=generator)

    return make
