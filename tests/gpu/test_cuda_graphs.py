"""Compile backend torch-cudagraph on a GPU: equal tokens and state, no wait, memory that moves or is freed, plans."""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
import pickle
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from auto_deploy_ext import record_mirrors
from auto_deploy_ext.embedded.compile.captured_module import CapturedModule
from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.generation import generate
from auto_deploy_ext.embedded.pipeline import Pipeline, build_pipeline
from auto_deploy_ext.embedded.tokenizer import ByteTokenizer
from auto_deploy_ext.orchestrator import original_forward
from auto_deploy_ext.orchestrator.dispatch import dispatcher_of
from auto_deploy_ext.reports.capture import CaptureError
from tests.extend_batches import K, nest, step
from tests.no_waits import synchronising_is_an_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BACKENDS = ("torch", "triton", "flashinfer")
_CYCLES = 200_000_000  # about a tenth of a second


@functools.cache
def built(backend: str, compiled: str, capture: str) -> Pipeline:
    """A pipeline on the GPU; float32, bfloat16 with FlashInfer."""
    values: dict[str, Any] = {"device": "cuda", "attn_backend": backend, "draft_attn_backend": backend}
    if backend == "flashinfer":
        values |= {"dtype": "bfloat16", "model_kwargs.head_dim": 64, "speculative_model_kwargs.head_dim": 64}
    if compiled == "torch-cudagraph":
        values |= {"compile_backend": compiled, "transforms.compile_model.capture": capture}
    return build_pipeline(load_config("eagle3_llama_paged", overrides=values))


def pipeline_of(backend: str, compiled: str = "torch-cudagraph", capture: str = "consumers") -> Any:
    missing = {"flashinfer": "flashinfer", "triton": "triton"}.get(backend)
    if missing and importlib.util.find_spec(missing) is None:
        pytest.skip(f"needs {missing}")
    return built(backend, compiled, capture)


def prompts(pipeline: Pipeline) -> list[list[int]]:
    return [ByteTokenizer().encode(str(prompt)) for prompt in pipeline.config.prompts]


def tokens(result: Any) -> list[list[int]]:
    return [list(output.tokens) for output in result.outputs]


def host_state(cm: Any) -> tuple[Any, ...]:
    buffer = cm.info._input_buffer
    lengths = {name: buffer.get_current_length(name) for name in buffer.tensor_names}
    ages = {name: buffer.device_version[name] - buffer.mirror_version[name] for name in buffer.tensor_names}
    return cm.info.batch_info.serialize().tolist(), lengths, ages


def device_state(cm: Any, rows: int = 2) -> dict[str, list[Any]]:
    torch.cuda.synchronize()
    buffer = cm.info._input_buffer
    state = {name: buffer.get_view(name, truncate=True).tolist() for name in buffer.tensor_names}
    state["cache_loc"] = state["cache_loc"][: state["cu_num_pages"][rows]]
    return state


# ---------------------------------------------------------------- the same results


@pytest.mark.parametrize(
    ("backend", "capture"), [("torch", "consumers"), ("torch", "full"), ("triton", "consumers"), ("triton", "full")]
)
@pytest.mark.parametrize("overlap", [False, True])
def test_float32_gives_the_tokens_of_torch_simple(backend: str, capture: str, overlap: bool) -> None:
    plain, captured = pipeline_of(backend, "torch-simple"), pipeline_of(backend, capture=capture)
    expected = generate(plain.model, plain.cm, prompts(plain), 32)
    for attempt in range(2):  # the second run is replays alone
        result = generate(captured.model, captured.cm, prompts(plain), 32, overlap=overlap)
        assert tokens(result) == tokens(expected), f"attempt {attempt}, {stats(captured)}"
    assert stats(captured)["replays"] > 40, stats(captured)


def runner_of(model: Any) -> Any:
    dispatcher = dispatcher_of(model)
    assert dispatcher is not None
    return dispatcher.runner


def stats(pipeline: Any) -> dict[str, int]:
    model = pipeline.model
    runner = runner_of(model)
    counted = [runner.stats] if runner is not None else [model.target_model.stats, model.draft_model.stats]
    return {field: sum(getattr(s, field) for s in counted) for field in ("eager", "captures", "replays")}


