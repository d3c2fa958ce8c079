"""The pipeline's transforms one by one, on small graphs."""

import copy
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from pydantic import ValidationError
from torch import fx, nn
from torch.fx import Node

from auto_deploy_ext.embedded.custom_ops.attention_interface import (
    AttentionDescriptor,
    AttentionRegistry,
    UnpagedResourceHandler,
)
from auto_deploy_ext.embedded.export import EXPORT_META_KEY, ExportedGraphModule
from auto_deploy_ext.embedded.models.factory import CausalLMFactory
from auto_deploy_ext.embedded.shim.interface import CachedSequenceInterface
from auto_deploy_ext.embedded.transform.interface import SharedConfig, TransformError, TransformRegistry
from auto_deploy_ext.embedded.transform.library.compile_model import CompileModel
from auto_deploy_ext.embedded.transform.library.detect_hidden_states_for_capture import layer_outputs

OPS = torch.ops.auto_deploy_ext
LLAMA = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@torch.library.custom_op("auto_deploy_ext_test::prepare_rows", mutates_args=())
def prepare_rows(cu_seqlen: torch.Tensor, slot_idx: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for a backend's op that computes metadata once per forward."""
    return cu_seqlen * factor, slot_idx + factor


@prepare_rows.register_fake
def _(cu_seqlen: torch.Tensor, slot_idx: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(cu_seqlen), torch.empty_like(slot_idx)


@torch.library.custom_op("auto_deploy_ext_test::record", mutates_args=("cache",))
def record(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_len: torch.Tensor,
    scaled: torch.Tensor,
    shifted: torch.Tensor,
    cache: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """Stands for a backend's cached op."""
    cache[0, 0] = scaled.sum() + shifted.sum()
    return q * 1.0


@record.register_fake
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_len: torch.Tensor,
    scaled: torch.Tensor,
    shifted: torch.Tensor,
    cache: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    return torch.empty_like(q)


HOST_CALLS: list[list[int]] = []


def plan_on_host(seq_len_host: torch.Tensor) -> None:
    HOST_CALLS.append(seq_len_host[:2].tolist())


class Recording(AttentionDescriptor):
    """A backend with everything that a descriptor can ask for."""

    @classmethod
    def get_attention_layout(cls) -> Any:
        return "bsnd"

    @classmethod
    def get_num_qkv_args(cls) -> int:
        return 3

    @classmethod
    def get_source_attention_op(cls) -> Any:
        return OPS.torch_attention

    @classmethod
    def get_cached_attention_op(cls) -> Callable[..., Any]:
        return torch.ops.auto_deploy_ext_test.record.default

    @classmethod
    def get_standard_metadata_args(cls) -> list[str]:
        return ["seq_len"]

    @classmethod
    def get_prepare_extra_metadata_info(cls, any_source_attn_node: Node) -> Any:
        return torch.ops.auto_deploy_ext_test.prepare_rows.default, 2, [3]

    @classmethod
    def get_cache_initializers(cls, source_attn_node: Node, cache_config: Any) -> Any:
        return {"notes": UnpagedResourceHandler(dtype=torch.float32)}

    @classmethod
    def get_constants(cls, source_attn_node: Node) -> list[Any]:
        return [source_attn_node.args[3]]

    @classmethod
    def get_host_prepare_metadata_function(cls) -> Any:
        return plan_on_host


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(AttentionRegistry, "_registry", {**AttentionRegistry._registry, "recording": Recording})
    HOST_CALLS.clear()
    return "recording"


@pytest.fixture
def cm() -> CachedSequenceInterface:
    return CachedSequenceInterface(max_seq_len=16, max_batch_size=2, max_num_tokens=16, device="cpu")


def apply(
    key: str, mod: nn.Module | None, cm: CachedSequenceInterface, factory: Any = None, **config: Any
) -> nn.Module:
    """Run one transform on a model."""
    transform = TransformRegistry.get(key).from_kwargs(**({"stage": "cache_init"} | config))
    return cast(nn.Module, transform(mod, cm, factory, SharedConfig()))


def history(mod: nn.Module, key: str) -> Any:
    return mod.meta["_autodeploy"]["transform_history"][key]


def targets(gm: fx.GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.find_nodes(op="placeholder")]


def attention_graph(role: str = "model", layers: int = 2, names: tuple[str, ...] = ("x",)) -> ExportedGraphModule:
    """Applies the source op to its input, `layers` times over; meta has the shapes."""
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in names]
    current = nodes[0]
    current.meta["val"] = torch.empty(1, 3, 2, 8)
    for _ in range(layers):
        current = graph.call_function(OPS.torch_attention.default, (current, current, current, 0.5))
        current.meta["val"] = torch.empty(1, 3, 2, 8)
    graph.output(current)
    gm = ExportedGraphModule({}, graph)
    gm.meta[EXPORT_META_KEY] = {"role": role}
    return gm


# ---------------------------------------------------------------- insert_cached_attention


def test_every_source_op_gets_caches_of_its_own_and_metadata_once(cm: CachedSequenceInterface) -> None:
    gm = apply("insert_cached_attention", attention_graph(), cm, backend="torch")
    metadata = ["batch_info_host", "seq_len", "input_pos", "slot_idx", "cu_seqlen"]
    assert targets(gm) == ["x", *metadata, "k_cache_0", "v_cache_0", "k_cache_1", "v_cache_1"]
    assert history(gm, "insert_cached_attention").num_matches == 2
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert [node.target for node in calls] == [OPS.torch_cached_attention.default] * 2
    assert [str(arg.target) for arg in calls[1].args[3:-1]] == [*metadata, "k_cache_1", "v_cache_1"]
    assert calls[1].args[0] is calls[0] and calls[1].args[-1] == 0.5
    assert calls[0].meta["val"].shape == (1, 3, 2, 8)
    assert set(metadata) <= {*cm.info._active_args, "batch_info_host"}


def test_target_and_draft_choose_backends_independently(cm: CachedSequenceInterface) -> None:
    model = nn.ModuleDict({"target": attention_graph("target", 1), "draft": attention_graph("draft", 1)})
    apply("insert_cached_attention", model, cm, run_per_gm=True, backend="torch_paged", draft_backend="torch")
    assert targets(model["target"])[-1] == "kv_cache_0"
    assert targets(model["draft"])[-2:] == ["draft_k_cache_0", "draft_v_cache_0"]
    assert not any(str(name).endswith("_host") for name in targets(model["draft"]) if name != "batch_info_host")


def test_a_draft_without_a_backend_of_its_own_takes_the_targets(cm: CachedSequenceInterface) -> None:
    gm = apply("insert_cached_attention", attention_graph("draft", 1), cm, backend="torch_paged")
    assert targets(gm)[-1] == "draft_kv_cache_0"


def test_an_argument_whose_name_a_node_has_already_keeps_its_name(cm: CachedSequenceInterface) -> None:
    gm = attention_graph(layers=1)
    next(node for node in gm.graph.nodes if node.op == "call_function")._rename("slot_idx")
    gm.recompile()
    gm = apply("insert_cached_attention", gm, cm, backend="torch")
    node = next(node for node in gm.graph.find_nodes(op="placeholder") if node.target == "slot_idx")
    assert node.name != "slot_idx"


def test_a_graph_without_source_ops_is_left_alone(cm: CachedSequenceInterface) -> None:
    gm = attention_graph(layers=0)
    code = gm.code
    apply("insert_cached_attention", gm, cm)
    assert gm.code == code and history(gm, "insert_cached_attention").skipped


def test_extra_metadata_is_computed_once_from_arguments_named_like_its_parameters(
    cm: CachedSequenceInterface, recording: str
) -> None:
    gm = cast(ExportedGraphModule, apply("insert_cached_attention", attention_graph(), cm, backend=recording))
    assert targets(gm) == ["x", "seq_len", "cu_seqlen", "slot_idx", "notes_0", "notes_1"]
    prepared = [n for n in gm.graph.nodes if n.target is torch.ops.auto_deploy_ext_test.prepare_rows.default]
    assert len(prepared) == 1 and prepared[0].args[-1] == 3
    caches = {name: torch.zeros(2, 4) for name in ("notes_0", "notes_1")}
    ints = {"seq_len": torch.ones(1), "cu_seqlen": torch.tensor([0, 2]), "slot_idx": torch.tensor([5])}
    gm(x=torch.ones(1, 2, 2, 8), **ints, **caches)
    assert caches["notes_0"][0, 0] == caches["notes_1"][0, 0] == 2 * 3 + 5 + 3


def test_a_host_prepare_function_is_registered_once_for_all_graphs(cm: CachedSequenceInterface, recording: str) -> None:
    model = nn.ModuleDict({"target": attention_graph("target", 1), "draft": attention_graph("draft", 1)})
    apply("insert_cached_attention", model, cm, run_per_gm=True, backend=recording)
    assert "seq_len_host" in cm.info._active_host_prep_args
    cm.info.nest_sequences([1, 2, 3], cu_seqlen=[0, 1, 3], input_pos=0, slot_idx=[0, 1])
    assert HOST_CALLS == [[1, 2]]


def test_an_unknown_backend_is_named_with_the_nearest(cm: CachedSequenceInterface) -> None:
    with pytest.raises(ValueError, match=r"torch_pagd.*torch_paged"):
        apply("insert_cached_attention", attention_graph(), cm, backend="torch_pagd")


# ---------------------------------------------------------------- build, export, capture


@pytest.fixture(scope="module")
def built() -> Iterator[tuple[CausalLMFactory, nn.Module]]:
    factory = CausalLMFactory(
        model_kwargs=LLAMA, speculative_config={"decoding_type": "Eagle3", "max_draft_len": 2}, seed=1
    )
    interface = CachedSequenceInterface(max_seq_len=16, max_batch_size=2, max_num_tokens=16, device="cpu")
    model = apply("build_model", None, interface, factory, stage="factory", run_per_gm=False)
    yield factory, apply("export_to_gm", model, interface, factory, stage="export", run_per_gm=False)


def test_target_and_draft_become_graph_modules_inside_the_wrapper(built: tuple[CausalLMFactory, Any]) -> None:
    factory, model = built
    assert isinstance(model.target_model, ExportedGraphModule) and model.target_model.role == "target"
    assert isinstance(model.draft_model, ExportedGraphModule) and model.draft_model.role == "draft"
    assert targets(model.target_model) == ["inputs_embeds", "position_ids"]
    assert targets(model.draft_model) == ["inputs_embeds", "position_ids", "hidden_states"]
    eager = factory.build_model()
    assert set(eager.state_dict()) == set(model.state_dict())
    ids = torch.randint(0, 48, (2, 6), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, eager(input_ids=ids).logits)
        torch.testing.assert_close(model(input_ids=ids).draft_logits, eager(input_ids=ids).draft_logits)


def test_a_model_that_is_there_is_not_built_again(cm: CachedSequenceInterface) -> None:
    mod = nn.Linear(1, 1)
    assert apply("build_model", mod, cm, None, run_per_gm=False) is mod
    assert history(mod, "build_model").skipped


def test_captured_states_are_the_layers_outputs(
    built: tuple[CausalLMFactory, Any], cm: CachedSequenceInterface
) -> None:
    factory, model = built
    model = copy.deepcopy(model)
    draft_code = model.draft_model.code
    apply("detect_hidden_states_for_capture", model, cm, factory)
    assert model.draft_model.code == draft_code
    names = [f"hidden_states_cache_{index}" for index in range(3)]
    assert targets(model.target_model) == ["inputs_embeds", "position_ids", *names]
    cm.initialize_resources()
    assert cm.get_arg(names[0]).shape == (16, 32)

    eager = factory.build_target()
    ids = torch.randint(0, 48, (2, 5), generator=torch.Generator().manual_seed(0))
    embeds, positions = eager.get_input_embeddings()(ids), torch.arange(5).repeat(2, 1)
    layers: list[torch.Tensor] = []
    for layer in eager.model.layers:
        layer.register_forward_hook(lambda module, args, output: layers.append(output))
    with torch.no_grad():
        eager(embeds, positions)
        model.target_model(embeds, positions, **{name: cm.get_arg(name) for name in names})
    for layer, name in zip(factory.layers_to_capture(), names, strict=True):
        torch.testing.assert_close(cm.get_arg(name)[:10], layers[layer].flatten(0, 1))
        assert cm.get_arg(name)[10:].abs().max() == 0


def test_capture_survives_dead_code_elimination_and_copies(
    built: tuple[CausalLMFactory, Any], cm: CachedSequenceInterface
) -> None:
    factory, model = built
    captured = copy.deepcopy(model.target_model)
    apply("detect_hidden_states_for_capture", captured, cm, factory, layers=[2, 0])
    for gm in (captured, copy.deepcopy(captured)):
        gm.graph.eliminate_dead_code()
        captures = [n for n in gm.graph.nodes if n.target is OPS.capture_hidden_states.default]
        assert [str(node.args[1].target) for node in captures] == ["hidden_states_cache_0", "hidden_states_cache_1"]


def test_a_layer_that_the_graph_does_not_show_is_an_error(
    built: tuple[CausalLMFactory, Any], cm: CachedSequenceInterface
) -> None:
    factory, model = built
    assert sorted(layer_outputs(model.target_model.graph)) == [0, 1, 2]
    with pytest.raises(TransformError, match=r"layers \[7\]; layers recognised in the graph: 0, 1, 2"):
        apply("detect_hidden_states_for_capture", copy.deepcopy(model.target_model), cm, factory, layers=[7])


# ---------------------------------------------------------------- caches, compile


def test_caches_exist_after_initialisation_and_follow_a_resize(cm: CachedSequenceInterface) -> None:
    gm = apply("insert_cached_attention", attention_graph(), cm, backend="torch_paged")
    apply("initialize_cache", gm, cm, run_per_gm=False)
    assert history(gm, "initialize_cache").num_matches == 2
    assert cm.get_arg("kv_cache_0").shape[1:] == (2, 2, 32, 8)
    apply("resize_kv_cache", gm, cm, run_per_gm=False, num_blocks=5)
    assert cm.get_arg("kv_cache_0").shape[0] == cm.get_arg("kv_cache_1").shape[0] == cm.info.num_blocks == 5


def test_compile_model_names_the_backends_that_exist(cm: CachedSequenceInterface) -> None:
    mod = nn.Dropout().train()
    assert apply("compile_model", mod, cm, run_per_gm=False, stage="compile") is mod and not mod.training
    with pytest.raises(ValidationError, match="torch-cudagraph, torch-simple; did you mean 'torch-simple'"):
        CompileModel.from_kwargs(stage="compile", backend="torch-smple")


@pytest.mark.parametrize(
    "key",
    [
        "build_model",
        "export_to_gm",
        "load_weights",
        "detect_hidden_states_for_capture",
        "insert_cached_attention",
        "initialize_cache",
        "resize_kv_cache",
        "compile_model",
    ],
)
def test_unknown_fields_are_refused(key: str) -> None:
    with pytest.raises(ValidationError, match="bakcend"):
        TransformRegistry.get(key).from_kwargs(stage="compile", bakcend="torch")
