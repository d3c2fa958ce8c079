"""Active args: names of placeholders, on GraphModules and on what replaces them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from auto_deploy_ext.active_args import (
    annotate,
    annotated_args,
    consumer_args,
    module_at,
    placeholder_names,
    takes_variadic,
    wrapped_graph,
)


def graph_of(*names: str) -> GraphModule:
    graph = Graph()
    graph.output([graph.placeholder(name) for name in names])
    return GraphModule(nn.Module(), graph)


def test_names_are_targets_sorted() -> None:
    graph = Graph()
    graph.call_function(abs, (1,), name="seq_len_host")
    graph.placeholder("slot_idx")
    renamed = graph.placeholder("seq_len_host")
    graph.output(renamed)
    gm = GraphModule(nn.Module(), graph)
    assert renamed.name == "seq_len_host_1"
    assert placeholder_names(gm) == ("seq_len_host", "slot_idx")


def test_annotating_twice_changes_once() -> None:
    gm = graph_of("b", "a")
    assert annotate(gm) is True
    assert gm.meta["active_args"] == ("a", "b")
    assert annotate(gm) is False


def test_a_variadic_graph_does_not_say_what_it_reads() -> None:
    gm = graph_of("a", "**kwargs")
    assert takes_variadic(gm)
    assert consumer_args(gm) is None
    assert not takes_variadic(graph_of("a"))


def test_a_graph_answers_with_its_placeholders_of_now() -> None:
    gm = graph_of("a")
    annotate(gm)
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.placeholder("b")
    assert consumer_args(gm) == ("a", "b")
    assert annotated_args(gm) == ("a",)


def test_a_compiled_replacement_is_found_by_its_annotation_or_by_what_it_holds() -> None:
    class Compiled(nn.Module):
        def __init__(self, gm: nn.Module) -> None:
            super().__init__()
            self.gm = gm

    gm = graph_of("x", "y")
    assert consumer_args(Compiled(gm)) == ("x", "y")
    assert wrapped_graph(Compiled(Compiled(gm))) is gm
    kept = nn.Module()
    kept.meta = {"active_args": ["x"]}
    assert consumer_args(kept) == ("x",)
    assert consumer_args(Compiled(kept)) == ("x",)


def test_torch_compile_keeps_the_graph_in_reach() -> None:
    assert consumer_args(torch.compile(graph_of("x"))) == ("x",)


def test_a_module_is_found_where_get_submodule_finds_it() -> None:
    inner = nn.Sequential(nn.Linear(1, 1))
    root = nn.Module()
    root.plain, root.compiled = inner, torch.compile(inner)
    for path in ("plain", "plain.0", "compiled", "compiled.0"):
        assert module_at(root, path) is root.get_submodule(path)
    for path in ("other", "plain.1", "plain.0.weight"):
        with pytest.raises(AttributeError) as expected:
            root.get_submodule(path)
        with pytest.raises(AttributeError, match=str(expected.value)):
            module_at(root, path)


def test_anything_else_has_no_args() -> None:
    assert consumer_args(nn.Linear(1, 1)) is None
    assert consumer_args(SimpleNamespace()) is None
    loop = nn.Module()
    object.__setattr__(loop, "module", loop)
    assert wrapped_graph(loop) is None
