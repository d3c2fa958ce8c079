"""check_capture: what may be captured, what may not, and what the error says before anything is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from auto_deploy_ext.transforms.check_capture import CaptureError
from torch import nn
from torch.fx import Graph, GraphModule

from auto_deploy_ext import SharedConfig, TransformRegistry
from auto_deploy_ext.embedded.config import ConfigError, load_config
from auto_deploy_ext.embedded.custom_ops.attention_interface import AttentionRegistry
from auto_deploy_ext.embedded.custom_ops.torch_paged_attention import TorchPagedAttention
from auto_deploy_ext.embedded.pipeline import Pipeline, build_pipeline
from auto_deploy_ext.orchestrator import orchestrator_graphs
from auto_deploy_ext.rewriting.scoping import ScopeOptions, scope_graphs
from tests.double import flashinfer as double
from tests.orchestrator_programs import OFFSET, SWITCH, build, consumer, make_interface
from tests.small_config import SMALL

PAGED = ("cu_num_pages_host", "cu_seqlen_host", "last_page_len_host", "seq_len_with_cache_host")

SCOPE = "transforms: {annotate_active_args: {stage: cache_init}, scope_host_mirrors: {stage: cache_init}%s}\n"


def check(mod: nn.Module, cm: Any, **fields: Any) -> Any:
    """Run the transform; returns its TransformInfo."""
    fields = {"compile_backend": "torch-cudagraph", **fields}
    transform = TransformRegistry.get("check_capture").from_kwargs(**fields)
    assert transform(mod, cm, None, SharedConfig(), 0) is mod
    return mod.meta["_autodeploy"]["transform_history"]["check_capture"]


def refusal(mod: nn.Module, cm: Any, **fields: Any) -> list[str]:
    """The lines of the error that name what is in the way, without their bullets."""
    with pytest.raises(CaptureError) as error:
        check(mod, cm, **fields)
    text = str(error.value).split("Change one of these:")[0]
    return [line.removeprefix("  * ") for line in text.splitlines() if line.startswith("  * ")]


def advice(mod: nn.Module, cm: Any, **fields: Any) -> str:
    with pytest.raises(CaptureError) as error:
        check(mod, cm, **fields)
    return str(error.value).split("Change one of these:")[1]


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that gives the small pipeline of these attention backends, rewritten by the pass."""
    built: dict[tuple[str, str], Pipeline] = {}

    def of(target: str, draft: str) -> Pipeline:
        if (target, draft) not in built:
            path = tmp_path_factory.mktemp("capture") / "small.yaml"
            path.write_text(f"{SMALL}attn_backend: {target}\ndraft_attn_backend: {draft}\n{SCOPE % ''}")
            built[target, draft] = build_pipeline(load_config(str(path)))
        return built[target, draft]

    return of


# -- backends ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch-simple", "torch-compile", None])
@pytest.mark.parametrize("capture", ["full", "consumers"])
def test_a_backend_that_captures_nothing_is_never_in_the_way(backend: str | None, capture: str) -> None:
    gm = build(["switch", ("consume", "draft")], {"draft": PAGED})
    info = check(gm, make_interface(PAGED), compile_backend=backend, capture=capture)
    assert (info.skipped, info.num_matches) == (True, 0)


@pytest.mark.parametrize("backend", ["torch-cudagraph", "torch-opt", "somebody-elses"])
def test_any_other_backend_captures(backend: str) -> None:
    gm = build([("consume", "draft")], {"draft": PAGED})
    assert refusal(gm, make_interface(PAGED), compile_backend=backend)


# -- the shape of a draft loop, whole ------------------------------------------------------------------------------


def test_an_orchestrator_that_reads_no_mirror_is_captured_whole(pipelines: Any) -> None:
    pipeline = pipelines("torch", "torch")
    info = check(pipeline.model, pipeline.cm)
    assert (info.skipped, info.num_matches) == (False, 1)


