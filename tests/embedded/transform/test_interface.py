"""Transforms keep their history, clean up around themselves, undo what failed, and are found by their key."""

from __future__ import annotations

import copy
import logging
import operator
from types import SimpleNamespace

import pytest
import torch
from pydantic import ConfigDict, ValidationError
from torch import fx, nn

from auto_deploy_ext.embedded.transform.graph import ModuleSnapshot, propagate_shapes
from auto_deploy_ext.embedded.transform.interface import (
    BaseTransform,
    SharedConfig,
    Stages,
    TransformConfig,
    TransformError,
    TransformInfo,
    TransformRegistry,
)


class Interface:
    """What the base class uses of a CachedSequenceInterface."""

    def __init__(self) -> None:
        self.active: list[str] = []
        self.info = SimpleNamespace(activate_arg=self.active.append)


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.target_model = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        self.draft_model = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
        self.max_draft_len = 3


class AddLengths(BaseTransform):
    """Asks for the arg `cu_seqlen` in each graph."""

    def _apply(self, gm, cm, factory, shared_config):
        self._add_or_retrieve_input(gm, cm, "cu_seqlen")
        return gm, TransformInfo(skipped=False, num_matches=1)


class Vandal(BaseTransform):
    """Changes everything it can in the draft and fails there; the target it leaves alone."""

    def _apply(self, gm, cm, factory, shared_config):
        if "1" in gm._modules:
            return gm, TransformInfo(skipped=False)
        gm.graph.find_nodes(op="placeholder")[0].meta["seen"] = True
        self._add_or_retrieve_input(gm, cm, "cu_seqlen")
        gm.recompile()
        gm.scale = nn.Parameter(torch.ones(1))
        gm.note = "was here"
        gm.meta["note"] = "was here"
        gm._modules["0"] = nn.Identity()
        raise ValueError("the draft has no attention")


class BuildModel(BaseTransform):
    def _apply_to_full_model(self, mod, cm, factory, shared_config):
        assert mod is None
        return Wrapper(), TransformInfo(skipped=False, num_matches=1)


class Recorder(BaseTransform):
    """Notes in which graphs it met a dead node."""

    def _post_init(self):
        self.dead: list[int] = []

    def _apply(self, gm, cm, factory, shared_config):
        self.dead.append(len([n for n in gm.graph.nodes if n.target is operator.neg]))
        return gm, TransformInfo(skipped=False, is_clean=getattr(self.config, "vouch", False))


class Soil(BaseTransform):
    """Leaves a dead node behind."""

    def _apply(self, gm, cm, factory, shared_config):
        first = gm.graph.find_nodes(op="placeholder")[0]
        with gm.graph.inserting_after(first):
            gm.graph.call_function(operator.neg, (first,))
        return gm, TransformInfo(skipped=False, num_matches=1)


for _class in (AddLengths, Vandal, BuildModel, Recorder, Soil):
    _class._transform_key = _class.__name__.lower()


def run(transform: type[BaseTransform], mod, cm=None, idx: int = 0, **fields):
    fields = {"stage": "cache_init"} | fields
    return transform.from_kwargs(**fields)(mod, cm or Interface(), None, SharedConfig(), idx)


def history(mod: nn.Module) -> dict[str, TransformInfo]:
    return mod.meta["_autodeploy"]["transform_history"]


def arguments(gm: fx.GraphModule) -> list[str]:
    return [node.target for node in gm.graph.find_nodes(op="placeholder")]


def graph_with_defaults() -> fx.GraphModule:
    def forward(x, scale=2, **kwargs):
        return x * scale

    return fx.symbolic_trace(forward)


# Stages, info, config ---------------------------------------------------------------------------------------------


def test_stages_run_in_autodeploys_order():
    assert [stage.value for stage in sorted(Stages, reverse=True)][::-1] == [
        "factory",
        "export",
        "post_export",
        "pattern_matcher",
        "sharding",
        "weight_load",
        "post_load_fusion",
        "cache_init",
        "visualize",
        "export_onnx",
        "compile",
    ]
    assert Stages.CACHE_INIT < Stages.COMPILE
    assert Stages("export_onnx") <= Stages.COMPILE


def test_a_stage_does_not_compare_with_text():
    with pytest.raises(TypeError):
        assert Stages.FACTORY < "export"


def test_info_merges_flags_by_or_and_by_and():
    clean = TransformInfo(skipped=False, num_matches=2, is_clean=True)
    shaped = TransformInfo(skipped=True, num_matches=3, has_valid_shapes=True)
    assert clean | shaped == TransformInfo(skipped=False, num_matches=5, is_clean=True, has_valid_shapes=True)
    assert clean & shaped == TransformInfo(skipped=False, num_matches=5, is_clean=False, has_valid_shapes=False)
    assert (shaped & shaped).skipped


