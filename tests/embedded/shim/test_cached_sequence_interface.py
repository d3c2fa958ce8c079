"""CachedSequenceInterface: metadata and caches under one roof."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from auto_deploy_ext.embedded.custom_ops.attention_interface import (
    KVPagedResourceHandler,
    StateResourceHandler,
    UnpagedResourceHandler,
)
from auto_deploy_ext.embedded.shim.interface import (
    CachedSequenceInterface,
    HybridCacheManager,
    KvCacheConfig,
    KvCacheManager,
)


def interface(**kwargs: Any) -> CachedSequenceInterface:
    arguments: dict[str, Any] = {
        "max_seq_len": 16,
        "max_batch_size": 4,
        "max_num_tokens": 32,
        "device": "cpu",
        "kv_cache_config": KvCacheConfig(tokens_per_block=4),
    }
    return CachedSequenceInterface(**(arguments | kwargs))


def test_cache_config_defaults_and_extras() -> None:
    config = KvCacheConfig(enable_block_reuse=True)
    assert (config.tokens_per_block, config.dtype, config.free_gpu_memory_fraction) == (32, "auto", 0.9)
    assert config.max_tokens is None
    assert config.enable_block_reuse is True
    with pytest.raises(ValidationError, match="tokens_per_block"):
        KvCacheConfig(tokens_per_block=0)


def test_limits_come_from_the_arguments() -> None:
    csi = interface(vocab_size_padded=128)
    assert (csi.max_seq_len, csi.max_batch_size, csi.max_num_tokens) == (16, 4, 32)
    assert csi.info.tokens_per_block == 4
    assert csi.info.vocab_size_padded == 128
    assert csi.device == torch.device("cpu")


@pytest.mark.parametrize("spec", [{"max_draft_len": 3}, SimpleNamespace(max_draft_len=3)])
def test_draft_length_reaches_the_batch_info(spec: Any) -> None:
    assert interface(spec_config=spec).info.batch_info.get_max_draft_len() == 3
    assert interface().info.batch_info.get_max_draft_len() == 0


def test_arguments_are_metadata_then_caches() -> None:
    csi = interface()
    csi.info.activate_arg("seq_len_host")
    csi.add_resource("state", StateResourceHandler(2, dtype=torch.float32))
    csi.initialize_resources()
    assert list(csi.named_args) == ["input_ids", "position_ids", "seq_len_host", "state"]
    assert [tuple(arg.shape) for arg in csi.args] == [(4, 1), (4, 1), (4,), (5, 2)]
    assert csi.args[-1] is csi.get_arg("state")
    csi.info.set_example_sequence([[1, 2], [3, 4]])
    assert csi.get_arg("input_ids", unflatten=False).tolist() == [1, 2, 3, 4]
    assert csi.get_arg("seq_len", truncate=True).tolist() == [2, 2]
    with pytest.raises(ValueError, match="unknown argument 'stat'; did you mean 'state'"):
        csi.get_arg("stat")


def test_resource_names_are_unique() -> None:
    csi = interface()
    handler = UnpagedResourceHandler(2, dtype=torch.float32)
    assert csi.add_resource("cache", handler) == "cache"
    assert csi.add_resource("cache", handler) == "cache_1"
    assert csi.add_resource("cache", handler) == "cache_2"
    assert csi.add_resource("seq_len", handler) == "seq_len_1"
    assert csi.initialize_resources() == 4
    assert csi.get_arg("cache_2").shape == (5, 16, 2)


def test_pages_serve_a_full_batch_unless_limited() -> None:
    csi = interface()
    csi.add_resource("kv", KVPagedResourceHandler(2, 8, torch.float32))
    assert csi.kv_cache_manager is None
    csi.initialize_resources()
    assert csi.info.num_blocks == csi.kv_cache_manager.num_blocks == 4 * (16 // 4 + 1)
    assert csi.kv_cache_manager.tokens_per_block == 4
    limited = interface(kv_cache_config=KvCacheConfig(tokens_per_block=4, max_tokens=10))
    limited.add_resource("kv", KVPagedResourceHandler(2, 8, torch.float32))
    limited.initialize_resources()
    assert limited.get_arg("kv").shape == (3, 2, 2, 4, 8)


def test_resizing_allocates_paged_caches_anew_and_keeps_the_rest() -> None:
    csi = interface()
    csi.add_resource("kv", KVPagedResourceHandler(2, 8, torch.float32))
    csi.add_resource("state", StateResourceHandler(2, dtype=torch.float32))
    csi.initialize_resources()
    csi.get_arg("kv").fill_(1)
    csi.get_arg("state").fill_(1)
    assert csi.resize(7) == 7
    assert csi.info.num_blocks == 7
    assert csi.get_arg("kv").shape == (7, 2, 2, 4, 8) and not csi.get_arg("kv").any()
    assert csi.get_arg("state").all()
    assert list(csi.named_args)[-2:] == ["kv", "state"]
    assert csi.kv_cache_manager.get_resource("kv") is csi.get_arg("kv")
    csi.get_arg("kv").fill_(1)
    assert csi.resize(7) == 7 and csi.get_arg("kv").all(), "the same size changes nothing"
    assert csi.resize() == 20, "on the CPU what a full batch needs"
    with pytest.raises(ValueError, match="at least one page, got 0"):
        csi.resize(0)


def test_uniform_caches_can_be_required() -> None:
    for uniform in (False, True):
        csi = interface(requires_uniform_kv_caches=uniform)
        csi.add_resource("kv_0", KVPagedResourceHandler(2, 8, torch.float32))
        csi.add_resource("kv_1", KVPagedResourceHandler(2, 8, torch.float32))
        assert csi.initialize_resources() == 2
        csi.add_resource("kv_2", KVPagedResourceHandler(1, 8, torch.float32))
        if uniform:
            with pytest.raises(ValueError, match=r"kv_0: 2 heads of 8.*kv_2: 1 heads of 8"):
                csi.initialize_resources()
        else:
            assert csi.initialize_resources() == 3


def test_manager_is_hybrid_when_states_are_cached() -> None:
    plain, hybrid = interface(), interface()
    plain.add_resource("kv", KVPagedResourceHandler(2, 8, torch.float32))
    hybrid.add_resource("state", StateResourceHandler(2, dtype=torch.float32))
    plain.initialize_resources()
    hybrid.initialize_resources()
    assert type(plain.kv_cache_manager) is KvCacheManager
    assert type(hybrid.kv_cache_manager) is HybridCacheManager
    with pytest.raises(KeyError, match="unknown resource 'stat'; did you mean 'state'"):
        hybrid.kv_cache_manager.get_resource("stat")
    with pytest.raises(TypeError):
        hybrid.kv_cache_manager.resources["other"] = torch.zeros(1)


def test_states_of_the_last_accepted_token_are_promoted_for_extend_rows() -> None:
    csi = interface()
    csi.add_resource("ssm_state_0", StateResourceHandler(1, dtype=torch.float32))
    csi.add_resource("intermediate_ssm_state_0", StateResourceHandler(3, 1, dtype=torch.float32))
    csi.add_resource("lonely_state", StateResourceHandler(1, dtype=torch.float32))
    csi.initialize_resources()
    states, per_token = csi.get_arg("ssm_state_0"), csi.get_arg("intermediate_ssm_state_0")
    per_token.copy_(torch.arange(15).view(5, 3, 1))
    states.fill_(-1)
    csi.info.set_example_sequence(
        [[1, 2], [1, 2, 3], [1, 2, 3], [1]],
        input_pos=[0, 4, 4, 4],
        batch_info=[1, 2, 2, 6, 1, 1],
        slot_idx=[0, 3, 1, 2],
    )
    csi.kv_cache_manager.update_mamba_states(csi.get_arg("slot_idx")[:4], torch.tensor([1, 3, 1, 1]))
    assert states.flatten().tolist() == [-1, 3 * 1 + 0, -1, 3 * 3 + 2, -1]
    assert not csi.get_arg("lonely_state").any()


def test_promotion_without_extend_rows_does_nothing() -> None:
    csi = interface()
    csi.add_resource("s", StateResourceHandler(1, dtype=torch.float32))
    csi.add_resource("intermediate_s", StateResourceHandler(3, 1, dtype=torch.float32))
    csi.initialize_resources()
    csi.get_arg("intermediate_s").fill_(5)
    csi.kv_cache_manager.update_mamba_states(csi.get_arg("slot_idx")[:4], torch.tensor([1, 1, 1, 1]))
    assert not csi.get_arg("s").any()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_everything_moves_to_the_device() -> None:
    csi = interface()
    csi.add_resource("kv", KVPagedResourceHandler(2, 8, torch.float32))
    csi.initialize_resources()
    csi.get_arg("kv").fill_(1)
    csi.to("cuda")
    assert all(arg.device.type == "cuda" for arg in csi.args)
    assert csi.get_arg("kv").all()
    assert csi.resize() == 20, "little memory is asked for, so what a full batch needs fits"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_pages_are_limited_by_the_free_memory() -> None:
    config = KvCacheConfig(tokens_per_block=1, free_gpu_memory_fraction=1e-9)
    csi = interface(device="cuda", kv_cache_config=config)
    csi.add_resource("kv", KVPagedResourceHandler(1, 1, torch.float32))
    free, _ = torch.cuda.mem_get_info()
    assert csi.resize() == pytest.approx(free * 1e-9 / 8, abs=2)