def test_a_paged_draft_loop_is_refused_with_who_what_and_why(pipelines: Any) -> None:
    pipeline = pipelines("torch_paged", "torch_paged")
    lines = refusal(pipeline.model, pipeline.cm)
    listed = ", ".join(PAGED)
    for name in ("target_model", "draft_model"):
        assert (
            f"{name} reads {listed}: its placeholders ask for those mirrors, and no graph can plan on the host" in lines
        )
    assert any(line.startswith(f"{OFFSET} (%") and "modeling_eagle.py:" in line for line in lines)
    text = advice(pipeline.model, pipeline.cm)
    assert "attn_backend (draft_attn_backend for the drafter): a backend that reads no host mirror" in text
    assert "capture: consumers" in text
    assert "but target_model, draft_model cannot be captured with its present backend either" in text
    assert "compile_backend: torch-compile or torch-simple" in text


def test_a_target_that_plans_on_the_host_is_in_the_way_of_a_drafter_that_does_not(pipelines: Any) -> None:
    pipeline = pipelines("torch_paged", "torch")
    lines = refusal(pipeline.model, pipeline.cm)
    assert any(line.startswith("target_model reads") for line in lines)
    assert not any("draft_model" in line or OFFSET in line or SWITCH in line for line in lines)


def test_an_orchestrator_that_was_not_rewritten_is_traced_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL + "attn_backend: torch_paged\n")
    pipeline = build_pipeline(load_config(str(path)))
    before = {k: v for k, v in vars(pipeline.model).items() if k != "meta"}
    lines = refusal(pipeline.model, pipeline.cm)
    listed = ", ".join(sorted({*PAGED} - {"cu_seqlen_host"}))
    assert any(
        line.startswith(OFFSET) and line.endswith(f"copies {listed} to the host (and with them the whole buffer)")
        for line in lines
    )
    assert {k: v for k, v in vars(pipeline.model).items() if k != "meta"} == before
    assert orchestrator_graphs(pipeline.model) == {}


def test_an_orchestrator_that_cannot_be_traced_is_refused() -> None:
    class Waits(nn.Module):
        def forward(self, csi: Any) -> Any:
            return csi.get_arg("input_pos").tolist()

    (line,) = refusal(Waits(), make_interface())
    assert line.startswith("nobody can tell what the orchestrator does, because it cannot be traced: ")


def test_what_is_refused_in_a_hand_built_orchestrator() -> None:
    cm = make_interface(["cu_seqlen_host", "input_pos_host"], prepared=["batch_info_host"])

    def lines(*steps: Any) -> list[str]:
        return refusal(build(list(steps), {"draft": ("input_pos_host",)}), cm)

    assert lines(("switch", {"cu_seqlen_host"})) == [f"{SWITCH} (%{SWITCH}) copies cu_seqlen_host to the host"]
    assert lines("offset") == [
        f"{OFFSET} (%{OFFSET}) copies input_pos_host to the host (and with them the whole buffer)"
    ]
    assert lines(("consume", "draft")) == [
        "draft reads input_pos_host: its placeholder asks for that mirror, and no graph can plan on the host"
    ]
    assert lines(("get", "cu_seqlen_host")) == ["get_arg(cu_seqlen_host) (%get_arg) reads cu_seqlen_host on the host"]
    assert lines("prepare") == [
        "run_host_prepare_for_attention_forward (%run_host_prepare_for_attention_forward) plans on the host"
    ]
    assert lines("unknown")[0].startswith("frobnicate (%frobnicate) may do anything with host mirrors: ")


def test_a_graph_whose_mutations_move_nothing_and_whose_mirrors_nobody_reads_is_captured() -> None:
    cm = make_interface(["cu_seqlen_host"])
    gm = build(["switch", ("copy", "input_ids"), "offset", ("consume", "draft")], {"draft": ("batch_info_host",)})
    assert refusal(gm, cm)
    scope_graphs({"graph": gm}, cm, ScopeOptions())
    assert check(gm, cm).num_matches == 1


@pytest.mark.parametrize(
    ("strategy", "what"),
    [
        ("override", f"{OFFSET} (%mutate_1) copies input_pos_host to the host"),
        ("copy", "wait_mirrors (%wait_mirrors) brings input_pos_host to the host"),
        ("replay", f"{OFFSET} (%mutate_1) has the host compute input_pos_host"),
    ],
)
def test_each_strategys_own_work_is_in_the_way(strategy: str, what: str) -> None:
    cm = make_interface(["input_pos_host"])
    gm = build(["switch", "offset", ("consume", "draft")], {"draft": ("input_pos_host",)})
    gm.meta["generate_only"] = False
    scope_graphs({"graph": gm}, cm, ScopeOptions(strategy=strategy))
    assert what in refusal(gm, cm)