def test_info_is_frozen_and_empty_by_default():
    info = TransformInfo()
    assert info.model_dump() == {"skipped": True, "num_matches": 0, "is_clean": False, "has_valid_shapes": False}
    with pytest.raises(ValidationError):
        info.num_matches = 1


def test_config_has_autodeploys_defaults_and_keeps_unknown_fields():
    config = TransformConfig(stage="compile", backend="torch-simple")
    assert config.model_dump() == {
        "stage": Stages.COMPILE,
        "run_per_gm": True,
        "enabled": True,
        "skip_on_error": False,
        "run_graph_cleanup": True,
        "run_shape_prop": False,
        "requires_clean_graph": True,
        "requires_shape_prop": False,
        "debug_visualize_dir": None,
        "expect_mem_change": False,
        "backend": "torch-simple",
    }


def test_stage_is_required():
    with pytest.raises(ValidationError, match="stage"):
        TransformConfig()


def test_shared_config_is_one_rank_unless_told():
    assert SharedConfig(mapping="tp").model_dump() == {"local_rank": 0, "world_size": 1, "mapping": "tp"}


# Construction -----------------------------------------------------------------------------------------------------


def test_a_plain_config_becomes_the_transforms_own():
    class Own(TransformConfig):
        strategy: str = "override"

    class WithConfig(BaseTransform):
        @classmethod
        def get_config_class(cls):
            return Own

    transform = WithConfig(TransformConfig(stage="cache_init", strategy="copy"))
    assert type(transform.config) is Own
    assert transform.config.strategy == "copy"


def test_a_config_that_forbids_extras_says_so_at_construction():
    class Strict(TransformConfig):
        model_config = ConfigDict(extra="forbid")

    class WithStrict(BaseTransform):
        @classmethod
        def get_config_class(cls):
            return Strict

    with pytest.raises(ValidationError, match="strategi"):
        WithStrict.from_kwargs(stage="cache_init", strategi="copy")


@pytest.mark.parametrize("name", ["__init__", "__call__"])
def test_the_final_methods_cannot_be_overridden(name):
    with pytest.raises(TypeError, match=rf"Bad overrides BaseTransform\.{name}, which is final"):
        type("Bad", (BaseTransform,), {name: lambda self: None})


@pytest.mark.parametrize(("per_gm", "method"), [(True, "_apply,"), (False, "_apply_to_full_model;")])
def test_a_missing_implementation_names_the_method(per_gm, method):
    class Empty(BaseTransform):
        pass

    with pytest.raises(NotImplementedError, match=f"Empty has no {method}"):
        run(Empty, Wrapper(), run_per_gm=per_gm)


# Running ----------------------------------------------------------------------------------------------------------


def test_per_gm_runs_on_every_graph_and_adds_up_matches():
    mod, cm = Wrapper(), Interface()
    assert run(AddLengths, mod, cm) is mod
    assert arguments(mod.target_model) == ["input", "cu_seqlen"]
    assert arguments(mod.draft_model) == ["input", "cu_seqlen"]
    assert cm.active == ["cu_seqlen", "cu_seqlen"]
    assert history(mod) == {"addlengths": TransformInfo(skipped=False, num_matches=2, is_clean=True)}
    assert mod.draft_model(torch.zeros(1, 2), cu_seqlen=None).shape == (1, 2)


def test_an_argument_that_is_there_is_reused_and_not_activated_again():
    mod = run(AddLengths, Wrapper())
    cm = Interface()
    run(AddLengths, mod, cm)
    assert arguments(mod.target_model) == ["input", "cu_seqlen"]
    assert cm.active == []


def test_a_placeholder_keeps_its_argument_name_when_the_node_name_is_taken():
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.create_node("call_function", torch.neg, (x,), name="cu_seqlen"))
    gm = run(AddLengths, fx.GraphModule(nn.Module(), graph))
    added = gm.graph.find_nodes(op="placeholder")[1]
    assert (added.target, added.name) == ("cu_seqlen", "cu_seqlen_1")
    assert gm(torch.ones(2), cu_seqlen=None).tolist() == [-1.0, -1.0]


def test_a_new_argument_stands_before_those_with_defaults():
    gm = run(AddLengths, graph_with_defaults())
    assert arguments(gm) == ["x", "cu_seqlen", "scale", "**kwargs"]
    assert gm(3, cu_seqlen=None) == 6


