"""`capture: segments` on a GPU: equality with eager runs, one launch per segment, no wait, and what a step costs."""

from __future__ import annotations

import functools
import importlib.util
import time
from typing import Any

import pytest
import torch

from auto_deploy_ext import record_mirrors
from auto_deploy_ext.embedded.compile.captured_segments import SegmentedForward
from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.generation import generate
from auto_deploy_ext.embedded.in_flight import Landing, ResultCopies
from auto_deploy_ext.embedded.pipeline import Pipeline, build_pipeline
from auto_deploy_ext.embedded.tokenizer import ByteTokenizer
from auto_deploy_ext.orchestrator.dispatch import dispatcher_of
from auto_deploy_ext.runtime import replay
from tests.extend_batches import K, nest, step
from tests.no_waits import synchronising_is_an_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

_CYCLES = 200_000_000  # about a tenth of a second
CASES = [("triton", "float32"), ("triton", "bfloat16"), ("flashinfer", "bfloat16")]


@functools.cache
def built(backend: str, dtype: str, capture: str, strategy: str = "auto", fused: bool = True) -> Pipeline:
    """A pipeline on the GPU; capture `none`: torch-simple."""
    values: dict[str, Any] = {"device": "cuda", "dtype": dtype, "attn_backend": backend, "draft_attn_backend": backend}
    values |= {"speculative_config.max_draft_len": K, "transforms.scope_host_mirrors.strategy": strategy}
    if backend == "flashinfer":
        values |= {"model_kwargs.head_dim": 64, "speculative_model_kwargs.head_dim": 64}
    if fused:
        values |= {"transforms.fuse_metadata_mutations.stage": "cache_init"}
    if capture != "none":
        values |= {"compile_backend": "torch-cudagraph", "transforms.compile_model.capture": capture}
    return build_pipeline(load_config("eagle3_llama_paged", overrides=values))


def pipeline_of(backend: str, *options: Any) -> Any:
    for package in {"triton", backend}:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    return built(backend, *options)


def runner_of(pipeline: Any) -> SegmentedForward:
    dispatcher = dispatcher_of(pipeline.model)
    assert dispatcher is not None and isinstance(dispatcher.runner, SegmentedForward), dispatcher
    return dispatcher.runner


def tokens(pipeline: Any, length: int = 32, **options: Any) -> list[list[int]]:
    prompts = [ByteTokenizer().encode(str(prompt)) for prompt in pipeline.config.prompts]
    return [list(output.tokens) for output in generate(pipeline.model, pipeline.cm, prompts, length, **options).outputs]


def state(cm: Any, rows: int = 2) -> tuple[Any, ...]:
    """Counts, lengths, ages of mirrors, what is in use on the device, and the mirrors that are as new."""
    torch.cuda.synchronize()
    buffer = cm.info._input_buffer
    names = buffer.tensor_names
    lengths = {name: buffer.get_current_length(name) for name in names}
    ages = {name: buffer.device_version[name] - buffer.mirror_version[name] for name in names}
    used = {name: buffer.get_view(name, truncate=True).tolist() for name in names}
    used["cache_loc"] = used["cache_loc"][: used["cu_num_pages"][rows]]
    fresh = {name: buffer.get_host_memory(name)[: len(used[name])].tolist() for name in names if ages[name] == 0}
    fresh["cache_loc"] = fresh.get("cache_loc", [])[: used["cu_num_pages"][rows]]
    return cm.info.batch_info.serialize().tolist(), lengths, ages, used, fresh


@pytest.mark.parametrize(("backend", "dtype"), CASES)
@pytest.mark.parametrize("fused", [False, True])
def test_steps_are_those_without_segments(backend: str, dtype: str, fused: bool) -> None:
    """FlashInfer plans of graphs split rows in their own way, so there captured consumers are what is compared with."""
    plain = pipeline_of(backend, dtype, "consumers" if backend == "flashinfer" else "none", "auto", fused)
    segmented = pipeline_of(backend, dtype, "segments", "auto", fused)
    for index, past in enumerate((9, 9, 9, 14, 23, 4, 30)):
        with record_mirrors(plain.cm) as expected_moves:
            expected = step(plain, past=past, fresh=True)
        expected_state = state(plain.cm)
        with record_mirrors(segmented.cm) as moves:
            output = step(segmented, past=past, fresh=True)
        if index < 2 and backend == "flashinfer":
            continue  # some of the two's calls are warm-ups, with eager plans
        assert state(segmented.cm) == expected_state, f"past {past}, {runner_of(segmented).stats}"
        assert [move.names for move in moves] == [move.names for move in expected_moves]
        for name, value in output.items():
            assert value.tolist() == expected[name].tolist(), f"{name}, past {past}, {runner_of(segmented).stats}"
    stats = runner_of(segmented).stats
    assert (stats.eager, stats.captures, stats.replays) == (1, 1, 5), stats


