"""fuse_metadata_mutations: what it does to wrappers and configs, and what it says where it can do nothing."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from auto_deploy_ext.transforms.fuse_metadata_mutations import FusionError
from pydantic import ValidationError
from torch import nn

import auto_deploy_ext
from auto_deploy_ext import SharedConfig, TransformRegistry, kernels, orchestrator_graphs, record_mirrors
from auto_deploy_ext.analysis.fused_nodes import is_fused
from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.generation import generate
from auto_deploy_ext.orchestrator import dispatcher_of
from auto_deploy_ext.reports.stale_check import check_module
from auto_deploy_ext.rewriting.fusion import FusingRecipe, fuse_graphs, fused_runs
from auto_deploy_ext.rewriting.scoping import ScopeOptions, scope_module
from tests.orchestrator.wrappers import DraftLoop, interface, nest
from tests.orchestrator_programs import OFFSET, SWITCH
from tests.test_decoding_equality import CONFIGS, LIMITS, PROMPTS, STRATEGIES, shared_pipeline, tokens_of

BATCH = ([], 3, 3)


def fuse(module: nn.Module, cm: Any, **fields: Any) -> Any:
    """Run the transform; returns its TransformInfo."""
    transform = TransformRegistry.get("fuse_metadata_mutations").from_kwargs(**fields)
    assert transform(module, cm, None, SharedConfig(), 0) is module
    return module.meta["_autodeploy"]["transform_history"]["fuse_metadata_mutations"]


def fused_loop(**options: Any) -> DraftLoop:
    wrapper = DraftLoop()
    scope_module(wrapper, interface(), ScopeOptions(**options))
    assert fuse(wrapper, interface()).num_matches > 0
    return wrapper


def result_of(wrapper: nn.Module) -> tuple[Any, ...]:
    cm = interface()
    torch.manual_seed(0)
    nest(cm, *BATCH)
    with record_mirrors(cm.info) as transfers:
        result = wrapper(csi=cm)
    return result.tokens.tolist(), result.lengths.tolist(), [(t.names, t.nbytes, t.trigger) for t in transfers]


def test_it_is_off_unless_a_config_names_it() -> None:
    for name in CONFIGS:
        assert "fuse_metadata_mutations" not in load_config(name).transforms
    config = load_config("eagle3_llama", overrides={"transforms.fuse_metadata_mutations.stage": "cache_init"})
    assert list(config.transforms)[-2:] == ["scope_host_mirrors", "fuse_metadata_mutations"]
    with pytest.raises(ValueError, match="leave run_per_gm at false"):
        TransformRegistry.get("fuse_metadata_mutations").from_kwargs(run_per_gm=True)
    with pytest.raises(ValidationError, match="on_unsuported"):
        TransformRegistry.get("fuse_metadata_mutations").from_kwargs(on_unsuported="skip")


def test_a_wrapper_gives_what_it_gave_and_says_how_many_runs_it_has() -> None:
    plain, cm = DraftLoop(), interface()
    scope_module(plain, cm, ScopeOptions())
    expected = result_of(plain)
    info = fuse(plain, cm)
    runs = fused_runs(orchestrator_graphs(plain))
    assert not info.skipped and info.num_matches == sum(map(len, runs.values())) > 0
    assert result_of(plain) == expected
    assert fuse(plain, cm).num_matches == 0
    for other in (copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        assert fused_runs(orchestrator_graphs(other)) == runs
        assert result_of(other) == expected


def test_variants_that_are_traced_later_are_fused_too() -> None:
    wrapper = fused_loop()
    dispatcher = dispatcher_of(wrapper)
    assert dispatcher is not None and isinstance(dispatcher.recipe, FusingRecipe)
    dispatcher.variants.clear()
    expected = DraftLoop()
    scope_module(expected, interface(), ScopeOptions())
    # The forward that meets a new batch runs as the wrapper is written.
    assert result_of(wrapper)[:2] == result_of(expected)[:2]
    (learned,) = orchestrator_graphs(wrapper).values()
    assert any(map(is_fused, learned.graph.nodes))
    assert result_of(wrapper) == result_of(expected)


def test_plans_and_checks_are_what_they_were() -> None:
    plain, cm = DraftLoop(), interface()
    scope_module(plain, cm, ScopeOptions(strategy="override"))
    plan, check = auto_deploy_ext.plan(plain, cm).to_json(), check_module(plain, cm, ScopeOptions()).to_json()
    fuse(plain, cm)
    assert auto_deploy_ext.plan(plain, cm).to_json() == plan
    assert check_module(plain, cm, ScopeOptions()).to_json() == check
    scope_module(plain, cm, ScopeOptions(strategy="copy"))
    fresh = DraftLoop()
    scope_module(fresh, cm, ScopeOptions(strategy="copy"))
    graphs = [{name: gm.code for name, gm in orchestrator_graphs(w).items()} for w in (plain, fresh)]
    assert graphs[0] == graphs[1]


def refused(wrapper: nn.Module, cm: Any, caplog: pytest.LogCaptureFixture) -> str:
    """Why nothing is fused, as the log and the error say."""
    with caplog.at_level(logging.WARNING):
        info = fuse(wrapper, cm)
    assert info.skipped and info.num_matches == 0
    with pytest.raises(FusionError, match="on_unsupported: skip leaves the model as it is") as error:
        fuse(wrapper, cm, on_unsupported="error")
    reason = str(error.value).removeprefix("fuse_metadata_mutations: ").partition("; on_unsupported")[0]
    assert reason in caplog.text
    return reason


def test_without_graphs_it_says_where_it_belongs(caplog: pytest.LogCaptureFixture) -> None:
    wrapper = DraftLoop()
    assert "put fuse_metadata_mutations behind scope_host_mirrors" in refused(wrapper, interface(), caplog)
    scope_module(wrapper, interface(), ScopeOptions(mode="hooks"))
    assert "mode: hooks" in refused(wrapper, interface(), caplog)


def test_a_host_of_another_layout_keeps_its_mutations(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = DraftLoop()
    cm = interface()
    scope_module(wrapper, cm, ScopeOptions())
    code = {name: gm.code for name, gm in orchestrator_graphs(wrapper).items()}

    class Other(type(cm.info)):  # type: ignore[misc]
        def switch_to_generate_(self, active_args_override: Any = None) -> None:
            super().switch_to_generate_(active_args_override)

    monkeypatch.setattr(cm.info, "__class__", Other)
    assert "Other has a switch_to_generate_ of its own" in refused(wrapper, cm, caplog)
    assert {name: gm.code for name, gm in orchestrator_graphs(wrapper).items()} == code


def test_a_gpu_without_triton_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from auto_deploy_ext.rewriting.fusion import reason_not_to_fuse

    cm = interface()
    assert reason_not_to_fuse(cm) is None
    monkeypatch.setattr(kernels, "has_triton", lambda: False)
    assert reason_not_to_fuse(cm) is None
    monkeypatch.setattr(cm.info._input_buffer, "_device", torch.device("cuda", 0))
    assert "pip install 'auto_deploy_ext[gpu]'" in str(reason_not_to_fuse(cm))


@pytest.mark.parametrize(
    ("name", "strategy"),
    [*(("eagle3_llama_paged", s) for s in STRATEGIES), ("eagle3_llama", "override"), ("mtp_hybrid", "auto")],
)
def test_fused_decoding_gives_greedy_tokens(name: str, strategy: str) -> None:
    pipeline, greedy = shared_pipeline(name)
    scope_module(pipeline.model, pipeline.cm, ScopeOptions(strategy=strategy))
    fuse_graphs(orchestrator_graphs(pipeline.model).values(), pipeline.cm)
    iteration = (SWITCH, "copy_", OFFSET)
    runs = fused_runs(orchestrator_graphs(pipeline.model))
    assert runs["extend"] == [("copy_", "copy_"), iteration, iteration]
    assert tokens_of(generate(pipeline.model, pipeline.cm, PROMPTS[:3], LIMITS[:3])) == greedy[:3]
