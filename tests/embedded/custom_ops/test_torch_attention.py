"""The source op against torch's own attention, and the two cached ops on hand-made metadata."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from auto_deploy_ext.embedded.custom_ops import torch_paged_attention as paged
from auto_deploy_ext.embedded.custom_ops.attention_interface import AttentionRegistry
from auto_deploy_ext.embedded.custom_ops.torch_attention import cached_heads, grouped_attention, transformers_attention
from auto_deploy_ext.embedded.shim.interface import KvCacheConfig

OPS = torch.ops.auto_deploy_ext
COUNTS = {"prefill": (2, 5, 0, 0, 0, 0), "decode": (0, 0, 0, 0, 2, 2)}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("heads", "kv_heads", "v_dim"), [(4, 4, 8), (4, 2, 8), (6, 1, 5)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_source_op_is_causal_grouped_attention(heads: int, kv_heads: int, v_dim: int, scale: float | None) -> None:
    q, k, v = random(2, 5, heads, 8), random(2, 5, kv_heads, 8, seed=1), random(2, 5, kv_heads, v_dim, seed=2)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, scale=scale, enable_gqa=True
    )
    torch.testing.assert_close(OPS.torch_attention(q, k, v, scale), expected.transpose(1, 2))


@pytest.mark.parametrize("op", ["source", "unpaged", "paged"])
def test_ops_pass_torchs_own_checks(op: str) -> None:
    q, kv = random(1, 5, 4, 8), random(1, 5, 2, 8)
    checks = ("test_schema", "test_faketensor")
    if op == "source":
        torch.library.opcheck(OPS.torch_attention.default, (q, kv, kv, 0.5), test_utils=checks)
        return
    rows = SimpleNamespace(**two_rows())
    if op == "unpaged":
        args = (rows.batch_info, rows.seq_len, rows.input_pos, rows.slot_idx, rows.cu_seqlen)
        caches = (torch.zeros(3, 16, 2, 8), torch.zeros(3, 16, 2, 8))
        torch.library.opcheck(OPS.torch_cached_attention.default, (q, kv, kv, *args, *caches, 0.5), test_utils=checks)
    else:
        args = (rows.batch_info, rows.cu_seqlen, rows.cu_num_pages, rows.last_page_len, rows.seq_len_with_cache)
        rest = (rows.cache_loc, torch.zeros(6, 2, 2, 4, 8), 0.5)
        torch.library.opcheck(OPS.torch_paged_cached_attention.default, (q, kv, kv, *args, *rest), test_utils=checks)


def two_rows() -> dict[str, torch.Tensor]:
    """A prefill batch of rows with 3 and 2 new tokens after 2 and 5 cached ones; pages of 4."""
    return {
        "batch_info": torch.tensor([*COUNTS["prefill"], 0, 0, 0, 0, 0, 0, 0], dtype=torch.int32),
        "seq_len": torch.tensor([3, 2], dtype=torch.int32),
        "input_pos": torch.tensor([2, 5], dtype=torch.int32),
        "slot_idx": torch.tensor([2, 0]),
        "cu_seqlen": torch.tensor([0, 3, 5], dtype=torch.int32),
        "cu_num_pages": torch.tensor([0, 2, 4], dtype=torch.int32),
        "last_page_len": torch.tensor([1, 3], dtype=torch.int32),
        "seq_len_with_cache": torch.tensor([5, 7], dtype=torch.int32),
        "cache_loc": torch.tensor([5, 1, 0, 3], dtype=torch.int32),
    }


def run_unpaged(rows: dict[str, torch.Tensor], k_cache: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
    q, k, v = random(1, 6, 4, 8), random(1, 6, 2, 8, seed=1), random(1, 6, 2, 8, seed=2)
    names = ("batch_info", "seq_len", "input_pos", "slot_idx", "cu_seqlen")
    return OPS.torch_cached_attention(q, k, v, *(rows[name] for name in names), k_cache, v_cache, None)


def run_paged(rows: dict[str, torch.Tensor], kv_cache: torch.Tensor) -> torch.Tensor:
    q, k, v = random(1, 6, 4, 8), random(1, 6, 2, 8, seed=1), random(1, 6, 2, 8, seed=2)
    names = ("batch_info", "cu_seqlen", "cu_num_pages", "last_page_len", "seq_len_with_cache", "cache_loc")
    return OPS.torch_paged_cached_attention(q, k, v, *(rows[name] for name in names), kv_cache, None)


def test_both_backends_agree_and_leave_padding_zero() -> None:
    history = random(2, 2, 5, 2, 8, seed=3)  # K or V, row, position, head, dim
    k_cache, v_cache = torch.zeros(2, 3, 16, 2, 8)
    kv_cache = torch.zeros(6, 2, 2, 4, 8)
    rows = two_rows()
    for row, slot, length in ((0, 2, 2), (1, 0, 5)):
        k_cache[slot, :length], v_cache[slot, :length] = history[:, row, :length]
        for position in range(length):
            page = int(rows["cache_loc"][rows["cu_num_pages"][row] + position // 4])
            kv_cache[page, :, :, position % 4] = history[:, row, position]
    unpaged, on_pages = run_unpaged(rows, k_cache, v_cache), run_paged(rows, kv_cache)
    torch.testing.assert_close(unpaged, on_pages)
    assert unpaged[0, 5].abs().max() == 0 and on_pages[0, 5].abs().max() == 0
    # The new tokens are where the metadata says.
    new_k = random(1, 6, 2, 8, seed=1)[0]
    assert torch.equal(k_cache[2, 2:5], new_k[:3]) and torch.equal(k_cache[0, 5:7], new_k[3:5])
    assert torch.equal(kv_cache[1, 0, :, 0], new_k[2]) and torch.equal(
        kv_cache[3, 0, :, 1:3].transpose(0, 1), new_k[3:5]
    )


def test_what_lies_in_unused_parts_of_a_cache_has_no_influence() -> None:
    rows = two_rows() | {"input_pos": torch.zeros(2, dtype=torch.int32)}
    clean = run_unpaged(rows, *torch.zeros(2, 3, 16, 2, 8))
    assert torch.equal(clean, run_unpaged(rows, *torch.full((2, 3, 16, 2, 8), torch.nan)))
    rows |= {
        "seq_len_with_cache": torch.tensor([3, 2]),
        "cu_num_pages": torch.tensor([0, 1, 2]),
        "last_page_len": torch.tensor([3, 2]),
    }
    assert torch.equal(
        run_paged(rows, torch.zeros(6, 2, 2, 4, 8)), run_paged(rows, torch.full((6, 2, 2, 4, 8), torch.nan))
    )


@pytest.mark.parametrize(
    ("mirror", "stale"),
    [
        ("cu_seqlen", [0, 2, 5]),
        ("cu_num_pages", [0, 1, 3]),
        ("last_page_len", [4, 2]),
        ("seq_len_with_cache", [4, 6]),
    ],
)
def test_paged_backend_believes_each_of_its_mirrors(mirror: str, stale: list[int]) -> None:
    kv_cache = random(6, 2, 2, 4, 8, seed=4)
    rows = two_rows()
    fresh = run_paged(rows, kv_cache.clone())
    wrong = run_paged(rows | {mirror: torch.tensor(stale, dtype=torch.int32)}, kv_cache.clone())
    assert not torch.allclose(fresh, wrong, equal_nan=True)


def test_plan_rows_gives_ranges_positions_and_lengths() -> None:
    rows = two_rows()
    names = ("batch_info", "cu_seqlen", "cu_num_pages", "last_page_len", "seq_len_with_cache")
    plan = paged.plan_rows(*(rows[name] for name in names), tokens_per_block=4)
    assert plan == [
        paged.RowPlan(first_query=0, end_query=3, first_page=0, end_page=2, first_position=2, num_keys=5),
        paged.RowPlan(first_query=3, end_query=5, first_page=2, end_page=4, first_position=5, num_keys=7),
    ]


def test_an_empty_batch_gives_zeros() -> None:
    rows = two_rows() | {"batch_info": torch.zeros(13, dtype=torch.int32)}
    assert run_unpaged(rows, *torch.zeros(2, 3, 16, 2, 8)).abs().max() == 0
    assert run_paged(rows, torch.zeros(6, 2, 2, 4, 8)).abs().max() == 0


def test_reduced_precision_is_computed_in_float32() -> None:
    q, k, v = (random(1, 6, 4, 8, seed=s).bfloat16() for s in range(3))
    allowed = torch.ones(1, 6, 6, dtype=torch.bool)
    got = grouped_attention(q, k, v, allowed, None)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, grouped_attention(q.float(), k.float(), v.float(), allowed, None).bfloat16())


def test_backends_read_what_the_contract_says() -> None:
    host = {
        name: [arg for arg in AttentionRegistry.get(name).get_standard_metadata_args() if arg.endswith("_host")]
        for name in ("torch", "torch_paged")
    }
    assert host == {
        "torch": ["batch_info_host"],
        "torch_paged": [
            "batch_info_host",
            "cu_seqlen_host",
            "cu_num_pages_host",
            "last_page_len_host",
            "seq_len_with_cache_host",
        ],
    }


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"sliding_window": 4}, "sliding_window"),
        ({"softcap": 30.0}, "softcap"),
        ({"dropout": 0.1}, "dropout"),
        ({"attention_mask": torch.ones(1)}, "attention_mask"),
    ],
)
def test_attention_that_the_source_op_lacks_is_refused(arguments: dict[str, object], named: str) -> None:
    x = random(1, 2, 3, 8)
    with pytest.raises(NotImplementedError, match=named):
        transformers_attention(torch.nn.Identity(), x, x, x, **{"attention_mask": None, **arguments})


def source_node(v_dim: int) -> SimpleNamespace:
    args = [SimpleNamespace(meta={"val": torch.empty(1, 2, 2, dim)}) for dim in (8, 8, v_dim)]
    return SimpleNamespace(args=[*args, 0.5], kwargs={})


def test_cache_dtype_follows_the_model_unless_given() -> None:
    assert cached_heads(source_node(8), KvCacheConfig())[3] == torch.float32
    assert cached_heads(source_node(8), KvCacheConfig(dtype="bfloat16"))[3] == torch.bfloat16
    with pytest.raises(ValueError, match="'int8' is no floating point type"):
        cached_heads(source_node(8), KvCacheConfig(dtype="int8"))


def test_paged_backend_refuses_keys_and_values_of_different_width() -> None:
    with pytest.raises(ValueError, match="width 8 and values of width 5"):
        AttentionRegistry.get("torch_paged").get_cache_initializers(source_node(5), KvCacheConfig())
