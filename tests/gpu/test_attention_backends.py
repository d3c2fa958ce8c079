"""Attention backends triton and flashinfer on a GPU: equal to torch_paged on the same metadata, and decoding."""

from __future__ import annotations

import functools
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.custom_ops import flashinfer_planner
from auto_deploy_ext.embedded.custom_ops.plan_ops import forget_graph, plan_for_graph
from auto_deploy_ext.embedded.equality import equality_report, speculative_equality
from auto_deploy_ext.embedded.generation import generate
from auto_deploy_ext.embedded.pipeline import Pipeline, build_pipeline
from auto_deploy_ext.embedded.tokenizer import ByteTokenizer
from auto_deploy_ext.embedded.transform.library import insert_cached_attention  # noqa: F401  (registers the backends)
from tests.paged_batches import PagedBatch, make_batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_flashinfer = pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs flashinfer")

OPS = torch.ops.auto_deploy_ext
#: lengths of the rows, how many are prefill and extend rows, and what each has cached.
BATCHES: dict[str, tuple[tuple[list[int], int, int], list[int]]] = {
    "prefill": (([70, 1, 133], 3, 0), [0, 40, 7]),
    "extend": (([7] * 5, 0, 5), [3, 500, 64, 0, 1700]),
    "decode": (([1] * 6, 0, 0), [3, 500, 64, 0, 1700, 31]),
    "mixed": (([40, 4, 4, 1], 1, 2), [9, 100, 31, 260]),
}
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 1.2e-2}


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device is an error."""
    torch.cuda.synchronize()
    previous = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(previous)


def batch_of(
    kind: str, dtype: torch.dtype, heads: tuple[int, int, int], page_size: int = 32, **more: Any
) -> PagedBatch:
    rows, past = BATCHES[kind]
    return make_batch(rows, past, heads, page_size, dtype=dtype, device="cuda", max_rows=8, entries=512, **more)


def check(out: torch.Tensor, cache: torch.Tensor, batch: PagedBatch, what: str) -> None:
    expected, expected_cache = batch.reference()
    tolerance = TOLERANCE[batch.q.dtype]
    # In units of what a value of that size is rounded by.
    error = (out.float() - expected.float()).abs() / (1 + expected.float().abs())
    assert torch.isfinite(out).all(), f"{what}: {int((~torch.isfinite(out)).sum())} elements are not finite"
    worst = int(error.flatten(2).amax(-1).argmax())
    assert error.max() <= tolerance, f"{what}: off by {error.max():.3g} (mean {error.mean():.3g}) at token {worst}"
    wrong = (cache != expected_cache).flatten(1).any(1).nonzero().flatten().tolist()
    assert not wrong, f"{what}: pages {wrong} were not written as they should be"


def milliseconds(run: Callable[[], Any], repeats: int = 20) -> float:
    """Median time on the device of one call."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


# -- triton ------------------------------------------------------------------------------------------------------------


def attend_triton(batch: PagedBatch, cache: torch.Tensor) -> torch.Tensor:
    metadata = (batch.batch_info, batch.cu_seqlen, batch.cu_num_pages, batch.seq_len_with_cache, batch.cache_loc)
    return OPS.triton_paged_cached_attention(batch.q, batch.k, batch.v, *metadata, cache, None)


@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_gives_the_reference(dtype: torch.dtype, dim: int) -> None:
    for kind in BATCHES:
        batch = batch_of(kind, dtype, (8, 2, dim))
        cache = batch.kv_cache.clone()
        check(attend_triton(batch, cache), cache, batch, f"{kind}, {dtype}, dim {dim}")
    batch = batch_of("extend", dtype, (8, 2, dim))
    with no_waiting():
        attend_triton(batch, batch.kv_cache.clone())


@pytest.mark.parametrize("splits", [1, 2, 16, 64])
def test_triton_gives_the_reference_however_the_keys_are_split(splits: int) -> None:
    from auto_deploy_ext.kernels.paged_attention import paged_attention

    for heads, dtype in (((6, 2, 64), torch.float32), ((8, 8, 128), torch.bfloat16), ((32, 2, 64), torch.bfloat16)):
        batch = batch_of("extend", dtype, heads, page_size=16)
        cache = batch.kv_cache.clone()
        metadata = (batch.cu_seqlen, batch.cu_num_pages, batch.seq_len_with_cache, batch.cache_loc)
        out = paged_attention(
            batch.q,
            batch.k,
            batch.v,
            cache,
            *metadata,
            num_rows=5,
            num_tokens=35,
            longest=7,
            max_keys=4096,
            scale=heads[2] ** -0.5,
            num_splits=splits,
        )
        check(out, cache, batch, f"{splits} splits, {heads}, {dtype}")


