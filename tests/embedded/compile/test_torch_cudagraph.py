"""Compile backend torch-cudagraph on small pipelines: equal tokens and state, what is refused, what still works."""

from __future__ import annotations

import copy
import logging
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from auto_deploy_ext import TransformRegistry, sanitize
from auto_deploy_ext.embedded.compile.backend import capture_model
from auto_deploy_ext.embedded.compile.batch_sizes import default_batch_sizes, padded_batch_size
from auto_deploy_ext.embedded.compile.captured_module import CapturedModule
from auto_deploy_ext.embedded.config import ConfigError, load_config
from auto_deploy_ext.embedded.custom_ops import flashinfer_planner
from auto_deploy_ext.embedded.generation import generate
from auto_deploy_ext.embedded.pipeline import Pipeline, build_pipeline
from auto_deploy_ext.orchestrator import original_forward
from auto_deploy_ext.orchestrator.dispatch import dispatcher_of
from auto_deploy_ext.reports.capture import CaptureError, obstacles_in_consumers
from auto_deploy_ext.rewriting.scoping import ScopeOptions, scope_module
from auto_deploy_ext.runtime.hooks import HookedForward
from tests.double import flashinfer as double

K = 2
SMALL = """
model_kwargs: {model_type: llama, vocab_size: 256, hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1,
               num_attention_heads: 2, num_key_value_heads: 2, head_dim: %d}
speculative_config: {decoding_type: Eagle3, max_draft_len: 2, eagle3_layers_to_capture: [0]}
speculative_model_kwargs: {num_captured_layers: 1}
kv_cache_config: {tokens_per_block: 4}
max_seq_len: 64
"""
SCOPE = "transforms: {annotate_active_args: {stage: cache_init}, scope_host_mirrors: {stage: cache_init}}\n"
PROMPTS = [[1, 2, 3], [7], [5, 6, 5, 6, 5], [9, 8], [4, 4, 4, 4]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that gives a small pipeline; the same arguments give the same one."""
    known: dict[tuple[Any, ...], Pipeline] = {}

    def of(compiled: str = "torch-cudagraph", capture: str = "consumers", backend: str = "torch", **more: Any) -> Any:
        key = (compiled, capture, backend, *map(str, sorted(more.items())))
        if key not in known:
            path = tmp_path_factory.mktemp("capture") / "small.yaml"
            path.write_text(SMALL % (64 if backend == "flashinfer" else 16) + SCOPE)
            values = {"compile_backend": compiled, "attn_backend": backend, "draft_attn_backend": backend, **more}
            if compiled == "torch-cudagraph":
                values["transforms.compile_model.capture"] = capture
            known[key] = build_pipeline(load_config(str(path), overrides=values))
        return known[key]

    return of


def captured_copy(pipeline: Any, capture: str = "consumers", batch_sizes: list[int] | None = None) -> Any:
    """A copy of a pipeline's model, captured, with the same interface."""
    model, _ = capture_model(copy.deepcopy(pipeline.model), pipeline.cm, capture, batch_sizes)
    return SimpleNamespace(model=model, cm=pipeline.cm)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The double in the place of the package."""
    monkeypatch.setitem(sys.modules, "flashinfer", double)
    monkeypatch.setattr(flashinfer_planner, "_planners", {})
    double.calls.clear()
    return double


def tokens(pipeline: Any, model: Any = None, length: int = 12, num_prompts: int = 5, **options: Any) -> Any:
    result = generate(model or pipeline.model, pipeline.cm, PROMPTS[:num_prompts], length, **options)
    return [output.tokens for output in result.outputs]


def stats(model: Any) -> dict[str, int]:
    dispatcher = dispatcher_of(model)
    runner = getattr(dispatcher, "runner", None)
    counted = [runner.stats] if runner is not None else [model.target_model.stats, model.draft_model.stats]
    return {field: sum(getattr(s, field) for s in counted) for field in ("eager", "captures", "replays")}


def with_pages(pipeline: Any) -> Any:
    """Have the page tables adjusted although the unpaged backend reads none."""
    for name in ("cache_loc", "cu_num_pages", "last_page_len"):
        pipeline.cm.info.activate_arg(name)
    return pipeline


def nest(pipeline: Any, rows: int = 2, past: int = 5, cache_loc: list[int] | None = None) -> None:
    """An extend-only batch with a history, on empty caches."""
    cm = pipeline.cm
    for cache in cm.kv_cache_manager.resources.values():
        cache.zero_()
    ids = [[(7 * i + j) % 200 for j in range(1 + K)] for i in range(rows)]
    cm.info.set_example_sequence(
        ids,
        input_pos=past,
        batch_info=[0, 0, rows, rows * (1 + K), 0, 0],
        extra_page_per_seq_per_pool=[[40 + i for i in range(rows)]],
        **({} if cache_loc is None else {"cache_loc_per_pool": [cache_loc]}),
    )


def step(pipeline: Any, rows: int = 2, past: int = 5, cache_loc: list[int] | None = None) -> Any:
    """Run the model on that batch."""
    nest(pipeline, rows, past, cache_loc)
    with torch.no_grad():
        return pipeline.model(pipeline.cm)


def state(cm: Any) -> tuple[Any, ...]:
    """Host state, and what is in use of the buffers on the device."""
    buffer = cm.info._input_buffer
    names = buffer.tensor_names
    lengths = {name: buffer.get_current_length(name) for name in names}
    versions = {name: (buffer.device_version[name], buffer.mirror_version[name]) for name in names}
    values = {name: buffer.get_view(name, truncate=True).tolist() for name in names}
    values["cache_loc"] = values["cache_loc"][: values["cu_num_pages"][-1]]
    return cm.info.batch_info.serialize().tolist(), lengths, versions, values


# ---------------------------------------------------------------- tokens and state


@pytest.mark.parametrize("capture", ["consumers", "full"])
@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_those_of_torch_simple(built: Any, capture: str, overlap: bool) -> None:
    expected = tokens(built("torch-simple"))
    captured = built(capture=capture)
    for _ in range(2):
        before = stats(captured.model)
        assert tokens(captured, overlap=overlap) == expected
    assert stats(captured.model)["replays"] > before["replays"] + 4


def test_plain_decoding_replays_the_target(built: Any) -> None:
    captured = built()
    for _ in range(2):
        before = captured.model.target_model.stats.replays
        assert tokens(captured, speculative=False) == tokens(built("torch-simple"))
    assert captured.model.target_model.stats.replays > before + 8


@pytest.mark.parametrize("capture", ["consumers", "full"])
def test_state_after_a_replay_is_that_after_an_eager_run(built: Any, capture: str) -> None:
    plain, captured = with_pages(built("torch-simple")), with_pages(built(capture=capture))
    with torch.no_grad():
        for past in (5, 5, 5, 5, 9, 2, 18):  # tables of other lengths, some with pages that are crossed
            same = [step(pipeline, past=past) for pipeline in (plain, captured)]
            assert all(torch.equal(same[0][name], same[1][name]) for name in same[0])
            states = [state(pipeline.cm) for pipeline in (plain, captured)]
            assert states[1][:2] == states[0][:2]
            assert states[1][3] == states[0][3]
            ages = [{name: d - m for name, (d, m) in s[2].items()} for s in states]
            assert ages[1] == ages[0]
    assert stats(captured.model)["replays"] >= 4


def test_results_of_a_captured_forward_may_be_kept(built: Any) -> None:
    captured = built(capture="full")
    kept = [step(captured, past=past) for past in (3, 3, 3, 7)]
    values = [{name: value.tolist() for name, value in output.items()} for output in kept]
    for past in (3, 7):
        step(captured, past=past)
    assert [{name: value.tolist() for name, value in output.items()} for output in kept] == values
    assert len({output.new_tokens.data_ptr() for output in kept}) == 4


def test_a_batch_near_the_end_of_the_page_table_stays_eager(built: Any) -> None:
    """Its table might have grown further than its memory, so nothing tells by how much another batch's grows."""
    captured = with_pages(captured_copy(built("torch-simple"), "full", [3]))
    buffer = captured.cm.info._input_buffer
    long = buffer.get_capacity("cache_loc")
    step(captured, rows=1)  # of no captured size; the variants are traced anew for the arguments that are active now
    dispatcher_of(captured.model).runner.stats.eager = 0
    for _ in range(3):
        step(captured, rows=3, past=3, cache_loc=list(range(long - 2)))
        assert buffer.get_current_length("cache_loc") == long
    assert stats(captured.model) == {"eager": 3, "captures": 0, "replays": 0}
    for _ in range(3):
        step(captured, rows=3, past=3)
        assert buffer.get_current_length("cache_loc") < long
    assert stats(captured.model) == {"eager": 4, "captures": 1, "replays": 1}
    step(captured, rows=3, past=3, cache_loc=list(range(long - 2)))
    assert buffer.get_current_length("cache_loc") == long
    assert stats(captured.model) == {"eager": 4, "captures": 1, "replays": 2}


# ---------------------------------------------------------------- planning


def test_flashinfer_plans_before_every_replay(built: Any, flashinfer: Any) -> None:
    plain = built("torch-simple", backend="flashinfer", dtype="bfloat16")
    captured = captured_copy(plain)
    expected = tokens(plain, length=6, num_prompts=2)
    with sanitize(captured.cm.info):
        assert tokens(captured, length=6, num_prompts=2) == expected
    assert stats(captured.model)["replays"] >= 3


def test_flashinfer_is_refused_in_a_full_capture(built: Any, flashinfer: Any) -> None:
    with pytest.raises(CaptureError, match=r"draft_model reads .*seq_len_with_cache_host(.|\n)*capture: consumers"):
        captured_copy(built("torch-simple", backend="flashinfer", dtype="bfloat16"), "full")


# ---------------------------------------------------------------- what is refused, and what is said


@pytest.mark.parametrize("capture", ["consumers", "full"])
def test_consumers_that_plan_inside_are_refused(built: Any, capture: str) -> None:
    pipeline = built("torch-simple")
    model = copy.deepcopy(pipeline.model)
    draft = model.draft_model
    with draft.graph.inserting_before(next(iter(draft.graph.nodes))):
        mirror = draft.graph.placeholder("cu_seqlen_host")
    with draft.graph.inserting_before(draft.graph.output_node()):
        draft.graph.call_function(torch._assert, (draft.graph.call_method("numel", (mirror,)), "planned"))
    draft.recompile()
    with pytest.raises(CaptureError, match="draft_model reads cu_seqlen_host"):
        capture_model(model, pipeline.cm, capture)


def test_unknown_backends_are_refused_with_a_suggestion(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL % 16)
    for key in ("compile_backend", "transforms.compile_model.backend"):
        with pytest.raises(ConfigError, match=r"did you mean 'torch-cudagraph'\?"):
            load_config(str(path), overrides={key: "torch-cudagraphs"})
    with pytest.raises(ConfigError, match=r"did you mean 'consumers'\?"):
        load_config(str(path), overrides={"transforms.compile_model.capture": "consumer"})


def test_batch_sizes_beyond_the_interface_are_refused(built: Any) -> None:
    with pytest.raises(ValueError, match=r"must lie in 1..4 \(max_batch_size\), got \[2, 8\]"):
        captured_copy(built("torch-simple"), batch_sizes=[2, 8])


def test_a_forward_that_launches_host_functions_is_refused_as_a_whole(built: Any) -> None:
    pipeline = built("torch-simple")
    model = copy.deepcopy(pipeline.model)
    model.guided = nn.Identity()
    model.guided.launches_hostfuncs = True
    with pytest.raises(CaptureError, match="guided launches host functions"):
        capture_model(model, pipeline.cm, "full")


def test_a_forward_that_does_something_in_python_is_refused_as_a_whole(built: Any) -> None:
    pipeline = built("torch-simple")
    model = copy.deepcopy(pipeline.model)
    del model.__dict__["forward"]

    class Counts(type(model)):  # type: ignore[misc]
        def forward_inference(self, csi: Any) -> Any:
            result = super().forward_inference(csi)
            self.last = result.new_tokens_lens
            print("a step")
            return result

    model.__class__ = Counts
    with pytest.raises(CaptureError) as error:
        capture_model(model, pipeline.cm, "full")
    assert "the assignment of last" in str(error.value) and "builtins.print (%call" in str(error.value)


def test_a_cpu_is_told_that_it_saves_nothing(built: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="auto_deploy_ext"):
        captured_copy(built("torch-simple"))
    assert "torch-cudagraph on cpu: ordered calls stand in for device graphs" in caplog.text


# ---------------------------------------------------------------- afterwards


def test_sizes_are_told_for_padding(built: Any) -> None:
    assert built().model.captured_batch_sizes == (1, 2, 4) == default_batch_sizes(4)
    assert default_batch_sizes(1) == (1,) and default_batch_sizes(48) == (1, 2, 4, 8, 16, 32, 48)
    assert [padded_batch_size((1, 2, 4), rows) for rows in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 5]


def test_consumers_stay_annotated_and_checkable(built: Any) -> None:
    model = built().model
    assert isinstance(model.target_model, CapturedModule)
    assert model.target_model.meta["active_args"] == tuple(sorted(model.target_model._names))
    assert obstacles_in_consumers(model) == []
    assert list(model.state_dict()) == list(built("torch-simple").model.state_dict())


@pytest.mark.parametrize("capture", ["consumers", "full"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copied_wrapper_captures_anew(built: Any, capture: str, how: str) -> None:
    pipeline = built(capture=capture)
    expected = tokens(pipeline, length=8, num_prompts=1)
    twin = copy.deepcopy(pipeline.model) if how == "deepcopy" else pickle.loads(pickle.dumps(pipeline.model))
    assert stats(twin) == {"eager": 0, "captures": 0, "replays": 0}
    assert twin.captured_batch_sizes == (1, 2, 4)
    assert tokens(pipeline, twin, length=8, num_prompts=1) == expected
    assert stats(twin)["captures"] > 0


def in_the_place_of(freed: list[Any]) -> Any:
    """A shallow copy of the only element, which is freed, that lies where that lay."""
    original, kept = copy.copy(freed[0]), []
    place = id(freed.pop())
    for _ in range(10_000):
        kept.append(copy.copy(original))
        if id(kept[-1]) == place:
            return kept[-1]
    pytest.skip("the interpreter has not used the memory again")


@pytest.mark.parametrize("capture", ["full", "segments"])
def test_an_interface_in_the_memory_of_a_freed_one_is_another(built: Any, capture: str) -> None:
    pipeline = captured_copy(built("torch-simple"), capture, [2])
    dispatcher = dispatcher_of(pipeline.model)
    assert dispatcher is not None
    step(pipeline)
    nest(pipeline)
    variant, runner = dispatcher.select(pipeline.cm), type(dispatcher.runner)([2], K)

    @torch.no_grad()
    def drafts(interface: Any) -> list[list[int]]:
        nest(pipeline)
        return runner(variant, interface).next_draft_tokens.tolist()

    freed = [copy.copy(pipeline.cm)]
    expected = drafts(freed[0])
    other = in_the_place_of(freed)
    assert drafts(other) == expected
    assert (runner.stats.eager, runner.stats.captures) == (2, 0), "what was noted of the freed one counts no more"
    assert drafts(other) == expected
    assert (runner.stats.eager, runner.stats.captures) == (2, 1)


@pytest.mark.parametrize(("capture", "seed"), [("full", 11), ("segments", 12)])
def test_page_tables_that_come_into_use_later_are_captured_anew(built: Any, capture: str, seed: int) -> None:
    """Whoever prepares attention on the host may be the first to read one."""
    pipeline = captured_copy(built("torch-simple", seed=seed), capture, [2])
    for _ in range(3):
        step(pipeline)
    before = stats(pipeline.model)
    assert before["replays"] > 0
    pipeline.cm.info.register_host_prepare_for_attention_forward(lambda **_: None, ["last_page_len_host"])
    step(pipeline)
    after = stats(pipeline.model)
    assert (after["replays"], after["eager"]) == (before["replays"], before["eager"] + 1)
    shown = state(pipeline.cm)
    step(pipeline)
    step(pipeline)
    assert stats(pipeline.model)["replays"] > before["replays"]
    assert state(pipeline.cm)[3] == shown[3]


def test_variants_learned_later_call_the_same_captures(built: Any) -> None:
    pipeline = built()
    expected = tokens(pipeline)
    dispatcher = dispatcher_of(pipeline.model)
    assert dispatcher is not None
    before, captures = list(dispatcher.variants), stats(pipeline.model)["captures"]
    dispatcher.variants.clear()
    assert tokens(pipeline) == expected
    assert len(dispatcher.variants) >= 2 and dispatcher.variants[0] is not before[0]
    assert stats(pipeline.model)["captures"] == captures
    ran = [variant.__dict__["_lent_results"][1] for variant in dispatcher.variants if "_lent_results" in vars(variant)]
    assert ran and all(set(lenders) == {pipeline.model.target_model, pipeline.model.draft_model} for lenders in ran)
    dispatcher.variants[:] = before


def test_the_wrappers_own_forward_gets_copies(built: Any) -> None:
    pipeline = built()
    draft = pipeline.model.draft_model
    copied: list[bool] = []
    handle = draft.register_forward_hook(lambda *_: copied.append(draft.copies_results))
    step(pipeline)
    with original_forward(pipeline.model):
        step(pipeline)
    handle.remove()
    assert copied == [False] * K + [True] * K


def test_mirrors_on_demand_work_with_captured_consumers(built: Any, flashinfer: Any) -> None:
    plain = built("torch-simple", backend="flashinfer", dtype="bfloat16")
    captured = captured_copy(plain)
    scope_module(captured.model, captured.cm, ScopeOptions(mode="hooks"))
    assert isinstance(captured.model.forward, HookedForward)
    assert tokens(captured, length=6, num_prompts=2) == tokens(plain, length=6, num_prompts=2)
    assert stats(captured.model)["replays"] > 0


def test_the_check_takes_the_capture_of_compile_model(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL % 16 + "transforms: {check_capture: {}, compile_model: {capture: consumers}}\n")
    config = load_config(str(path), overrides={"compile_backend": "torch-cudagraph"})
    transform = TransformRegistry.get("check_capture").from_kwargs(**config.transforms["check_capture"])
    assert (transform.config.compile_backend, transform.config.capture) == ("torch-cudagraph", "consumers")
