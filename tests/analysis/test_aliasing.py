"""What a node may share memory with and what it writes, for the calls whose schemas say too little."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from auto_deploy_ext.analysis.aliasing import is_view, module_effects, result_may_alias, written_inputs


def call(target: Any, *args: Any, method: bool = False) -> tuple[fx.Node, fx.Node]:
    graph = fx.Graph()
    x = graph.placeholder("x")
    create = graph.call_method if method else graph.call_function
    return x, create(target, (x, *args))


@pytest.mark.parametrize("name", ["atleast_1d", "broadcast_tensors", "dropout"])
def test_composites_that_return_their_argument_may_alias_it(name: str) -> None:
    assert result_may_alias(call(getattr(torch, name))[1])
    x = torch.ones(2)
    result = getattr(torch, name)(x) if name != "dropout" else torch.dropout(x, 0.5, False)
    first = result[0] if isinstance(result, (tuple, list)) else result
    assert first.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_einsum_and_type_as_may_alias() -> None:
    assert result_may_alias(call(torch.einsum)[1])
    assert result_may_alias(call("type_as", method=True)[1])
    assert not result_may_alias(call(torch.add, 1)[1])


def test_an_operator_by_its_packet_writes_what_its_overloads_write() -> None:
    x, node = call(torch.ops.aten.add_, 1)
    assert written_inputs(node) == (x,)
    assert written_inputs(call(torch.ops.aten.add, 1)[1]) == ()


def test_an_index_list_and_another_dtype_give_no_view() -> None:
    import operator

    assert is_view(call(operator.getitem, slice(0, 1))[1])
    assert not is_view(call(operator.getitem, [0, 1])[1])
    assert is_view(call("view", -1, method=True)[1])
    assert not is_view(call("view", torch.int32, method=True)[1])


def test_a_graph_within_a_consumer_writes_for_it() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_method("add_", (x, 1))
    graph.output(x)
    root = nn.Module()
    root.inner = fx.GraphModule(nn.Module(), graph)
    graph = fx.Graph()
    y = graph.placeholder("y")
    graph.output(graph.call_method("sum", (graph.call_module("inner", (y,)),)))
    effects = module_effects(fx.GraphModule(root, graph))
    assert effects is not None
    assert effects.written == {"y"}