def test_a_pytree_graph_cannot_take_an_argument():
    class Doubler(nn.Module):
        def forward(self, x):
            return {"twice": x * 2}

    exported = torch.export.export(Doubler(), (torch.ones(2),)).module()
    with pytest.raises(TransformError, match=r"'cu_seqlen'.*set_codegen"):
        run(AddLengths, exported)


def test_two_placeholders_of_one_target_are_an_error():
    graph = fx.Graph()
    graph.output(graph.placeholder("cu_seqlen"))
    gm = fx.GraphModule(nn.Module(), graph)
    with gm.graph.inserting_before():
        gm.graph.placeholder("cu_seqlen")
    with pytest.raises(TransformError, match="2 placeholders with the target 'cu_seqlen'"):
        AddLengths.from_kwargs(stage="cache_init")._add_or_retrieve_input(gm, Interface(), "cu_seqlen")


def test_the_first_transform_builds_the_model():
    mod = run(BuildModel, None, stage="factory", run_per_gm=False)
    assert mod.max_draft_len == 3
    assert list(history(mod)) == ["buildmodel"]


def test_a_replaced_module_is_replaced_under_all_its_names_and_keeps_the_history():
    class Replace(BaseTransform):
        _transform_key = "replace"

        def _apply(self, gm, cm, factory, shared_config):
            return copy.deepcopy(gm), TransformInfo(skipped=False, num_matches=1)

    mod = run(AddLengths, Wrapper())
    mod.alias = mod.draft_model
    old = mod.draft_model
    run(Replace, mod)
    assert mod.draft_model is mod.alias
    assert mod.draft_model is not old
    root = fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    new = run(Replace, run(AddLengths, root))
    assert new is not root
    assert list(history(new)) == ["addlengths", "replace"]


def test_without_graphs_there_is_nothing_to_do():
    mod = run(AddLengths, nn.Linear(1, 1))
    assert history(mod)["addlengths"] == TransformInfo(skipped=True, is_clean=True)


def test_a_disabled_transform_passes_the_flags_on():
    mod = run(AddLengths, Wrapper())
    run(Soil, mod, enabled=False)
    assert history(mod)["soil"] == TransformInfo(skipped=True, is_clean=True)
    assert "neg" not in mod.target_model.code


# Cleanup ----------------------------------------------------------------------------------------------------------


def test_dead_nodes_go_after_the_transform():
    mod = run(Soil, Wrapper())
    assert "neg" not in mod.target_model.code
    assert history(mod)["soil"].is_clean


def test_without_cleanup_the_next_transform_that_requires_a_clean_graph_gets_one():
    mod = run(Soil, Wrapper(), run_graph_cleanup=False)
    assert not history(mod)["soil"].is_clean
    tolerant = Recorder.from_kwargs(stage="cache_init", requires_clean_graph=False, run_graph_cleanup=False)
    tolerant(mod, Interface(), None, SharedConfig())
    assert tolerant.dead == [1, 1]
    strict = Recorder.from_kwargs(stage="cache_init")
    strict(mod, Interface(), None, SharedConfig())
    assert strict.dead == [0, 0]


def test_a_transform_cannot_vouch_for_what_was_unclean_before_it():
    mod = run(Soil, Wrapper(), run_graph_cleanup=False)
    run(Recorder, mod, vouch=True, requires_clean_graph=False, run_graph_cleanup=False)
    assert not history(mod)["recorder"].is_clean
    run(Recorder, mod, vouch=True, requires_clean_graph=False)
    assert history(mod)["recorder"].is_clean
    assert "neg" not in mod.draft_model.code


def test_shapes_are_propagated_on_request():
    mod = Wrapper()
    for gm in (mod.target_model, mod.draft_model):
        gm.graph.find_nodes(op="placeholder")[0].meta["val"] = torch.empty(5, 2)
    run(Recorder, mod, run_shape_prop=True)
    assert history(mod)["recorder"].has_valid_shapes
    assert [tuple(node.meta["val"].shape) for node in mod.target_model.graph.nodes if node.op == "call_module"] == [
        (5, 2),
        (5, 2),
    ]


def test_shapes_without_example_values_name_the_placeholders():
    with pytest.raises(TransformError, match="no meta\\['val'\\] on the placeholders input"):
        propagate_shapes(Wrapper().draft_model)


# Failure ----------------------------------------------------------------------------------------------------------