def test_a_refresh_before_a_consumer_is_in_the_way_too() -> None:
    cm = make_interface(["input_ids_host"])
    gm = build([("copy", "input_ids"), ("consume", "draft")], {"draft": ("input_ids_host",)})
    scope_graphs({"graph": gm}, cm, ScopeOptions(strategy="override"))
    assert "bring_up_to_date (%bring_up_to_date) brings input_ids_host to the host" in refusal(gm, cm)


# -- consumers -----------------------------------------------------------------------------------------------------


def test_consumers_that_read_the_device_alone_are_captured_whatever_their_orchestrator_does(pipelines: Any) -> None:
    pipeline = pipelines("torch", "torch")
    assert check(pipeline.model, pipeline.cm, capture="consumers").num_matches == 1
    gm = build(["switch", ("get", "cu_seqlen_host"), ("consume", "draft")], {"draft": ("batch_info_host",)})
    cm = make_interface(["cu_seqlen_host"])
    assert check(gm, cm, capture="consumers").num_matches == 1
    assert refusal(gm, cm, capture="full")


def test_a_consumer_that_plans_on_the_host_is_refused_with_its_placeholders_and_its_backend(pipelines: Any) -> None:
    pipeline = pipelines("torch_paged", "torch")
    assert refusal(pipeline.model, pipeline.cm, capture="consumers") == [
        f"target_model (attention backend torch_paged) reads {', '.join(PAGED)}: its placeholders ask for those "
        "mirrors, and no graph can plan on the host"
    ]
    text = advice(pipeline.model, pipeline.cm, capture="consumers")
    assert "or one that plans before the capture" in text
    assert "capture: consumers" not in text


def test_a_placeholder_that_no_node_uses_and_the_batch_info_are_no_reads() -> None:
    graph = Graph()
    batch_info, _ = graph.placeholder("batch_info_host"), graph.placeholder("cu_seqlen_host")
    graph.output(graph.call_function(torch.add, (batch_info, 1)))
    root = nn.ModuleDict({"draft": GraphModule(nn.Module(), graph)})
    assert check(root, make_interface(), capture="consumers").num_matches == 1


@pytest.fixture
def planning_ahead() -> Iterator[Any]:
    """An attention backend with an op of its own that is planned outside of captured graphs."""

    @torch.library.custom_op("auto_deploy_ext_test::planned_attention", mutates_args=())
    def planned_attention(q: torch.Tensor, cu_seqlen_host: torch.Tensor) -> torch.Tensor:
        return q.clone()

    @AttentionRegistry.register("planned_for_test")
    class PlannedAttention(TorchPagedAttention):
        @classmethod
        def get_cached_attention_op(cls) -> Any:
            return torch.ops.auto_deploy_ext_test.planned_attention

        @classmethod
        def plans_before_capture(cls) -> bool:
            return True

    yield torch.ops.auto_deploy_ext_test.planned_attention.default
    del AttentionRegistry._registry["planned_for_test"]


def test_a_backend_that_plans_outside_of_graphs_may_take_mirrors_but_nobody_else_may(planning_ahead: Any) -> None:
    def reads(*others: Any) -> nn.Module:
        graph = Graph()
        q, mirror = graph.placeholder("q"), graph.placeholder("cu_seqlen_host")
        results = [graph.call_function(planning_ahead, (q, mirror))]
        results += [graph.call_function(other, (mirror,)) for other in others]
        graph.output(results)
        return nn.ModuleDict({"target": GraphModule(nn.Module(), graph)})

    cm = make_interface(["cu_seqlen_host"])
    assert check(reads(), cm, capture="consumers").num_matches == 1
    (line,) = refusal(reads(torch.sum), cm, capture="consumers")
    assert line.startswith("target reads cu_seqlen_host: its placeholder asks for that mirror")


