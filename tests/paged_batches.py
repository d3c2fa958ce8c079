"""Random batches over a paged cache, for tests that compare backends on the same metadata."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from hypothesis import strategies as st

from auto_deploy_ext.embedded.custom_ops import torch_paged_attention  # noqa: F401  (the reference)

MAX_CONTEXT = 4096


@dataclass(repr=False)
class PagedBatch:
    """Metadata of a batch, q, k, v and a cache; the mirrors are equal to the device's values."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    batch_info: torch.Tensor
    cu_seqlen: torch.Tensor
    cu_num_pages: torch.Tensor
    last_page_len: torch.Tensor
    seq_len_with_cache: torch.Tensor
    cache_loc: torch.Tensor
    kv_cache: torch.Tensor

    def __repr__(self) -> str:
        """What Hypothesis shows."""
        names = ("batch_info", "cu_seqlen", "cu_num_pages", "seq_len_with_cache")
        shown = ", ".join(f"{name}={getattr(self, name).tolist()}" for name in names)
        return f"PagedBatch(q={list(self.q.shape)}, kv_cache={list(self.kv_cache.shape)}, {shown})"

    def mirrors(self) -> tuple[torch.Tensor, ...]:
        """What a backend that plans on the host takes, in the order of its arguments."""
        return self.batch_info, self.cu_seqlen, self.cu_num_pages, self.last_page_len, self.seq_len_with_cache

    def reference(self, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The output of backend `torch_paged`, and the cache after it."""
        cache = self.kv_cache.clone()
        op = torch.ops.auto_deploy_ext.torch_paged_cached_attention
        host = [x.cpu() for x in self.mirrors()]
        return op(self.q, self.k, self.v, *host, self.cache_loc, cache, scale), cache


def make_batch(
    kinds: tuple[list[int], int, int],
    past: list[int],
    heads: tuple[int, int, int],
    page_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    max_rows: int | None = None,
    entries: int | None = None,
    spare: int = 2,
    seed: int = 0,
) -> PagedBatch:
    """Make a batch.

    Args:
        kinds: lengths of the rows, and how many of them are prefill and extend rows; the rest decode.
        past: cached tokens of each row.
        heads: heads, kv_heads, dim.
        page_size: tokens in a page.
        dtype: of everything computed.
        device: of everything but `batch_info`.
        max_rows: capacity of the metadata; None: no more than the rows.
        entries: capacity of `cache_loc`; None: one more than needed.
        spare: pages that no row owns.
        seed: of all values.
    """
    lengths, num_prefill, num_extend = kinds
    num_heads, kv_heads, dim = heads
    generator = torch.Generator(device).manual_seed(seed)
    capacity = max_rows or len(lengths)
    totals = [a + b for a, b in zip(lengths, past, strict=True)]
    pages = [-(-total // page_size) for total in totals]
    split = num_prefill + num_extend
    counts = []
    for part in (lengths[:num_prefill], lengths[num_prefill:split], lengths[split:]):
        counts += [len(part), sum(part)]

    def ints(values: list[int], size: int) -> torch.Tensor:
        padded = torch.zeros(size, dtype=torch.int32)
        padded[: len(values)] = torch.tensor(values, dtype=torch.int32)
        return padded.to(device)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    num_pages = sum(pages) + spare
    entries = entries or sum(pages) + 1
    table = torch.randperm(num_pages, generator=generator, device=device).repeat(-(-entries // num_pages))[:entries]
    uniform = len(set(lengths)) == 1 and num_prefill == 0
    shape = (len(lengths), lengths[0]) if uniform else (1, sum(lengths))
    return PagedBatch(
        # Strided, as rotary embeddings leave them: heads before tokens.
        q=normal(shape[0], num_heads, shape[1], dim).transpose(1, 2),
        k=normal(shape[0], kv_heads, shape[1], dim).transpose(1, 2),
        v=normal(*shape, kv_heads, dim),
        batch_info=torch.tensor([*counts, MAX_CONTEXT, 0, 0, capacity, 0, 0, 0], dtype=torch.int32),
        cu_seqlen=ints([0, *accumulate(lengths)], capacity + 1),
        cu_num_pages=ints([0, *accumulate(pages)], capacity + 1),
        last_page_len=ints([(total - 1) % page_size + 1 for total in totals], capacity),
        seq_len_with_cache=ints(totals, capacity),
        cache_loc=table.to(torch.int32),
        kv_cache=normal(num_pages, 2, kv_heads, page_size, dim),
    )


@st.composite
def batches(
    draw: st.DrawFn, dims: tuple[int, ...] = (16,), dtypes: tuple[torch.dtype, ...] = (torch.float32,)
) -> PagedBatch:
    """Small batches of every kind: prefill, extend, decode and mixed."""
    few = st.integers(0, 2)
    num_prefill, num_extend, num_decode = draw(st.tuples(few, few, few).filter(any))
    extend_len = draw(st.integers(2, 5))
    lengths = draw(st.lists(st.integers(1, 7), min_size=num_prefill, max_size=num_prefill))
    lengths += [extend_len] * num_extend + [1] * num_decode
    past = draw(st.lists(st.integers(0, 20), min_size=len(lengths), max_size=len(lengths)))
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 2), (1, 3), (2, 4)]))
    return make_batch(
        (lengths, num_prefill, num_extend),
        past,
        (kv_heads * group, kv_heads, draw(st.sampled_from(dims))),
        draw(st.sampled_from([2, 8])),
        dtype=draw(st.sampled_from(dtypes)),
        max_rows=len(lengths) + draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 1000)),
    )