@pytest.mark.parametrize("kind", ["extend", "decode"])
def test_triton_in_a_device_graph_follows_what_changes_on_the_device(kind: str) -> None:
    rows, past = BATCHES[kind]
    batch = batch_of(kind, torch.bfloat16, (8, 2, 64))
    other = make_batch(
        rows, past[::-1], (8, 2, 64), 32, dtype=torch.bfloat16, device="cuda", max_rows=8, entries=512, seed=7
    )
    cache = batch.kv_cache.clone()
    attend_triton(batch, cache.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend_triton(batch, cache)
    graph.replay()
    check(out, cache, batch, f"{kind}, first replay")
    for name in ("q", "k", "v", "cu_seqlen", "cu_num_pages", "seq_len_with_cache", "cache_loc", "kv_cache"):
        getattr(batch, name).copy_(getattr(other, name))
    cache.copy_(other.kv_cache)
    graph.replay()
    check(out, cache, other, f"{kind}, replay with other lengths and pages")


@pytest.mark.parametrize("rows", [1, 16])
def test_triton_decodes_a_context_of_32k(rows: int) -> None:
    context, heads, kv_heads, dim = 32_000, 32, 8, 128
    batch = make_batch(
        ([1] * rows, 0, 0),
        [context - 17 * i for i in range(rows)],
        (heads, kv_heads, dim),
        32,
        dtype=torch.bfloat16,
        device="cuda",
        spare=0,
    )
    batch.batch_info[6] = 32_768
    out = attend_triton(batch, batch.kv_cache)
    last = rows - 1
    end = int(batch.seq_len_with_cache[last])
    pages = batch.cache_loc[int(batch.cu_num_pages[last]) : int(batch.cu_num_pages[last + 1])].long()
    k, v = batch.kv_cache[pages].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :end].float()
    q = batch.q[last, 0].float().view(kv_heads, heads // kv_heads, dim)
    expected = ((q @ k.transpose(1, 2)) * dim**-0.5).softmax(-1) @ v
    error = (out[last, 0].float().view_as(expected) - expected).abs().max()
    assert error < 2e-3, f"off by {error:.3g}"
    took = milliseconds(lambda: attend_triton(batch, batch.kv_cache))
    nbytes = 2 * int(batch.seq_len_with_cache.sum()) * kv_heads * dim * 2
    print(f"\ntriton decode, {rows} rows of 32k: {took * 1e3:.0f} us, {nbytes / took / 1e9:.2f} TB/s")


# -- flashinfer --------------------------------------------------------------------------------------------------------

HEADS = {64: (16, 8, 64), 128: (32, 8, 128)}


@pytest.fixture
def planners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planners of this test's own."""
    monkeypatch.setattr(flashinfer_planner, "_planners", {})


def plan(batch: PagedBatch, mirrors: tuple[torch.Tensor, ...] | None = None, handle: int = 1) -> torch.Tensor:
    heads, dim = batch.q.shape[2:]
    kv_heads, page_size = batch.kv_cache.shape[2:4]
    sizes = (handle, heads, kv_heads, dim, str(batch.q.dtype).removeprefix("torch."))
    host = [x.cpu() for x in batch.mirrors()] if mirrors is None else mirrors
    return OPS.flashinfer_plan(*host, batch.cache_loc, page_size, *sizes)


def attend_flashinfer(batch: PagedBatch, cache: torch.Tensor, table: torch.Tensor, handle: int = 1) -> torch.Tensor:
    return OPS.flashinfer_cached_attention(batch.q, batch.k, batch.v, batch.cache_loc, table, cache, None, handle)


@needs_flashinfer
@pytest.mark.parametrize("dim", [64, 128])
def test_flashinfer_gives_the_reference(dim: int, planners: None) -> None:
    began = time.time()
    for kind in [*BATCHES, *BATCHES]:  # the second time past FlashInfer's front door
        batch = batch_of(kind, torch.bfloat16, HEADS[dim])
        cache = batch.kv_cache.clone()
        check(attend_flashinfer(batch, cache, plan(batch)), cache, batch, f"{kind}, dim {dim}")
    print(f"\nflashinfer, dim {dim}: {time.time() - began:.0f} s, most of it for compiling the kernels")


@needs_flashinfer
@pytest.mark.parametrize("kind", ["extend", "decode"])
@pytest.mark.parametrize("dim", [64, 128])
def test_flashinfer_in_a_device_graph_follows_its_plans(kind: str, dim: int, planners: None) -> None:
    rows, past = BATCHES[kind]
    batch = batch_of(kind, torch.bfloat16, HEADS[dim])
    others = [
        make_batch(
            rows, pasts, HEADS[dim], 32, dtype=torch.bfloat16, device="cuda", max_rows=8, entries=512, spare=400, seed=7
        )
        for pasts in (past[::-1], [2] * len(past), [1500] * len(past))
    ]
    attend_flashinfer(batch, batch.kv_cache.clone(), plan(batch))  # compiles what an eager run needs
    cache = torch.zeros_like(others[-1].kv_cache)
    cache[: batch.kv_cache.shape[0]] = batch.kv_cache
    graph = torch.cuda.CUDAGraph()
    with plan_for_graph("graph"):
        table = plan(batch)
        with torch.cuda.graph(graph):
            assert plan(batch, mirrors=tuple(torch.zeros_like(x, device="cpu") for x in batch.mirrors())) is not None
            out = attend_flashinfer(batch, cache, table)
        graph.replay()
        expected, _ = batch.reference()
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)
        for index, other in enumerate(others):
            for name in ("q", "k", "v", "cache_loc"):
                getattr(batch, name).copy_(getattr(other, name))
            cache.zero_()
            cache[: other.kv_cache.shape[0]] = other.kv_cache
            plan(batch, tuple(x.cpu() for x in other.mirrors()))
            graph.replay()
            check(out, cache[: other.kv_cache.shape[0]], other, f"{kind}, dim {dim}, replay {index}")
    forget_graph("graph")


