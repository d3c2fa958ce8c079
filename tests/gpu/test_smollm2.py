"""On a GPU: rejection sampling follows the target, and a GGUF file decodes as transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.generation import generate
from auto_deploy_ext.embedded.models import gguf_cache
from auto_deploy_ext.embedded.models.custom.rejection_sampling import (
    draw,
    in_target_vocabulary,
    probabilities,
    verify,
)
from auto_deploy_ext.embedded.models.sources import resolve_source
from auto_deploy_ext.embedded.pipeline import Pipeline, build_pipeline
from auto_deploy_ext.orchestrator.dispatch import original_forward
from tests.embedded.models.tiny_gguf import write_gguf

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def sampling(compiled: str) -> Pipeline:
    values: dict[str, Any] = {
        "device": "cuda",
        "temperature": 0.8,
        "attn_backend": "triton",
        "draft_attn_backend": "triton",
        "compile_backend": compiled,
        "speculative_model_kwargs.draft_vocab_size": 100,
    }
    if compiled == "torch-cudagraph":
        values |= {"transforms.compile_model.capture": "consumers"}
        values |= {"transforms.compile_model.cuda_graph_batch_sizes": [4]}
    return build_pipeline(load_config("eagle3_llama_paged", overrides=values))


def test_positions_follow_the_target_on_the_device():
    torch.manual_seed(0)
    rows, d2t = 200_000, torch.tensor([1, 1, 3], device="cuda")
    target = probabilities(torch.randn(3, 7, device="cuda"), 1.0).expand(rows, -1, -1)
    narrow = probabilities(torch.randn(2, 3, device="cuda"), 1.0).expand(rows, -1, -1)
    drafted = draw(narrow)
    drafted = drafted + d2t[drafted.long()].int()
    tokens = verify(target, in_target_vocabulary(narrow, d2t, 7), drafted)
    for position in range(3):
        share = torch.bincount(tokens[:, position].long(), minlength=7) / rows
        assert torch.allclose(share, target[0, position], atol=0.006), (position, share, target[0, position])


@pytest.mark.parametrize("compiled", ["torch-simple", "torch-cudagraph"])
def test_a_seed_means_the_same_tokens_with_and_without_the_pass(compiled):
    pipeline = sampling(compiled)
    prompts = [[3, 1, 4, 1], [5, 9], [2, 6, 5], [3, 5, 8, 9, 7]]

    def tokens() -> list[tuple[int, ...]]:
        torch.manual_seed(5)
        result = generate(pipeline.model, pipeline.cm, prompts, 24)
        assert 1.0 < result.acceptance_length < 4.0, result.accepted
        return [output.tokens for output in result.outputs]

    first, again = tokens(), tokens()
    with original_forward(pipeline.model):
        original = tokens()
    assert first == again, (first, again)
    assert first == original, (first, original)


def test_a_gguf_file_decodes_as_transformers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(gguf_cache.CACHE_VARIABLE, str(tmp_path))
    write_gguf(tmp_path / "tiny.gguf")
    directory = resolve_source(str(tmp_path / "tiny.gguf")).directory
    values = {
        "device": "cuda",
        "model": str(tmp_path / "tiny.gguf"),
        "model_kwargs": {},
        "speculative_config.decoding_type": "Eagle3",
        "speculative_model_kwargs": {"draft_vocab_size": 64, "own_lm_head": False},
        "attn_backend": "triton",
    }
    pipeline = build_pipeline(load_config("default", overrides=values))
    model = AutoModelForCausalLM.from_pretrained(directory).cuda().eval()
    prompt = [1, 30, 40, 50, 60]
    ids = torch.tensor([prompt], device="cuda")
    expected = model.generate(ids, do_sample=False, max_new_tokens=24)[0, len(prompt) :].tolist()
    result = generate(pipeline.model, pipeline.cm, [prompt], 24, eos_token_ids=[2])
    assert list(result.outputs[0].tokens) == expected, (result.outputs[0].tokens, expected)
