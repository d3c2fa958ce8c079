"""Overlap on a GPU: the same tokens, no wait for the device in the launch path, and the host ahead of it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from auto_deploy_ext import record_mirrors, sanitize
from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.generation import Engine, generate
from auto_deploy_ext.embedded.pipeline import Pipeline, build_pipeline
from auto_deploy_ext.embedded.requests import Request
from auto_deploy_ext.embedded.tokenizer import ByteTokenizer
from auto_deploy_ext.runtime.late_offset import TRIGGER as LATE
from tests.embedded.test_overlap import CacheWatcher
from tests.no_waits import synchronising_is_an_error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

HAS_TRITON = importlib.util.find_spec("triton") is not None
ROOT = Path(__file__).resolve().parents[2]
CYCLES = 300_000_000  # some 150 milliseconds, longer than a host that is shared needs for a step of these models
#: by name: the config and what is changed in it.
PIPELINES: dict[str, tuple[str, dict[str, Any]]] = {
    "torch": ("eagle3_llama", {}),
    "torch_paged": ("eagle3_llama_paged", {}),
    "hybrid": ("mtp_hybrid", {}),
    "triton": ("eagle3_llama_paged", {"attn_backend": "triton", "draft_attn_backend": "triton"}),
    "paged_triton": ("eagle3_llama_paged", {"draft_attn_backend": "triton"}),
    # A stream takes about a thousand launches, then the host waits; with more drafts, two steps of these are more.
    "torch_short": ("eagle3_llama", {"speculative_config.max_draft_len": 1}),
    "hybrid_short": ("mtp_hybrid", {"speculative_config.max_draft_len": 1}),
}
DECODING = [name for name in PIPELINES if not name.endswith("_short")]
GRAPHS: dict[str, dict[str, Any]] = {
    "simple": {},
    "consumers": {"compile_backend": "torch-cudagraph"},
    "full": {"compile_backend": "torch-cudagraph", "transforms.compile_model.capture": "full"},
}


@cache
def pipeline_of(name: str, graphs: str = "simple") -> Pipeline:
    config, changes = PIPELINES[name]
    if "triton" in changes.values() and not HAS_TRITON:
        pytest.skip("no triton")
    overrides = {"device": "cuda", "max_batch_size": 4, **changes, **GRAPHS[graphs]}
    return build_pipeline(load_config(config, overrides=overrides))


def prompts_of(pipeline: Pipeline) -> list[list[int]]:
    return [ByteTokenizer().encode(str(prompt)) for prompt in pipeline.config.prompts]


def run(pipeline: Pipeline, **options: Any) -> Any:
    prompts = prompts_of(pipeline)
    limits = [(9, 24, 1, 17, 30, 2)[i % 6] for i in range(len(prompts))]
    return generate(pipeline.model, pipeline.cm, prompts, limits, **options)


@contextmanager
def slow(*modules: torch.nn.Module) -> Iterator[None]:
    """Keep the device busy for a while behind every call of these modules."""

    def sleep(*_: Any) -> None:
        torch.cuda._sleep(CYCLES)

    handles = [module.register_forward_hook(sleep) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class TimedEngine(Engine):
    """Notes at each launch of a batch without prompts whether the step before it was still running afterwards."""

    def __init__(self, *args: Any, strict: bool = False) -> None:
        super().__init__(*args, overlap=True)
        self.strict = strict
        self.ahead: list[bool] = []
        self.results_there: list[bool] = []
        self.ends: list[torch.cuda.Event] = []

    def _launch(self, rows: Any, copies: Any) -> Any:
        before = self._in_flight
        verifies = before is not None and not any(seq.is_prefill for seq in rows)
        with synchronising_is_an_error() if self.strict and verifies else nullcontext():
            step = super()._launch(rows, copies)
        if verifies:
            self.ahead.append(not self.ends[-1].query())
            self.results_there.append(before.results._event is None or before.results._event.query())
        self.ends.append(torch.cuda.Event())
        self.ends[-1].record()
        return step


def timed(pipeline: Pipeline, **options: Any) -> TimedEngine:
    """Three requests of twenty tokens each."""
    engine = TimedEngine(pipeline.model, pipeline.cm, **options)
    for prompt in prompts_of(pipeline)[:3]:
        engine.submit(Request(tuple(prompt), 20))
    while engine.has_work:
        engine.step()
    torch.cuda.synchronize()
    return engine


@pytest.mark.parametrize("graphs", ["simple", "consumers", "full"])
@pytest.mark.parametrize("name", DECODING)
def test_tokens_are_those_without_overlap(name: str, graphs: str) -> None:
    if graphs != "simple" and name in ("torch_paged", "hybrid", "paged_triton"):
        pytest.skip("torch_paged reads mirrors inside the graph")
    pipeline = pipeline_of(name, graphs)
    reference = run(pipeline_of("torch" if name != "hybrid" else "hybrid"), speculative=False)
    expected = [output.tokens for output in reference.outputs]
    waiting = run(pipeline)
    ahead = run(pipeline, overlap=True)
    again = run(pipeline, overlap=True)
    greedy = run(pipeline, overlap=True, speculative=False)
    for label, result in (("waiting", waiting), ("ahead", ahead), ("again", again), ("greedy", greedy)):
        got = [output.tokens for output in result.outputs]
        wrong = [(i, g, e) for i, (g, e) in enumerate(zip(got, expected, strict=True)) if g != e]
        assert not wrong, f"{label}: request {wrong[0][0]} gave {wrong[0][1]} instead of {wrong[0][2]}"
    print(f"{name} {graphs}: accepted {ahead.accepted} with overlap, {waiting.accepted} without")


@pytest.mark.parametrize("name", DECODING)
def test_no_consumer_reads_a_stale_mirror(name: str) -> None:
    pipeline = pipeline_of(name)
    expected = [output.tokens for output in run(pipeline).outputs]
    with sanitize(pipeline.cm, pipeline.model) as sanitizer:
        ahead = run(pipeline, overlap=True)
    assert [output.tokens for output in ahead.outputs] == expected
    print(f"{name}: {sanitizer.checked} reads checked")


@pytest.mark.parametrize(("name", "graphs"), [("torch_short", "simple"), ("triton", "simple"), ("triton", "consumers")])
def test_nothing_in_the_launch_path_waits_for_the_device(name: str, graphs: str) -> None:
    pipeline = pipeline_of(name, graphs)
    for _ in range(3):  # kernels loaded, each size seen, captured and replayed, memory allocated
        timed(pipeline)
    with record_mirrors(pipeline.cm) as transfers, slow(pipeline.model.target_model):
        engine = timed(pipeline, strict=True)
    assert transfers == []
    share = sum(engine.ahead) / len(engine.ahead)
    assert share >= 0.95, f"the host was ahead at {sum(engine.ahead)} of {len(engine.ahead)} launches"


@pytest.mark.parametrize("name", ["hybrid_short", "paged_triton"])
def test_the_next_step_is_planned_and_launched_while_the_one_before_it_drafts(name: str) -> None:
    """The target plans on the host with lengths that arrive when the drafts were verified, long before the end."""
    pipeline = pipeline_of(name)
    for _ in range(2):
        timed(pipeline)
    with record_mirrors(pipeline.cm) as transfers, slow(pipeline.model.draft_model):
        engine = timed(pipeline)
    assert {transfer.names for transfer in transfers} == {(LATE,)}
    waited = sum(transfer.waited for transfer in transfers)
    ahead, there = sum(engine.ahead) / len(engine.ahead), sum(engine.results_there) / len(engine.results_there)
    print(f"{name}: {len(transfers)} late lengths, {waited} waited for, ahead {ahead:.2f}, results there {there:.2f}")
    # The first step after the prompts has no late lengths to plan with.
    assert sum(engine.ahead) >= len(engine.ahead) - 1, engine.ahead
    assert sum(engine.results_there) >= len(engine.results_there) - 1, engine.results_there


def test_the_results_of_a_step_that_is_one_graph_travel_behind_it() -> None:
    pipeline = pipeline_of("triton", "full")
    expected = [output.tokens for output in timed(pipeline_of("triton")).result().outputs]
    for _ in range(3):
        engine = timed(pipeline)
    assert [output.tokens for output in engine.result().outputs] == expected
    assert engine._copies is not None
    assert engine._copies._verified is None, "the last step was a replay, which calls no drafter"


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("name", "graphs"), [("torch", "consumers"), ("triton", "consumers"), ("triton", "full")])
def test_rows_that_fill_a_graph_up_write_to_the_spare_page_and_slot_alone(
    name: str, graphs: str, overlap: bool
) -> None:
    pipeline = pipeline_of(name, graphs)
    expected = [output.tokens for output in run(pipeline_of(name)).outputs]
    engine = CacheWatcher(pipeline.model, pipeline.cm, overlap=overlap)
    engine.seen = []
    limits = (9, 24, 1, 17, 30, 2)
    for i, prompt in enumerate(prompts_of(pipeline)):
        engine.submit(Request(tuple(prompt), limits[i % 6]))
    while engine.has_work:
        engine.step()
    assert [output.tokens for output in engine.result().outputs] == expected
    assert any(padded > rows for rows, padded in engine.seen), sorted(set(engine.seen))


@pytest.mark.parametrize("case", ["torch_paged", "triton", "triton_graphs", "triton_one_graph"])
def test_stress(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A few steps of each case; the whole run is `benchmarks/overlap_stress.py`."""
    if "triton" in case and not HAS_TRITON:
        pytest.skip("no triton")
    spec = importlib.util.spec_from_file_location("overlap_stress", ROOT / "benchmarks" / "overlap_stress.py")
    assert spec is not None and spec.loader is not None
    stress = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stress)
    code = stress.main(["--steps", "60", "--prompts", "6", "--cases", case])
    shown = capsys.readouterr()
    assert code == 0, f"{shown.out}\n{shown.err}"
    print(shown.out)
