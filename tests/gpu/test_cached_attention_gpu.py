"""The Llama scenarios on a GPU: the tokens of the CPU, and no wait for the device in the unpaged backend."""

from typing import Any

import pytest
import torch

from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.generation import generate
from auto_deploy_ext.embedded.pipeline import build_pipeline
from auto_deploy_ext.embedded.tokenizer import ByteTokenizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
OPS = torch.ops.auto_deploy_ext


@pytest.mark.parametrize("name", ["eagle3_llama", "eagle3_llama_paged"])
def test_gpu_generates_the_tokens_of_the_cpu(name: str) -> None:
    results: list[Any] = []
    for device in ("cpu", "cuda"):
        config = load_config(name, overrides={"device": device})
        pipeline = build_pipeline(config)
        assert next(pipeline.model.parameters()).device.type == device
        prompts = [ByteTokenizer().encode(str(prompt)) for prompt in config.prompts]
        results.append(generate(pipeline.model, pipeline.cm, prompts, config.max_new_tokens))
    on_cpu, on_gpu = results
    assert [output.tokens for output in on_gpu.outputs] == [output.tokens for output in on_cpu.outputs]
    assert on_gpu.accepted == on_cpu.accepted


@pytest.mark.parametrize("paged", [False, True])
def test_cached_ops_on_a_gpu_compute_what_they_compute_on_the_cpu_without_waiting(paged: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths, past = [3, 5, 4, 4, 1, 1], [2, 0, 7, 1, 9, 3]
    total = sum(lengths)
    q = torch.randn(1, total, 4, 8, generator=generator)
    k, v = torch.randn(2, 1, total, 2, 8, generator=generator)
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    with_cache = [a + b for a, b in zip(lengths, past, strict=True)]
    pages = [-(-length // 4) for length in with_cache]
    host = {
        "batch_info": torch.tensor([2, 8, 2, 8, 2, 2] + [0] * 7, dtype=torch.int32),
        "cu_seqlen": ends,
        "cu_num_pages": torch.tensor([0, *pages]).cumsum(0).to(torch.int32),
        "last_page_len": torch.tensor([(length - 1) % 4 + 1 for length in with_cache], dtype=torch.int32),
        "seq_len_with_cache": torch.tensor(with_cache, dtype=torch.int32),
    }
    device_only = {
        "seq_len": torch.tensor(lengths, dtype=torch.int32),
        "input_pos": torch.tensor(past, dtype=torch.int32),
        "slot_idx": torch.tensor([5, 0, 3, 1, 2, 4]),
        "cu_seqlen": ends,
        "cache_loc": torch.randperm(sum(pages), generator=generator).to(torch.int32),
    }
    caches = torch.randn(2, 7, 16, 2, 8, generator=generator), torch.randn(sum(pages), 2, 2, 4, 8, generator=generator)

    def run(device: str) -> torch.Tensor:
        tensors = [x.to(device) for x in (q, k, v)]
        on_device = {name: value.to(device) for name, value in device_only.items()}
        unpaged, on_pages = (cache.to(device).clone() for cache in caches)
        previous = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            if paged:
                return OPS.torch_paged_cached_attention(
                    *tensors, *host.values(), on_device["cache_loc"], on_pages, None
                )
            names = ("seq_len", "input_pos", "slot_idx", "cu_seqlen")
            metadata = [on_device[name] for name in names]
            return OPS.torch_cached_attention(*tensors, host["batch_info"], *metadata, unpaged[0], unpaged[1], None)
        finally:
            torch.cuda.set_sync_debug_mode(previous)

    torch.testing.assert_close(run("cuda").cpu(), run("cpu"), atol=2e-5, rtol=1e-5)