@contextmanager
def eagerly(*modules: Any) -> Iterator[None]:
    """While active, captured modules run as they are."""
    before = [module._sizes for module in modules]
    for module in modules:
        module._sizes = frozenset()
    yield
    for module, sizes in zip(modules, before, strict=True):
        module._sizes = sizes


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_replay_computes_what_the_consumer_computes_eagerly(backend: str) -> None:
    """The same batch again and again; what it writes into the caches is the same each time."""
    pipeline = pipeline_of(backend)
    target, draft = pipeline.model.target_model, pipeline.model.draft_model
    results: list[Any] = []
    handles = [
        module.register_forward_hook(lambda _, args, result: results.append(copy.deepcopy(result)))
        for module in (target, draft)
    ]
    try:
        for past in (9, 30):
            results.clear()
            with eagerly(target, draft):
                step(pipeline, past=past)
            replays = stats(pipeline)["replays"]
            for _ in range(3):
                step(pipeline, past=past)
            assert stats(pipeline)["replays"] > replays, stats(pipeline)
            runs = [results[i : i + 1 + K] for i in range(0, len(results), 1 + K)]
            assert len(runs) == 4
            for run in runs[1:]:
                if backend == "flashinfer":
                    # Plans of graphs split rows in their own way; beyond the first draft, tokens may then differ.
                    torch.testing.assert_close(run[:2], runs[0][:2], atol=0.15, rtol=0.05)
                else:
                    torch.testing.assert_close(run, runs[0], atol=0.0, rtol=0.0)
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("capture", ["consumers", "full"])
def test_the_state_after_a_replay_is_that_after_an_eager_run(capture: str) -> None:
    plain, captured = pipeline_of("triton", "torch-simple"), pipeline_of("triton", capture=capture)
    for past in (9, 9, 9, 14, 23, 4):  # tables of other lengths, and pages that are crossed
        step(plain, past=past, fresh=True)
        expected = host_state(plain.cm), device_state(plain.cm)
        step(captured, past=past, fresh=True)
        assert host_state(captured.cm) == expected[0], f"past {past}"
        assert device_state(captured.cm) == expected[1], f"past {past}"


# ---------------------------------------------------------------- no wait, and what a call costs the host


@pytest.mark.parametrize(
    ("backend", "capture"),
    [("torch", "consumers"), ("triton", "consumers"), ("triton", "full"), ("flashinfer", "consumers")],
)
def test_a_step_of_replays_never_waits_for_the_device(backend: str, capture: str) -> None:
    pipeline = pipeline_of(backend, capture=capture)
    for _ in range(5):
        step(pipeline)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    waits = []
    for _ in range(3):
        nest(pipeline.cm)
        torch.cuda._sleep(_CYCLES)
        with record_mirrors(pipeline.cm) as transfers, torch.no_grad():
            if backend == "flashinfer":  # its plans need the offset, which is what the target accepted
                pipeline.model(pipeline.cm)
            else:
                with synchronising_is_an_error():
                    pipeline.model(pipeline.cm)
        done.record()
        waits.append(done.query())
        torch.cuda.synchronize()
        if backend != "flashinfer":
            assert transfers == []
    assert backend == "flashinfer" or not any(waits), waits


@pytest.mark.parametrize("capture", ["consumers", "full"])
def test_steps_of_one_size_are_replays(capture: str) -> None:
    """What they cost the host is printed."""
    pipeline = pipeline_of("triton", capture=capture)
    for _ in range(5):
        step(pipeline)
    torch.cuda.synchronize()
    before = stats(pipeline)
    best = {"nest": 1e9, "forward": 1e9}
    with torch.no_grad():
        for _ in range(30):
            start = time.perf_counter()
            nest(pipeline.cm)
            between = time.perf_counter()
            pipeline.model(pipeline.cm)
            end = time.perf_counter()
            torch.cuda.synchronize()
            best["nest"] = min(best["nest"], between - start)
            best["forward"] = min(best["forward"], end - between)
    text = ", ".join(f"{name} {seconds * 1e6:.0f} us" for name, seconds in best.items())
    print(f"\nhost time of a step of {K} drafts, capture {capture}: {text}")
    after = stats(pipeline)
    assert (after["eager"], after["captures"]) == (before["eager"], before["captures"]), (before, after)
    assert after["replays"] >= before["replays"] + 30, (before, after)
    if capture == "consumers":
        print(f"a captured draft call: {_draft_call_us(pipeline):.1f} us")


def _draft_call_us(pipeline: Any) -> float:
    calls: list[dict[str, Any]] = []
    draft = pipeline.model.draft_model
    handle = draft.register_forward_pre_hook(lambda m, args, kwargs: calls.append(kwargs), with_kwargs=True)
    step(pipeline)
    handle.remove()
    torch.cuda.synchronize()
    best = 1e9
    with torch.no_grad():
        draft.__dict__["copies_results"] = False
        for _ in range(20):
            start = time.perf_counter()
            for _ in range(10):
                draft(**calls[-1])
            best = min(best, (time.perf_counter() - start) / 10)
            torch.cuda.synchronize()
        draft.__dict__["copies_results"] = True
    return best * 1e6