def test_a_host_prepare_function_plans_outside_of_graphs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Prepared(TorchPagedAttention):
        @classmethod
        def get_host_prepare_metadata_function(cls) -> Any:
            return lambda cu_seqlen_host: None

    class Foreign:
        """A descriptor of a host that has no `plans_before_capture`."""

        get_cached_attention_op = Prepared.get_cached_attention_op
        prepares: Any = None

        @classmethod
        def get_host_prepare_metadata_function(cls) -> Any:
            return cls.prepares

    graph = Graph()
    arguments = [graph.placeholder(name) for name in ("q", "cu_seqlen_host")]
    graph.output(graph.call_function(TorchPagedAttention.get_cached_attention_op(), tuple(arguments)))
    root, cm = nn.ModuleDict({"target": GraphModule(nn.Module(), graph)}), make_interface(["cu_seqlen_host"])
    for descriptor, accepted in ((TorchPagedAttention, False), (Prepared, True), (Foreign, False)):
        monkeypatch.setitem(AttentionRegistry._registry, "torch_paged", descriptor)
        if accepted:
            assert check(root, cm, capture="consumers").num_matches == 1
        else:
            assert refusal(root, cm, capture="consumers")
    Foreign.prepares = print
    assert check(root, cm, capture="consumers").num_matches == 1


def test_flashinfer_is_captured_by_consumer_and_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", double)
    path = tmp_path / "small.yaml"
    small = SMALL.replace("head_dim: 16", "head_dim: 64")
    path.write_text(f"{small}dtype: bfloat16\nattn_backend: torch\ndraft_attn_backend: flashinfer\n{SCOPE % ''}")
    pipeline = build_pipeline(load_config(str(path)))
    assert check(pipeline.model, pipeline.cm, capture="consumers").num_matches == 1
    lines = refusal(pipeline.model, pipeline.cm, capture="full")
    assert any(line.startswith("draft_model reads cu_num_pages_host") for line in lines)
    assert not any(line.startswith("target_model reads") for line in lines)


def test_a_compiled_replacement_is_judged_by_what_it_carries() -> None:
    compiled = nn.Module()
    compiled.meta = {"active_args": ("input_ids", "seq_len_host")}  # type: ignore[assignment]
    wrapping = nn.Module()
    wrapping.meta = {"active_args": ("input_ids", "seq_len_host")}  # type: ignore[assignment]
    wrapping.gm = consumer("input_ids")
    root = nn.ModuleDict({"opaque": compiled, "wrapping": wrapping})
    (line,) = refusal(root, make_interface(), capture="consumers")
    assert line.startswith("opaque reads seq_len_host")


def test_a_model_without_an_orchestrator_is_its_own_consumer() -> None:
    gm = consumer("input_ids", "seq_len_host")
    for capture in ("full", "consumers"):
        (line,) = refusal(gm, make_interface(), capture=capture)
        assert "reads seq_len_host" in line


# -- configuration -------------------------------------------------------------------------------------------------


def test_fields_that_do_not_exist_and_wrong_values_are_refused() -> None:
    transform = TransformRegistry.get("check_capture")
    with pytest.raises(ValueError, match="captures"):
        transform.from_kwargs(captures="full")
    with pytest.raises(ValueError, match="consumers"):
        transform.from_kwargs(capture="partial")
    with pytest.raises(ValueError, match="run_per_gm"):
        transform.from_kwargs(run_per_gm=True)


def test_in_a_pipeline_it_raises_before_anything_is_compiled(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    capture = ", check_capture: {compile_backend: torch-cudagraph}"
    path.write_text(SMALL + "attn_backend: torch_paged\n" + SCOPE % capture)
    with pytest.raises(CaptureError, match="target_model reads"):
        build_pipeline(load_config(str(path)))


def test_the_compile_backend_of_the_config_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL + SCOPE % ", check_capture: {}")
    assert load_config(str(path)).transforms["check_capture"]["compile_backend"] == "torch-simple"
    config = load_config(str(path), overrides={"compile_backend": "torch-cudagraph"})
    assert config.transforms["check_capture"]["compile_backend"] == "torch-cudagraph"


def test_a_compile_backend_that_the_embedded_host_lacks_is_refused_with_those_it_has(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL + "transforms: {compile_model: {backend: torch-cudagraphs}}\n")
    with pytest.raises(ConfigError, match="torch-cudagraph, torch-simple; did you mean 'torch-cudagraph'"):
        load_config(str(path))
