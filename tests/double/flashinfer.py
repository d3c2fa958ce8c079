"""A double of FlashInfer 0.6.4, in PyTorch on the CPU: the state of its paged wrappers, what they copy and check.

It stands in for the real package in tests without a GPU; tests/gpu runs the real one.
"""

from __future__ import annotations

from typing import Any

import torch

from auto_deploy_ext.embedded.custom_ops.torch_attention import grouped_attention

__version__ = "0.6.4"

calls: list[tuple[str, bool, int]] = []
"""What was planned: through `plan` or `again` (the inner module), for a device graph or not, for how many rows."""


class _Module:
    """The compiled module: `plan` writes the host workspace and copies it to the device."""

    def plan(
        self,
        floats: torch.Tensor,
        ints: torch.Tensor,
        pinned: torch.Tensor,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_lens: torch.Tensor,
        total_rows: int,
        batch: int,
        heads: int,
        kv_heads: int,
        page_size: int,
        graph: bool,
        dim_qk: int,
        dim_vo: int,
        causal: bool,
        window: int,
        fixed_split: int,
        no_split: bool,
        colocated: int,
    ) -> list[int]:
        assert ints.shape == pinned.shape and heads % kv_heads == 0 and dim_qk == dim_vo >= 64
        assert (window, fixed_split, no_split, colocated) == (-1, -1, False, 0)
        queries, pages = qo_indptr[: batch + 1], kv_indptr[: batch + 1]
        assert len(kv_lens) >= batch
        if (queries.diff() < 0).any() or (pages.diff() < 0).any():
            raise RuntimeError("indptr should be non-negative")
        assert int(queries[-1]) <= total_rows
        words = torch.cat([queries, pages]).to(torch.int32).view(torch.uint8)
        pinned[: words.numel()].copy_(words)
        ints[: words.numel()].copy_(pinned[: words.numel()])
        calls.append(("again", graph, batch))
        return [total_rows, batch, 4 * (batch + 1), int(graph), int(causal)]


class _Wrapper:
    def __init__(self, floats: torch.Tensor, kv_layout: str, use_cuda_graph: bool, backend: str, buffers: Any) -> None:
        assert kv_layout == "HND" and backend == "fa2"
        self._float_workspace_buffer = floats
        self._int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.empty(8 << 20, dtype=torch.uint8)
        self._use_cuda_graph = use_cuda_graph
        self._qo_indptr_buf, self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._last = buffers
        self._cached_module: _Module | None = None
        self._plan_info: list[int] | None = None

    @property
    def _paged_kv_last_page_len_buf(self) -> torch.Tensor:
        return self._last

    @_paged_kv_last_page_len_buf.setter
    def _paged_kv_last_page_len_buf(self, value: torch.Tensor) -> None:
        self._last = value

    def _take(self, queries: torch.Tensor, pages: torch.Tensor, indices: torch.Tensor, last: torch.Tensor) -> None:
        if not self._use_cuda_graph:
            self._qo_indptr_buf, self._paged_kv_indptr_buf = queries.clone(), pages.clone()
            self._paged_kv_indices_buf, self._last = indices.clone(), last.clone()
            return
        assert len(self._last) == len(last), "the batch size is fixed in cuda graph mode"
        self._qo_indptr_buf.copy_(queries)
        self._paged_kv_indptr_buf.copy_(pages)
        self._paged_kv_indices_buf[: len(indices)].copy_(indices)
        self._last.copy_(last)

    def _plan(self, queries: Any, pages: Any, indices: Any, last: Any, sizes: Any, causal: bool, options: Any) -> None:
        heads, kv_heads, dim, page_size = sizes
        self._options, self._causal, self._page_size = options, causal, page_size
        self._take(queries, pages, indices, last)
        self._cached_module = _Module()
        rows = len(queries) - 1
        lens = (pages.diff() - 1).clamp(min=0) * page_size + last
        self._plan_info = self._cached_module.plan(
            self._float_workspace_buffer,
            self._int_workspace_buffer,
            self._pin_memory_int_workspace_buffer,
            queries,
            pages,
            lens,
            int(queries[-1]),
            rows,
            heads,
            kv_heads,
            page_size,
            self._use_cuda_graph,
            dim,
            dim,
            causal,
            -1,
            -1,
            False,
            0,
        )
        calls[-1] = ("plan", *calls[-1][1:])

    def run(
        self, q: torch.Tensor, cache: torch.Tensor, *, q_scale: float, out: torch.Tensor, enable_pdl: bool
    ) -> torch.Tensor:
        assert self._plan_info is not None and not enable_pdl
        assert q.dtype == cache.dtype == out.dtype == self._options["q_data_type"] == self._options["kv_data_type"]
        assert q.stride(-1) == 1 and q.shape == out.shape and q.shape[0] == self._plan_info[0]
        rows = self._plan_info[1]
        words = self._int_workspace_buffer[: 8 * (rows + 1)].view(torch.int32)
        queries, pages = self._qo_indptr_buf, self._paged_kv_indptr_buf
        # The kernels take tiles from the plan and ranges from these buffers: of two batches they would be nonsense.
        assert torch.equal(words[: rows + 1], queries) and torch.equal(words[rows + 1 :], pages)
        for row in range(rows):
            own = slice(int(queries[row]), int(queries[row + 1]))
            used = self._paged_kv_indices_buf[int(pages[row]) : int(pages[row + 1])]
            assert used.numel() == 0 or 0 <= int(used.min()) <= int(used.max()) < cache.shape[0]
            length = (len(used) - 1) * self._page_size + int(self._last[row]) if len(used) else 0
            cached = cache[used.long()].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]
            new = own.stop - own.start
            ends = torch.arange(length - new, length) if self._causal else torch.full((new,), length)
            allowed = torch.arange(length) <= ends[:, None]
            scale = self._options["sm_scale"] * q_scale
            out[own] = grouped_attention(q[own][None], cached[0][None], cached[1][None], allowed[None], scale)[0]
        return out


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, buffers)

    def plan(
        self, queries: Any, pages: Any, indices: Any, last: Any, *sizes: int, causal: bool = False, **options: Any
    ) -> None:
        self._plan(queries, pages, indices, last, sizes, causal, options)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert use_tensor_cores
        queries = torch.arange(len(paged_kv_indptr_buffer), dtype=torch.int32) if use_cuda_graph else None  # type: ignore[arg-type]
        buffers = (queries, paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, buffers)

    def plan(self, pages: Any, indices: Any, last: Any, *sizes: int, **options: Any) -> None:
        queries = torch.arange(len(pages), dtype=torch.int32)
        self._plan(queries, pages, indices, last, sizes, False, options)
