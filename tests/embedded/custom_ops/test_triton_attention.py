"""Backend `triton` through Triton's interpreter, against backend `torch_paged` on the same metadata."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_deploy_ext.embedded.custom_ops import triton_attention  # noqa: F401  (registers the backend)
from auto_deploy_ext.embedded.custom_ops.attention_interface import AttentionRegistry
from auto_deploy_ext.embedded.shim.interface import KvCacheConfig
from tests.paged_batches import MAX_CONTEXT, PagedBatch, batches, make_batch

pytest.importorskip("triton")

import tests.triton_interpreter  # noqa: F401
from auto_deploy_ext.kernels import paged_attention as kernels

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu compiles the kernels")

#: some 90 terms of about 1 are added in float32, in an order that differs from kernel to kernel and from CPU to CPU.
FLOAT32 = 1e-5


def attend(batch: PagedBatch, splits: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's output and the cache after it."""
    cache = batch.kv_cache.clone()
    counts = batch.batch_info[:6].tolist()
    out = kernels.paged_attention(
        batch.q,
        batch.k,
        batch.v,
        cache,
        batch.cu_seqlen,
        batch.cu_num_pages,
        batch.seq_len_with_cache,
        batch.cache_loc,
        num_rows=sum(counts[0::2]),
        num_tokens=sum(counts[1::2]),
        longest=-(-sum(counts[1::2]) // sum(counts[0::2])),
        max_keys=MAX_CONTEXT,
        scale=0.3,
        num_splits=splits,
    )
    return out, cache


@settings(max_examples=6, deadline=None)
@given(batches(dims=(8, 16, 24)), st.sampled_from([1, 2, 4]))
def test_every_kind_of_batch_gives_the_reference_whatever_the_split(batch: PagedBatch, splits: int) -> None:
    expected, expected_cache = batch.reference(scale=0.3)
    out, cache = attend(batch, splits)
    torch.testing.assert_close(out, expected, atol=FLOAT32, rtol=1e-5)
    assert torch.equal(cache, expected_cache)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_usual_widths_and_types(dim: int, dtype: torch.dtype) -> None:
    batch = make_batch(([3, 3], 0, 2), [90, 35], (8, 2, dim), 32, dtype=dtype)
    expected, expected_cache = batch.reference(scale=0.3)
    out, cache = attend(batch, 2)
    exact = dtype == torch.float32
    torch.testing.assert_close(out, expected, atol=FLOAT32 if exact else 2e-2, rtol=1e-5 if exact else 2e-2)
    assert torch.equal(cache, expected_cache)


def test_a_row_longer_than_a_tile_and_a_row_longer_than_the_host_expects() -> None:
    # Tiles are as tall as the average row; rows of other lengths have to come out right all the same.
    batch = make_batch(([1, 37, 2], 3, 0), [5, 3, 0], (2, 1, 16), 8)
    expected, _ = batch.reference(scale=0.3)
    torch.testing.assert_close(attend(batch, 1)[0], expected, atol=FLOAT32, rtol=1e-5)


def test_a_token_counts_as_what_the_cache_keeps_of_it() -> None:
    batch = make_batch(([3], 1, 0), [4], (2, 1, 16), 8)
    batch.kv_cache = batch.kv_cache.half()
    out, cache = attend(batch)
    rounded = batch.k.half().float(), batch.v.half().float()
    batch.k, batch.v, batch.kv_cache = *rounded, batch.kv_cache.float()
    expected, expected_cache = batch.reference(scale=0.3)
    torch.testing.assert_close(out, expected, atol=FLOAT32, rtol=1e-5)
    assert torch.equal(cache.float(), expected_cache)


def test_what_lies_in_unused_parts_of_the_cache_has_no_influence() -> None:
    batch = make_batch(([2, 1], 1, 0), [3, 6], (2, 1, 16), 8)
    expected, _ = attend(batch)
    poisoned = batch.kv_cache
    used = torch.zeros(poisoned.shape[0], 8, dtype=torch.bool)
    for row, end in enumerate(batch.seq_len_with_cache[:2].tolist()):
        for position in range(end):
            used[batch.cache_loc[batch.cu_num_pages[row] + position // 8], position % 8] = True
    poisoned.permute(0, 3, 1, 2, 4)[~used] = torch.nan
    assert torch.equal(attend(batch)[0], expected)


def test_tokens_beyond_the_batch_are_zero_and_an_empty_batch_is_all_zeros() -> None:
    batch = make_batch(([2, 1], 1, 0), [3, 6], (2, 1, 16), 8)
    batch.batch_info[:6] = torch.tensor([1, 2, 0, 0, 0, 0])
    op = torch.ops.auto_deploy_ext.triton_paged_cached_attention
    rest = (batch.cu_seqlen, batch.cu_num_pages, batch.seq_len_with_cache, batch.cache_loc)
    out = op(batch.q, batch.k, batch.v, batch.batch_info, *rest, batch.kv_cache.clone(), 0.3)
    expected, _ = batch.reference(scale=0.3)
    torch.testing.assert_close(out, expected, atol=FLOAT32, rtol=1e-5)
    assert out[0, 2].abs().max() == 0
    batch.batch_info.zero_()
    assert op(batch.q, batch.k, batch.v, batch.batch_info, *rest, batch.kv_cache, None).abs().max() == 0


def test_appending_writes_what_the_reference_writes_and_copies_page_numbers_in_range() -> None:
    batch = make_batch(([9, 3, 3, 1], 1, 2), [5, 0, 14, 7], (2, 2, 16), 4)
    _, expected = batch.reference()
    batch.cache_loc[-1] = -1  # beyond the last row's pages
    indices = torch.full_like(batch.cache_loc, -7)
    kernels.append_to_pages(
        batch.k,
        batch.v,
        batch.kv_cache,
        batch.cu_seqlen,
        batch.cu_num_pages,
        batch.seq_len_with_cache,
        batch.cache_loc,
        indices,
        num_rows=4,
        num_tokens=16,
    )
    assert torch.equal(batch.kv_cache, expected)
    assert torch.equal(indices[:-1], batch.cache_loc[:-1]) and indices[-1] == -7


def test_nonsense_metadata_stays_within_the_cache() -> None:
    batch = make_batch(([2, 2], 0, 2), [3, 6], (2, 1, 16), 8)
    batch.seq_len_with_cache[0], batch.cu_num_pages[1] = 1_000, -9
    batch.cache_loc[:] = torch.tensor([-5, 99, 1][: len(batch.cache_loc)] + [99] * (len(batch.cache_loc) - 3))
    assert attend(batch, 2)[0].shape == batch.q.shape


def test_tiles_and_splits_are_chosen_from_what_the_host_knows() -> None:
    assert kernels.choose_splits(8, 32768, 64, 132) == 32
    assert kernels.choose_splits(512, 32768, 64, 132) == 1
    assert kernels.choose_splits(1, 1 << 20, 64, 132) == kernels.MAX_SPLITS
    for group in (1, 2, 4, 8, 16, 32):
        for longest in (1, 2, 7, 300):
            for dtype in (torch.float32, torch.bfloat16):
                queries, keys = kernels.tile_shape(group, 128, dtype, longest)
                assert queries * group >= 16 and keys in (32, 64)
                assert queries.bit_count() == 1, "Triton's ranges are powers of two"


def test_it_reads_no_host_mirror() -> None:
    names = AttentionRegistry.get("triton").get_standard_metadata_args()
    assert [name for name in names if name.endswith("_host")] == ["batch_info_host"]
    assert AttentionRegistry.get("triton").plans_before_capture() is False


def test_op_passes_torchs_own_checks() -> None:
    batch = make_batch(([1], 0, 0), [2], (1, 1, 16), 4)
    metadata = (batch.batch_info, batch.cu_seqlen, batch.cu_num_pages, batch.seq_len_with_cache, batch.cache_loc)
    args = (batch.q.contiguous(), batch.k.contiguous(), batch.v, *metadata, batch.kv_cache, None)
    op = torch.ops.auto_deploy_ext.triton_paged_cached_attention.default
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


def test_a_type_that_the_kernel_does_not_compute_in_is_refused_at_build_time() -> None:
    arguments = [SimpleNamespace(meta={"val": torch.empty(1, 2, 2, 16, dtype=torch.float64)})] * 3
    owner = SimpleNamespace(role="draft")
    node = SimpleNamespace(args=arguments, kwargs={}, graph=SimpleNamespace(owning_module=owner))
    with pytest.raises(ValueError, match=r"draft_attn_backend: triton computes in .* but the model's dtype is float64"):
        AttentionRegistry.get("triton").get_cache_initializers(node, KvCacheConfig())


def test_without_triton_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import auto_deploy_ext.kernels

    monkeypatch.setattr(auto_deploy_ext.kernels, "has_triton", lambda: False)
    with pytest.raises(ImportError, match=r"auto_deploy_ext\[gpu\]"):
        AttentionRegistry.get("triton").get_cache_initializers(SimpleNamespace(), KvCacheConfig())