@pytest.mark.parametrize("strategy", ["override", "copy", "replay"])
def test_strategies_give_the_steps_of_auto(strategy: str) -> None:
    reference = pipeline_of("flashinfer", "bfloat16", "segments")
    other = pipeline_of("flashinfer", "bfloat16", "segments", strategy)
    for _ in range(3):
        step(reference, fresh=True)
        step(other, fresh=True)
    for past in (9, 14, 23):
        expected, output = step(reference, past=past, fresh=True), step(other, past=past, fresh=True)
        for name, value in output.items():
            assert value.tolist() == expected[name].tolist(), f"{name}, past {past}"


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_those_of_torch_simple(overlap: bool) -> None:
    plain, segmented = pipeline_of("triton", "float32", "none"), pipeline_of("triton", "float32", "segments")
    expected = tokens(plain)
    stats = runner_of(segmented).stats
    for _ in range(2):
        before = stats.replays
        assert tokens(segmented, overlap=overlap) == expected, stats
    assert stats.replays > before + 3, (before, stats)


def test_results_of_an_overlapping_engine_travel_while_segments_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrives on the side stream is what the step leaves on the device at its end."""
    pipeline = pipeline_of("flashinfer", "bfloat16", "segments")
    for _ in range(2):
        tokens(pipeline, overlap=True)
    started: dict[Landing, tuple[bool, torch.Tensor, torch.Tensor]] = {}
    start, read = ResultCopies.start, Landing.tokens

    def noted_start(copies: ResultCopies, new_tokens: torch.Tensor, lens: torch.Tensor) -> Landing:
        early = copies._are_complete([new_tokens, lens])
        landing = start(copies, new_tokens, lens)
        started[landing] = early, new_tokens, lens
        return landing

    def checked_read(landing: Landing) -> list[list[int]]:
        found = read(landing)
        _, new_tokens, lens = started[landing]
        expected = [row[:n] for row, n in zip(new_tokens.tolist(), lens.tolist(), strict=True)]
        assert found == expected
        return found

    monkeypatch.setattr(ResultCopies, "start", noted_start)
    monkeypatch.setattr(Landing, "tokens", checked_read)
    stats = runner_of(pipeline).stats
    before = stats.replays
    tokens(pipeline, overlap=True)
    assert stats.replays > before + 3, (before, stats)
    early = sum(early for early, *_ in started.values())
    assert early >= stats.replays - before, (early, len(started), before, stats)


@pytest.mark.parametrize(("backend", "launches"), [("triton", 1), ("flashinfer", 2 + K)])
def test_launches_and_waits_of_a_step(backend: str, launches: int) -> None:
    pipeline = pipeline_of(backend, "bfloat16", "segments", "replay")
    for _ in range(5):
        step(pipeline)
    assert set(runner_of(pipeline).launches_per_step) == {launches}
    torch.cuda.synchronize()
    nest(pipeline.cm)
    torch.cuda._sleep(_CYCLES)
    done = torch.cuda.Event()
    with record_mirrors(pipeline.cm) as transfers, torch.no_grad():
        if backend == "triton":
            with synchronising_is_an_error():
                pipeline.model(pipeline.cm)
        else:  # its plans need the offset, which is what the target accepted
            pipeline.model(pipeline.cm)
    done.record()
    finished = done.query()
    torch.cuda.synchronize()
    assert backend == "flashinfer" or not finished, "the host waited for the end of the step"
    assert len(transfers) == (backend == "flashinfer"), transfers


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
def test_what_a_step_costs_the_host(backend: str) -> None:
    """A bound that only a mistake breaks; the numbers are printed."""
    texts = []
    for capture in ("consumers", "segments"):
        pipeline = pipeline_of(backend, "bfloat16", capture)
        for _ in range(5):
            step(pipeline)
        best = 1e9
        with torch.no_grad():
            for _ in range(30):
                nest(pipeline.cm)
                torch.cuda.synchronize()
                start = time.perf_counter()
                pipeline.model(pipeline.cm)
                best = min(best, time.perf_counter() - start)
                torch.cuda.synchronize()
        texts.append(f"{capture} {best * 1e6:.0f} us")
    print(f"\n{backend}, a forward of {K} drafts on the host: {', '.join(texts)}")
    assert best < 0.01, texts


def test_segments_are_captured_anew_when_the_caches_move() -> None:
    plain, segmented = pipeline_of("triton", "float32", "none"), pipeline_of("triton", "float32", "segments")
    expected = tokens(plain, 16)
    assert tokens(segmented, 16) == expected
    captures = runner_of(segmented).stats.captures
    segmented.cm.resize(segmented.cm.info.num_blocks - 1)
    filler = torch.full((64 << 20,), 255, dtype=torch.uint8, device="cuda")  # takes the old caches' memory
    for _ in range(2):
        assert tokens(segmented, 16) == expected
    assert runner_of(segmented).stats.captures > captures
    del filler


def test_operands_travel_through_memory_that_is_used_again() -> None:
    pipeline = pipeline_of("triton", "bfloat16", "segments")
    areas = set()
    for index in range(20):
        operand = torch.tensor([index, -index], device="cuda")
        ticket = replay.snapshot(pipeline.cm, operand, "offset_pos_and_cache_")
        areas.add(ticket._values.data_ptr())
        operand.fill_(99)
        torch.cuda._sleep(_CYCLES // 100)
        if index % 3 == 2:
            continue  # nobody waits for it
        assert ticket.wait().tolist() == [index, -index]
    torch.cuda.synchronize()
    assert len(areas) < 10, areas
