"""AttentionDescriptor, AttentionRegistry and what resource handlers allocate."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch._ops import OpOverloadPacket
from torch.fx import Graph, Node

from auto_deploy_ext.embedded.custom_ops.attention_interface import (
    AttentionDescriptor,
    AttentionRegistry,
    KVPagedResourceHandler,
    ResourceHandlerDict,
    SequenceInfo,
    StateResourceHandler,
    UnpagedResourceHandler,
)
from auto_deploy_ext.embedded.shim.interface import KvCacheConfig


class ScaledDot(AttentionDescriptor):
    @classmethod
    def get_attention_layout(cls) -> str:
        return "bsnd"

    @classmethod
    def get_num_qkv_args(cls) -> int:
        return 3

    @classmethod
    def get_source_attention_op(cls) -> OpOverloadPacket:
        return torch.ops.aten.scaled_dot_product_attention

    @classmethod
    def get_cached_attention_op(cls) -> Callable:
        return torch.ops.aten.scaled_dot_product_attention

    @classmethod
    def get_standard_metadata_args(cls) -> list[str]:
        return ["batch_info_host"]

    @classmethod
    def get_cache_initializers(cls, source_attn_node: Node, cache_config: KvCacheConfig) -> ResourceHandlerDict:
        return {"kv_cache": KVPagedResourceHandler(2, 8, torch.float32)}


@pytest.fixture
def registered() -> Iterator[None]:
    AttentionRegistry.register("scaled_dot_test")(ScaledDot)
    yield
    del AttentionRegistry._registry["scaled_dot_test"]


def test_backends_are_found_by_name(registered: None) -> None:
    assert AttentionRegistry.has("scaled_dot_test")
    assert AttentionRegistry.get("scaled_dot_test") is ScaledDot
    assert not AttentionRegistry.has("scaled")


def test_unknown_backend_suggests_the_nearest(registered: None) -> None:
    with pytest.raises(ValueError, match="unknown attention backend 'scaled_dottest'; did you mean 'scaled_dot_test'"):
        AttentionRegistry.get("scaled_dottest")


def test_names_are_taken_once(registered: None) -> None:
    assert AttentionRegistry.register("scaled_dot_test")(ScaledDot) is ScaledDot
    with pytest.raises(ValueError, match="'scaled_dot_test' is registered already, as ScaledDot"):
        AttentionRegistry.register("scaled_dot_test")(type("Other", (ScaledDot,), {}))


def test_a_descriptor_needs_no_constants_extra_metadata_or_host_function() -> None:
    node = Graph().placeholder("q")
    assert ScaledDot.get_constants(node) == []
    assert ScaledDot.get_prepare_extra_metadata_info(node) == (None, 0, [])
    assert ScaledDot.get_host_prepare_metadata_function() is None


def test_an_incomplete_descriptor_names_what_it_lacks() -> None:
    assert AttentionDescriptor.__abstractmethods__ == {
        "get_attention_layout",
        "get_num_qkv_args",
        "get_source_attention_op",
        "get_cached_attention_op",
        "get_standard_metadata_args",
        "get_cache_initializers",
    }


def test_handlers_allocate_zeroed_caches_on_the_device(device: torch.device) -> None:
    info = SequenceInfo(max_seq_len=10, max_batch_size=3, max_num_tokens=16, tokens_per_block=4).to(device)
    info.update_cache_information(7)
    caches = {
        (7, 2, 5, 4, 8): KVPagedResourceHandler(5, 8, torch.float16).allocate(info),
        (4, 10, 5, 8): UnpagedResourceHandler(5, 8, dtype=torch.float32).allocate(info),
        (4, 6, 2): StateResourceHandler(6, 2, dtype=torch.bfloat16).allocate(info),
    }
    for shape, cache in caches.items():
        assert cache.shape == shape
        assert cache.device.type == device.type
        assert not cache.any()
    assert [cache.dtype for cache in caches.values()] == [torch.float16, torch.float32, torch.bfloat16]


def test_a_pages_size_counts_keys_and_values() -> None:
    assert KVPagedResourceHandler(5, 8, torch.float16).bytes_per_block(4) == 2 * 5 * 4 * 8 * 2