@needs_flashinfer
def test_plans_that_run_far_ahead_of_the_device_do_not_disturb_one_another(planners: None) -> None:
    rows = [make_batch(
        ([4] * 3, 0, 3), [1 + 37 * i, 400 - 13 * i, 5 * i], HEADS[64], 32,
        dtype=torch.bfloat16, device="cuda", max_rows=8, entries=512, spare=50, seed=i,
    ) for i in range(14)]  # fmt: skip
    mirrors = [tuple(x.cpu() for x in batch.mirrors()) for batch in rows]
    expected = [batch.reference() for batch in rows]
    caches = [batch.kv_cache.clone() for batch in rows]
    attend_flashinfer(rows[0], rows[0].kv_cache.clone(), plan(rows[0]))
    with no_waiting():
        torch.cuda._sleep(400_000_000)  # some 0.2 s: everything below is issued meanwhile
        began = time.perf_counter()
        outs = [
            attend_flashinfer(batch, cache, plan(batch, host))
            for batch, cache, host in zip(rows, caches, mirrors, strict=True)
        ]
        issued = time.perf_counter() - began
        still_running = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert still_running, f"issuing took {issued:.3f} s: the device was not behind, so nothing was tested"
    for index, (out, cache, (right, right_cache)) in enumerate(zip(outs, caches, expected, strict=True)):
        error = (out.float() - right.float()).abs().max()
        assert error < 2e-2 and torch.equal(cache, right_cache), f"batch {index} of 14 is off by {error:.3g}"
    ring = flashinfer_planner.planner(1).ring
    print(f"\n14 plans and runs issued in {issued * 1e3:.1f} ms; ring of {len(ring)}, {ring.waits} waits")
    assert ring.waits == 0


@needs_flashinfer
def test_stale_mirrors_and_nonsense_make_no_fault(planners: None) -> None:
    batch = batch_of("extend", torch.bfloat16, HEADS[64])
    fresh = tuple(x.cpu() for x in batch.mirrors())
    decode = fresh[0].clone()
    decode[:6] = torch.tensor([0, 0, 0, 0, 5, 5])
    one_each = make_batch(
        ([1] * 5, 0, 0), [9] * 5, HEADS[64], 32, dtype=torch.bfloat16, device="cuda", max_rows=8, entries=512
    )
    for graph in (None, "extend"):
        for index in range(1, 5):
            for value in (-(2**31), -1, 0, 2**31 - 1):
                nonsense = [*fresh]
                nonsense[index] = torch.full_like(fresh[index], value)
                if graph is None:
                    out = attend_flashinfer(batch, batch.kv_cache.clone(), plan(batch, tuple(nonsense)))
                else:
                    with plan_for_graph(graph):
                        out = attend_flashinfer(batch, batch.kv_cache.clone(), plan(batch, tuple(nonsense)))
                torch.cuda.synchronize()
                assert out.shape == batch.q.shape
    # What the policy `none` leaves: counts of a decode batch, mirrors of the extend batch before it.
    attend_flashinfer(one_each, one_each.kv_cache.clone(), plan(one_each, (decode, *fresh[1:])))
    torch.cuda.synchronize()
    cache = batch.kv_cache.clone()
    check(attend_flashinfer(batch, cache, plan(batch, fresh)), cache, batch, "fresh mirrors afterwards")


