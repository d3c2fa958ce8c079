"""`capture: segments` on small pipelines: tokens and host state of an eager run, how many graphs, what is not split."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from auto_deploy_ext import TransformRegistry, record_mirrors, sanitize
from auto_deploy_ext.embedded.compile.backend import capture_model
from auto_deploy_ext.embedded.compile.captured_segments import SegmentedForward
from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.custom_ops import flashinfer_planner
from auto_deploy_ext.embedded.generation import generate
from auto_deploy_ext.embedded.in_flight import ResultCopies, watching_drafts
from auto_deploy_ext.embedded.pipeline import build_pipeline
from auto_deploy_ext.embedded.transform.interface import SharedConfig
from auto_deploy_ext.embedded.transform.library.compile_model import CompileModelConfig
from auto_deploy_ext.orchestrator.dispatch import dispatcher_of
from auto_deploy_ext.rewriting.fusion import fuse_graphs
from auto_deploy_ext.rewriting.scoping import ScopeOptions, scope_module
from auto_deploy_ext.runtime.hooks import HookedForward
from tests.double import flashinfer as double

K = 3
SMALL = """
model_kwargs: {model_type: llama, vocab_size: 256, hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1,
               num_attention_heads: 2, num_key_value_heads: 2, head_dim: %d}
speculative_config: {decoding_type: Eagle3, max_draft_len: 3, eagle3_layers_to_capture: [0]}
speculative_model_kwargs: {num_captured_layers: 1}
kv_cache_config: {tokens_per_block: 4}
max_seq_len: 64
"""
PROMPTS = [[1, 2, 3], [7], [5, 6, 5, 6, 5]]
STRATEGIES = ("none", "override", "copy", "replay", "auto")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that gives a small pipeline that is not compiled; the same arguments give the same one."""
    known: dict[str, Any] = {}

    def of(backend: str) -> Any:
        if backend not in known:
            path = tmp_path_factory.mktemp("segments") / "small.yaml"
            path.write_text(SMALL % (64 if backend == "flashinfer" else 16))
            values = {"attn_backend": backend, "draft_attn_backend": backend}
            values |= {"dtype": "bfloat16"} if backend == "flashinfer" else {}
            known[backend] = build_pipeline(load_config(str(path), overrides=values))
            for name in ("cache_loc", "cu_num_pages", "last_page_len"):  # also for the backend that reads none
                known[backend].cm.info.activate_arg(name)
        return known[backend]

    return of


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The double in the place of the package."""
    monkeypatch.setitem(sys.modules, "flashinfer", double)
    monkeypatch.setattr(flashinfer_planner, "_planners", {})
    return double


#: by pipeline, which the fixture keeps: its model as each strategy rewrites it.
_SCOPED: dict[int, dict[str, Any]] = {}


def scoped(pipeline: Any, strategy: str, fused: bool) -> Any:
    """A rewritten copy of a pipeline's model, with the same interface."""
    known = _SCOPED.setdefault(id(pipeline), {"none": pipeline.model})
    if strategy not in known:
        known[strategy] = copy.deepcopy(pipeline.model)
        scope_module(known[strategy], pipeline.cm, ScopeOptions(strategy=strategy))
    model = copy.deepcopy(known[strategy])
    if fused:
        dispatcher = dispatcher_of(model)
        assert dispatcher is not None
        assert fuse_graphs(dispatcher.variants, pipeline.cm)
    return SimpleNamespace(model=model, cm=pipeline.cm)


def segmented(pipeline: Any) -> Any:
    model, count = capture_model(copy.deepcopy(pipeline.model), pipeline.cm, "segments")
    assert count == 2
    return SimpleNamespace(model=model, cm=pipeline.cm)


def runner_of(pipeline: Any) -> SegmentedForward:
    dispatcher = dispatcher_of(pipeline.model)
    assert dispatcher is not None and isinstance(dispatcher.runner, SegmentedForward)
    return dispatcher.runner


def tokens(pipeline: Any, length: int = 10, **options: Any) -> Any:
    result = generate(pipeline.model, pipeline.cm, PROMPTS, length, **options)
    return [output.tokens for output in result.outputs]