# ---------------------------------------------------------------- results and memory


def test_results_outlive_the_next_call_unless_the_orchestrator_is_done_with_them() -> None:
    pipeline = pipeline_of("torch")
    draft = pipeline.model.draft_model
    kept: list[Any] = []
    for _ in range(3):
        step(pipeline)
    handle = draft.register_forward_hook(lambda module, args, result: kept.append((draft.copies_results, result)))
    step(pipeline)
    assert [copied for copied, _ in kept] == [False] * K
    kept.clear()
    with original_forward(pipeline.model):
        step(pipeline)
    handle.remove()
    assert [copied for copied, _ in kept] == [True] * K
    pointers = {tensor.data_ptr() for _, result in kept for tensor in result}
    assert len(pointers) == 2 * K


def test_graphs_are_captured_anew_when_the_caches_move() -> None:
    for capture in ("consumers", "full"):
        pipeline = build_small(capture)
        plain = pipeline_of("triton", "torch-simple")
        expected = tokens(generate(plain.model, plain.cm, prompts(plain)[:3], 16))
        assert tokens(generate(pipeline.model, pipeline.cm, prompts(plain)[:3], 16)) == expected
        captures = stats(pipeline)["captures"]
        pipeline.cm.resize(pipeline.cm.info.num_blocks - 1)
        filler = torch.full((64 << 20,), 255, dtype=torch.uint8, device="cuda")  # takes the old caches' memory
        assert tokens(generate(pipeline.model, pipeline.cm, prompts(plain)[:3], 16)) == expected
        assert stats(pipeline)["captures"] > captures
        del filler


def build_small(capture: str) -> Any:
    values = {
        "device": "cuda",
        "attn_backend": "triton",
        "draft_attn_backend": "triton",
        "compile_backend": "torch-cudagraph",
        "transforms.compile_model.capture": capture,
        "transforms.compile_model.cuda_graph_batch_sizes": [1, 2, 4],
    }
    return build_pipeline(load_config("eagle3_llama_paged", overrides=values))


@pytest.mark.parametrize("capture", ["consumers", "full"])
def test_copies_start_without_graphs_and_graphs_are_freed(capture: str) -> None:
    pipeline = pipeline_of("triton", capture=capture)
    plain = pipeline_of("triton", "torch-simple")
    expected = tokens(generate(plain.model, plain.cm, prompts(plain)[:2], 24))
    assert tokens(generate(pipeline.model, pipeline.cm, prompts(plain)[:2], 24)) == expected
    for twin in (copy.deepcopy(pipeline.model), pickle.loads(pickle.dumps(pipeline.model))):
        assert dispatcher_of(twin) is not dispatcher_of(pipeline.model)
        assert tokens(generate(twin.to("cuda"), pipeline.cm, prompts(plain)[:2], 24)) == expected
        gc.collect()
        torch.cuda.synchronize()
        with_graphs = torch.cuda.memory_allocated()
        for holder in (runner_of(twin), twin.target_model, twin.draft_model):
            getattr(holder, "forget_graphs", lambda: None)()
        gc.collect()
        assert torch.cuda.memory_allocated() < with_graphs
        assert tokens(generate(twin, pipeline.cm, prompts(plain)[:2], 24)) == expected


def test_graphs_of_all_batch_sizes_share_memory() -> None:
    class Wide(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.repeat(1, 1 << 20) + 1).sum(dim=1)

    module = CapturedModule(torch.fx.symbolic_trace(Wide()), (), (1, 2, 4, 8), name="wide")
    gc.collect()
    torch.cuda.empty_cache()
    sizes = []
    with torch.no_grad():
        for rows in (8, 4, 2, 1):
            x = torch.ones(rows, 1, device="cuda")
            for _ in range(3):
                assert module(x).tolist() == [2.0 * (1 << 20)] * rows
            torch.cuda.empty_cache()
            sizes.append(torch.cuda.memory_reserved())
    assert sizes[-1] - sizes[0] < 24 << 20, [size >> 20 for size in sizes]


def test_what_waits_for_the_device_is_refused_with_the_consumers_name() -> None:
    """Last in this file: a capture that CUDA has broken off."""

    class Waits(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[x > 0]

    module = CapturedModule(torch.fx.symbolic_trace(Waits()), (), (2,), name="waiting")
    x = torch.ones(2, 3, device="cuda")
    with torch.no_grad():
        module(x)
        with pytest.raises(CaptureError, match="waiting cannot be captured for a batch of"):
            module(x)
    torch.cuda.synchronize()
    assert torch.ones(3, device="cuda").sum().item() == 3