@needs_flashinfer
def test_rows_that_keep_their_tokens_and_pages_are_planned_once(
    planners: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What plans cost the host is printed."""
    made: list[str] = []
    for name in ("_plan_first", "_plan_again"):
        original = getattr(flashinfer_planner.FlashInferPlanner, name)

        def noted(self: Any, *args: Any, name: str = name, original: Any = original) -> None:
            made.append(name)
            original(self, *args)

        monkeypatch.setattr(flashinfer_planner.FlashInferPlanner, name, noted)
    batch = batch_of("extend", torch.bfloat16, HEADS[128])
    host = tuple(x.cpu() for x in batch.mirrors())
    costs = {}
    for name in ("eager", "graph"):
        times = []
        for _ in range(200):
            began = time.perf_counter()
            if name == "eager":
                plan(batch, host)
            else:
                with plan_for_graph("costs"):
                    plan(batch, host)
            times.append(time.perf_counter() - began)
            torch.cuda.synchronize()
        costs[name] = statistics.median(times) * 1e6
    table = plan(batch, host)
    times = []
    for _ in range(100):
        began = time.perf_counter()
        attend_flashinfer(batch, batch.kv_cache, table)
        times.append(time.perf_counter() - began)
        torch.cuda.synchronize()
    costs["attention op"] = statistics.median(times) * 1e6
    shown = ", ".join(f"{name} {cost:.0f} us" for name, cost in costs.items())
    print(f"\nhost time of a plan: {shown}")
    # Eager: once. Graph: for nothing, which loads the kernels, and once.
    assert len(made) == 3, made


# -- decoding ----------------------------------------------------------------------------------------------------------


@functools.cache
def pipeline_of(target: str, draft: str, dtype: str, compiled: str = "torch-simple") -> Any:
    values = {
        "device": "cuda",
        "dtype": dtype,
        "attn_backend": target,
        "draft_attn_backend": draft,
        "compile_backend": compiled,
        "model_kwargs.head_dim": 64,
        "speculative_model_kwargs.head_dim": 64,
    }
    return build_pipeline(load_config("eagle3_llama_paged", overrides=values))


def prompts_of(pipeline: Pipeline) -> list[list[int]]:
    return [ByteTokenizer().encode(str(prompt)) for prompt in pipeline.config.prompts]


def decoded(pipeline: Pipeline, **options: Any) -> list[list[int]]:
    result = generate(pipeline.model, pipeline.cm, prompts_of(pipeline), pipeline.config.max_new_tokens, **options)
    return [list(output.tokens) for output in result.outputs]


@functools.cache
def torch_tokens() -> list[list[int]]:
    return decoded(pipeline_of("torch_paged", "torch_paged", "float32"))


@pytest.mark.parametrize(("target", "draft"), [("triton", "triton"), ("torch", "triton"), ("triton", "torch_paged")])
def test_in_float32_triton_decodes_the_tokens_of_the_torch_backend(target: str, draft: str) -> None:
    pipeline = pipeline_of(target, draft, "float32")
    assert decoded(pipeline) == torch_tokens()
    if draft == target:
        assert decoded(pipeline, speculative=False) == torch_tokens()


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("triton", "triton"),
        pytest.param("flashinfer", "flashinfer", marks=needs_flashinfer),
        pytest.param("triton", "flashinfer", marks=needs_flashinfer),
        pytest.param("flashinfer", "torch", marks=needs_flashinfer),
    ],
)
def test_in_bfloat16_drafts_change_no_token_but_where_two_are_as_good(target: str, draft: str) -> None:
    pipeline = pipeline_of(target, draft, "bfloat16")
    report = speculative_equality(pipeline.model, pipeline.cm, prompts_of(pipeline), pipeline.config.max_new_tokens)
    print(f"\n{target}, {draft}: {report.describe()}")
    assert report.equal, report.describe()
    assert report.num_close < report.num_tokens / 3, f"the rule excuses too much: {report.describe()}"


@needs_flashinfer
def test_flashinfer_and_triton_decode_alike_in_bfloat16() -> None:
    flashinfer, triton = (pipeline_of(name, name, "bfloat16") for name in ("flashinfer", "triton"))
    prompts = prompts_of(triton)
    greedy = decoded(flashinfer, speculative=False), decoded(triton, speculative=False)
    # Of another backend's rounding the noise measured on one says less, so this one may be off by a little more.
    report = equality_report(triton.model, triton.cm, prompts, *greedy)
    parted = [p for p in report.prompts if not p.equal]
    assert all((p.gap or 0.0) <= 4 * report.noise for p in parted), report.describe()


@pytest.mark.parametrize("backend", ["triton", pytest.param("flashinfer", marks=needs_flashinfer)])
def test_consumers_as_device_graphs_decode_the_same(backend: str) -> None:
    eager = pipeline_of(backend, backend, "bfloat16")
    captured = pipeline_of(backend, backend, "bfloat16", "torch-cudagraph")
    first, second = decoded(captured), decoded(captured)
    report = equality_report(eager.model, eager.cm, prompts_of(eager), second, decoded(eager))
    assert first == second or report.equal, "two runs differ"
    assert report.equal, report.describe()