def step(pipeline: Any, rows: int = 2, past: int = 5) -> Any:
    """An extend-only batch with a history, on empty caches."""
    cm = pipeline.cm
    for cache in cm.kv_cache_manager.resources.values():
        cache.zero_()
    cm.info.set_example_sequence(
        [[(7 * i + j) % 200 for j in range(1 + K)] for i in range(rows)],
        input_pos=past,
        batch_info=[0, 0, rows, rows * (1 + K), 0, 0],
        extra_page_per_seq_per_pool=[[40 + i for i in range(rows)]],
    )
    with torch.no_grad():
        return pipeline.model(cm)


def state(cm: Any) -> tuple[Any, ...]:
    """Counts, lengths, ages of mirrors; what is in use on the device; the mirrors that are as new."""
    buffer = cm.info._input_buffer
    names = buffer.tensor_names
    lengths = {name: buffer.get_current_length(name) for name in names}
    ages = {name: buffer.device_version[name] - buffer.mirror_version[name] for name in names}
    used = {name: buffer.get_view(name, truncate=True).tolist() for name in names}
    used["cache_loc"] = used["cache_loc"][: used["cu_num_pages"][-1]]
    fresh = {
        name: buffer.get_host_memory(name)[: len(used[name])].tolist() for name in names if not buffer.stale_names()
    }
    return cm.info.batch_info.serialize().tolist(), lengths, ages, used, fresh


# ---------------------------------------------------------------- tokens and state


CASES = [("torch", "auto", False), ("torch", "auto", True), ("flashinfer", "none", False)]
CASES += [("flashinfer", strategy, fused) for strategy in STRATEGIES[1:] for fused in (False, True)]


@pytest.mark.parametrize(("backend", "strategy", "fused"), CASES)
def test_steps_and_host_state_are_those_of_an_eager_run(
    built: Any, flashinfer: Any, backend: str, strategy: str, fused: bool
) -> None:
    plain = scoped(built(backend), strategy, fused)
    captured = segmented(plain)
    for past in (5, 5, 9, 2, 18):  # tables of other lengths, some with pages that are crossed
        with record_mirrors(plain.cm) as expected_moves:
            expected = step(plain, past=past)
        expected_state = state(plain.cm)
        with record_mirrors(captured.cm) as moves:
            output = step(captured, past=past)
        assert state(captured.cm) == expected_state, f"past {past}"
        assert [(t.names, t.nbytes, t.trigger) for t in moves] == [
            (t.names, t.nbytes, t.trigger) for t in expected_moves
        ]
        assert {n: v.tolist() for n, v in output.items()} == {n: v.tolist() for n, v in expected.items()}
    stats = runner_of(captured).stats
    assert (stats.eager, stats.captures, stats.replays) == (1, 1, 3)


@pytest.mark.parametrize("backend", ["torch", "flashinfer"])
def test_tokens_are_those_of_torch_simple(built: Any, flashinfer: Any, backend: str) -> None:
    plain = scoped(built(backend), "auto", fused=True)
    captured = segmented(plain)
    expected = tokens(plain)
    for overlap in (False, True):
        assert tokens(captured, overlap=overlap) == expected
    assert runner_of(captured).stats.replays > 3


# ---------------------------------------------------------------- how many graphs


@pytest.mark.parametrize(
    ("backend", "strategy", "launches"),
    [
        ("torch", "auto", 1),  # nothing asks the host for anything
        ("flashinfer", "replay", 2 + K),  # the offset's snapshot; then each draft call waits for its plan
        ("flashinfer", "override", 1 + K),  # the mutations between two draft calls copy, so they run on the host
    ],
)
def test_how_many_graphs_a_step_launches(
    built: Any, flashinfer: Any, backend: str, strategy: str, launches: int
) -> None:
    captured = segmented(scoped(built(backend), strategy, fused=True))
    for _ in range(2):
        step(captured)
    assert runner_of(captured).launches_per_step == [launches]


def test_launches_with_consumers_may_be_watched(built: Any, flashinfer: Any) -> None:
    captured = segmented(scoped(built("flashinfer"), "replay", fused=True))
    seen: list[str] = []
    with runner_of(captured).watched(lambda: seen.append("before"), lambda: seen.append("after")):
        for _ in range(3):
            step(captured)
    assert seen == ["before", "after"] * (1 + K)