def test_a_failed_transform_leaves_the_model_as_it_was():
    mod = run(AddLengths, Wrapper())
    draft, before = mod.draft_model, str(mod.draft_model.graph)
    target_graph = mod.target_model.graph
    with pytest.raises(ValueError, match="the draft has no attention"):
        run(Vandal, mod)
    assert mod.draft_model is draft
    assert str(draft.graph) == before
    assert isinstance(draft.get_submodule("0"), nn.Linear)
    assert [name for name, _ in draft.named_parameters()] == ["0.weight", "0.bias"]
    assert not hasattr(draft, "note")
    assert "note" not in draft.meta
    assert "seen" not in draft.graph.find_nodes(op="placeholder")[0].meta
    assert draft(torch.zeros(1, 2), cu_seqlen=None).shape == (1, 2)
    assert mod.target_model.graph is target_graph
    assert list(history(mod)) == ["addlengths"]


def test_a_failure_names_the_transform_and_the_graph():
    mod = run(AddLengths, Wrapper())
    with pytest.raises(ValueError) as caught:
        run(Vandal, mod)
    assert caught.value.__notes__ == ["transform 'vandal' (stage cache_init) failed on graph 'draft_model'"]


def test_a_failure_can_be_skipped(caplog):
    mod = run(AddLengths, Wrapper())
    before = str(mod.draft_model.graph)
    with caplog.at_level(logging.WARNING, logger="auto_deploy_ext"):
        assert run(Vandal, mod, skip_on_error=True) is mod
    assert str(mod.draft_model.graph) == before
    assert history(mod)["vandal"] == TransformInfo(skipped=True, is_clean=True)
    assert caplog.messages == [
        "[stage=cache_init, transform=vandal] transform 'vandal' (stage cache_init) failed on graph 'draft_model' "
        "and is skipped: ValueError: the draft has no attention"
    ]


def test_a_snapshot_keeps_an_untouched_graph_and_its_nodes():
    mod = Wrapper()
    graph, nodes = mod.draft_model.graph, list(mod.draft_model.graph.nodes)
    snapshot = ModuleSnapshot(mod)
    mod.target_model.graph.find_nodes(op="output")[0].meta["changed"] = 1
    snapshot.restore()
    assert mod.draft_model.graph is graph
    assert list(graph.nodes) == nodes
    assert "changed" not in mod.target_model.graph.find_nodes(op="output")[0].meta


# Logs and dumps ---------------------------------------------------------------------------------------------------


def test_matches_are_logged_on_rank_0_alone(caplog, monkeypatch):
    with caplog.at_level(logging.INFO, logger="auto_deploy_ext"):
        run(AddLengths, Wrapper())
        monkeypatch.setenv("RANK", "1")
        run(AddLengths, Wrapper())
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("[stage=cache_init, transform=addlengths] applied 2 matches in ")


def test_other_ranks_warnings_say_who_speaks(caplog, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    run(Vandal, run(AddLengths, Wrapper()), skip_on_error=True)
    assert caplog.messages[0].startswith("[rank 3] [stage=cache_init, transform=vandal]")


def test_graphs_are_dumped_under_names_that_sort_by_position(tmp_path):
    run(AddLengths, Wrapper(), idx=7, debug_visualize_dir=str(tmp_path / "graphs"))
    files = sorted(path.name for path in (tmp_path / "graphs").iterdir())
    assert files == [
        "007_cache_init_addlengths_draft_model.txt",
        "007_cache_init_addlengths_target_model.txt",
    ]
    assert "cu_seqlen" in (tmp_path / "graphs" / files[0]).read_text()


# Registry ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch) -> type[TransformRegistry]:
    monkeypatch.setattr(TransformRegistry, "_registry", {})
    return TransformRegistry


def test_a_registered_transform_is_found_by_its_key(registry):
    @registry.register("scope_mirrors")
    class Scope(BaseTransform):
        pass

    assert registry.has("scope_mirrors")
    assert registry.get("scope_mirrors") is Scope
    assert registry.get_config_class("scope_mirrors") is TransformConfig
    assert registry.keys() == ("scope_mirrors",)
    assert Scope.get_transform_key() == "scope_mirrors"


def test_an_unknown_key_suggests_the_nearest(registry):
    registry.register("scope_host_mirrors")(type("Scope", (BaseTransform,), {}))
    with pytest.raises(KeyError, match=r"unknown transform 'scope_host_mirors'; did you mean 'scope_host_mirrors'\?"):
        registry.get("scope_host_mirors")
    with pytest.raises(KeyError, match="has the package that registers it been imported"):
        registry.get_config_class("fuse_moe")


def test_defining_a_class_anew_replaces_it_silently_and_another_class_with_a_warning(registry, caplog):
    registry.register("key")(type("Same", (BaseTransform,), {}))
    newer = registry.register("key")(type("Same", (BaseTransform,), {}))
    assert registry.get("key") is newer
    assert caplog.messages == []
    registry.register("key")(type("Other", (BaseTransform,), {}))
    assert caplog.messages == [f"transform key 'key': {__name__}.Other replaces {__name__}.Same"]
