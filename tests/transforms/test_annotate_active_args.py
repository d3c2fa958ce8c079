"""The transform annotate_active_args: names on graphs and on the nodes that call them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from auto_deploy_ext import SharedConfig, TransformRegistry
from tests.orchestrator_programs import build, consumer, make_interface

PAGED = ("cu_num_pages_host", "cu_seqlen_host")


def annotate(module: nn.Module, cm: Any = None, **fields: Any) -> Any:
    transform = TransformRegistry.get("annotate_active_args").from_kwargs(stage="cache_init", **fields)
    assert transform(module, cm or make_interface(PAGED), None, SharedConfig(), 0) is module
    return module.meta["_autodeploy"]["transform_history"]["annotate_active_args"]


def test_consumers_are_annotated_and_orchestrators_are_not() -> None:
    gm = build(["switch", ("consume", "draft"), ("nested", [("consume", "draft")])], {"draft": PAGED})
    code = gm.code
    info = annotate(gm)
    assert info.num_matches == 1
    assert gm.draft.meta["active_args"] == PAGED
    assert "active_args" not in gm.meta and "active_args" not in gm.body_0.meta
    assert gm.code == code


def test_nodes_that_call_a_consumer_carry_its_names_two_levels_down_too() -> None:
    gm = build(
        [("consume", "draft"), "switch", ("nested", [("consume", "target")])], {"draft": PAGED, "target": ("x",)}
    )
    annotate(gm)

    def names(graph: Any) -> list[Any]:
        return [n.meta.get("active_args") for n in graph.nodes if n.op == "call_module"]

    assert names(gm.graph)[0] == PAGED
    assert names(gm.body_0.graph) == [("x",)]


def test_consumers_of_an_eager_wrapper_are_annotated() -> None:
    wrapper = nn.Module()
    wrapper.inner = nn.Module()
    wrapper.inner.draft = consumer("b", "a")
    wrapper.target = consumer("seq_len")
    assert annotate(wrapper).num_matches == 2
    assert wrapper.inner.draft.meta["active_args"] == ("a", "b")


def test_a_second_run_follows_new_placeholders_and_changes_nothing_else() -> None:
    gm = consumer("a")
    annotate(gm)
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.placeholder("b")
    annotate(gm)
    assert gm.meta["active_args"] == ("a", "b")


def test_it_deletes_no_call_of_an_orchestrator_that_cleaning_would_delete() -> None:
    gm = build(["switch", "offset"], {})
    annotate(gm)
    assert [n.target for n in gm.graph.nodes if n.op == "call_method"] == [
        "switch_to_generate_",
        "offset_pos_and_cache_",
    ]


def test_unknown_fields_and_running_per_graph_are_refused() -> None:
    transform = TransformRegistry.get("annotate_active_args")
    with pytest.raises(ValueError, match="stages"):
        transform.from_kwargs(stages="cache_init")
    with pytest.raises(ValueError, match="run_per_gm"):
        transform.from_kwargs(run_per_gm=True)