def test_overlapped_steps_are_replayed(built: Any, flashinfer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU every step of an overlapping engine is watched; a hook on the drafter would keep it from segments."""
    captured = segmented(scoped(built("flashinfer"), "auto", fused=True))
    expected = tokens(captured)
    told: list[Any] = []
    monkeypatch.setattr(
        ResultCopies, "watching", lambda self, model, drafter: watching_drafts(model, drafter, told.append)
    )
    stats = runner_of(captured).stats
    before, eager = stats.replays, stats.eager
    assert tokens(captured, overlap=True) == expected
    assert stats.replays > before and stats.eager > eager
    kinds = [complete is None for complete in told]
    assert kinds.count(False) == stats.replays - before
    assert kinds.count(True) == K * (stats.eager - eager), "a step that runs eagerly tells at each call of the drafter"
    assert not captured.model.draft_model._forward_pre_hooks


def test_a_replay_tells_which_results_are_complete_when_it_begins_to_draft(built: Any, flashinfer: Any) -> None:
    captured = segmented(scoped(built("flashinfer"), "auto", fused=True))
    for _ in range(2):
        step(captured)
    seen: list[Any] = []
    runner = runner_of(captured)
    with (
        runner.watched(lambda: seen.append("launch"), lambda: None),
        watching_drafts(
            captured.model, captured.model.draft_model, lambda done: seen.append([(t, t.tolist()) for t in done or ()])
        ),
    ):
        output = step(captured, past=7)
    assert runner.stats.replays == 1
    complete = seen.pop(1)
    assert seen == ["launch"] * (1 + K)
    assert {id(tensor) for tensor, _ in complete} >= {id(output.new_tokens), id(output.new_tokens_lens)}
    assert all(tensor.tolist() == values for tensor, values in complete)
    known = step(captured, past=7)
    assert {n: v.tolist() for n, v in output.items()} == {n: v.tolist() for n, v in known.items()}
    copies = ResultCopies(torch.device("cpu"), 2, 1 + K)
    assert not copies._are_complete([output.new_tokens])
    copies._verified, copies._complete = object(), tuple(tensor for tensor, _ in complete)
    assert copies._are_complete([output.new_tokens, output.new_tokens_lens])
    assert not copies._are_complete([output.new_tokens, output.next_new_tokens])


def test_a_step_that_is_one_graph_tells_nothing(built: Any) -> None:
    captured = segmented(scoped(built("torch"), "auto", fused=False))
    told: list[Any] = []
    with watching_drafts(captured.model, captured.model.draft_model, told.append):
        for _ in range(4):
            step(captured)
    assert told == [None] * K and runner_of(captured).stats.replays == 2


def test_results_may_be_kept(built: Any, flashinfer: Any) -> None:
    captured = segmented(scoped(built("flashinfer"), "auto", fused=True))
    kept = [step(captured, past=past) for past in (3, 3, 3, 7)]
    values = [{name: value.tolist() for name, value in output.items()} for output in kept]
    for past in (3, 7):
        step(captured, past=past)
    assert [{name: value.tolist() for name, value in output.items()} for output in kept] == values


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copied_wrapper_captures_anew(built: Any, how: str) -> None:
    captured = segmented(scoped(built("torch"), "auto", fused=False))
    expected = tokens(captured)
    twin = copy.deepcopy(captured.model) if how == "deepcopy" else pickle.loads(pickle.dumps(captured.model))
    twin = SimpleNamespace(model=twin, cm=captured.cm)
    assert runner_of(twin).stats.captures == 0
    assert tokens(twin) == expected and runner_of(twin).stats.replays > 0


def kept_graphs() -> int:
    """How many device graphs planners hold memory for."""
    return sum(len(planner._graphs) for known in flashinfer_planner._planners.values() for planner in known)


def test_planners_let_go_of_a_model_that_is_dropped(built: Any, flashinfer: Any) -> None:
    captured = segmented(scoped(built("flashinfer"), "auto", fused=True))
    for _ in range(3):
        step(captured)
    assert runner_of(captured).stats.replays and kept_graphs() > 0
    del captured
    gc.collect()
    assert kept_graphs() == 0


# ---------------------------------------------------------------- what is not split


def test_a_sanitized_model_and_one_with_hooks_run_their_consumers(
    built: Any, flashinfer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    captured = segmented(scoped(built("flashinfer"), "auto", fused=True))
    for _ in range(3):
        expected = step(captured)
    stats, draft = runner_of(captured).stats, captured.model.draft_model
    replays, seen = stats.replays, draft.stats.replays
    with sanitize(captured.cm.info):
        for _ in range(3):
            assert torch.equal(step(captured).next_draft_tokens, expected.next_draft_tokens)
    calls: list[Any] = []
    handle = draft.register_forward_hook(lambda *_: calls.append(1))
    with caplog.at_level(logging.WARNING, logger="auto_deploy_ext"):
        for _ in range(2):
            step(captured)
    handle.remove()
    assert caplog.text.count("as long as consumers have forward hooks") == 1
    assert len(calls) == 2 * K and draft.stats.replays > seen and stats.replays == replays
    step(captured)
    assert stats.replays == replays + 1


def test_a_batch_that_no_variant_covers_keeps_later_ones_from_nothing(built: Any) -> None:
    captured = segmented(scoped(built("torch"), "auto", fused=False))
    captured.cm.info.activate_arg("prompt_lens")  # so that the next batch is another than any that was traced
    step(captured)
    assert captured.model.draft_model._forward_hooks, "it ran the wrapper as written, with mirrors on demand"
    for _ in range(3):
        step(captured)
    assert runner_of(captured).stats.replays >= 1


def test_what_keeps_something_is_not_split_and_the_log_says_so(built: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = copy.deepcopy(built("torch").model)
    model.__dict__.pop("forward", None)

    class Keeps(type(model)):  # type: ignore[misc]
        def forward_inference(self, csi: Any) -> Any:
            result = super().forward_inference(csi)
            self.last = result.new_tokens_lens
            return result

    model.__class__ = Keeps
    with caplog.at_level(logging.WARNING, logger="auto_deploy_ext"):
        captured = SimpleNamespace(model=capture_model(model, built("torch").cm, "segments")[0], cm=built("torch").cm)
    assert "consumers are captured instead: the assignment of last keeps something" in caplog.text
    for _ in range(3):
        output = step(captured)
    assert torch.equal(model.last, output.new_tokens_lens)
    assert runner_of(captured).stats.captures == 0 and model.draft_model.stats.replays > 0


def test_mirrors_on_demand_and_launched_host_functions_run_consumers(
    built: Any, flashinfer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = built("flashinfer")
    hooked = copy.deepcopy(pipeline.model)
    scope_module(hooked, pipeline.cm, ScopeOptions(mode="hooks"))
    with caplog.at_level(logging.WARNING, logger="auto_deploy_ext"):
        hooked, _ = capture_model(hooked, pipeline.cm, "segments")
    assert "mode: hooks" in caplog.text and isinstance(hooked.forward, HookedForward)
    launching = copy.deepcopy(built("torch").model)
    launching.draft_model.fc2 = nn.Identity()
    launching.draft_model.fc2.launches_hostfuncs = True
    with caplog.at_level(logging.WARNING, logger="auto_deploy_ext"):
        capture_model(launching, built("torch").cm, "segments")
    assert "fc2 launches host functions" in caplog.text


def test_the_config_takes_it_and_the_check_treats_it_like_consumers(
    built: Any, flashinfer: Any, tmp_path: Path
) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL % 16 + "transforms: {check_capture: {}, compile_model: {capture: segments}}\n")
    config = load_config(str(path), overrides={"compile_backend": "torch-cudagraph"})
    assert CompileModelConfig(**config.transforms["compile_model"]).capture == "segments"
    check = TransformRegistry.get("check_capture").from_kwargs(**config.transforms["check_capture"])
    assert check.config.capture == "segments"
    pipeline = built("flashinfer")  # whose consumers read mirrors, but only to plan
    model = copy.deepcopy(pipeline.model)
    assert check(model, pipeline.cm, None, SharedConfig(), 0) is model
    assert model.meta["_autodeploy"]["transform_history"]["check_capture"].num_matches == 1
