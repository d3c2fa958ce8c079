"""Packed linear layers: the same numbers, also after a weight has been written, and only where they help."""

from __future__ import annotations

import copy

import pytest
import torch

from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.custom_ops import packed_linear
from auto_deploy_ext.embedded.generation import generate
from auto_deploy_ext.embedded.pipeline import build_pipeline

pytestmark = pytest.mark.skipif(not packed_linear.is_available(), reason="PyTorch without oneDNN")
OP = torch.ops.auto_deploy_ext.packed_linear.default


@pytest.mark.parametrize("rows", [1, 4, 37])
@pytest.mark.parametrize("with_bias", [False, True], ids=["no bias", "bias"])
def test_packed_is_linear_for_any_number_of_rows(rows, with_bias):
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(2, rows, 24, generator=generator), torch.randn(40, 24, generator=generator)
    bias = torch.randn(40, generator=generator) if with_bias else None
    torch.testing.assert_close(
        OP(x, weight, bias, 4), torch.nn.functional.linear(x, weight, bias), atol=1e-5, rtol=1e-5
    )


def test_a_weight_that_is_written_is_packed_anew_and_one_that_is_gone_is_forgotten():
    x, weight = torch.ones(3, 8), torch.ones(5, 8)
    assert torch.equal(OP(x, weight, None, 3), torch.full((3, 5), 8.0))
    weight.mul_(2.0)
    assert torch.equal(OP(x, weight, None, 3), torch.full((3, 5), 16.0))
    before = len(packed_linear._packed)
    del weight
    assert len(packed_linear._packed) == before - 1


def test_a_weight_that_is_given_other_memory_is_packed_anew():
    x, layer = torch.ones(3, 8), torch.nn.Linear(8, 5, bias=False)
    with torch.no_grad():
        for value in (1.0, 2.0, 3.0):
            layer.weight.data = torch.full((5, 8), value)
            assert torch.equal(OP(x, layer.weight, None, 3), torch.full((3, 5), 8 * value))
        layer.weight.fill_(1 / 3)
        OP(x, layer.weight, None, 3)
        layer.to(torch.bfloat16).to(torch.float32)
        assert torch.equal(OP(x, layer.weight, None, 3), torch.full((3, 5), 8 * float(torch.tensor(1 / 3).bfloat16())))


def test_a_weight_of_inference_mode_is_used_as_it_is():
    with torch.inference_mode():
        weight = torch.ones(5, 8)
        assert torch.equal(OP(torch.ones(3, 8), weight, None, 3), torch.full((3, 5), 8.0))
        weight.mul_(2.0)
        assert torch.equal(OP(torch.ones(3, 8), weight, None, 3), torch.full((3, 5), 16.0))


def test_the_transform_replaces_every_linear_layer_and_the_tokens_stay():
    limits = {"model_kwargs.num_hidden_layers": 1, "speculative_config.eagle3_layers_to_capture": [0]}
    limits |= {"speculative_model_kwargs.num_captured_layers": 1}
    plain = build_pipeline(load_config("eagle3_llama", overrides=limits))
    key = "transforms.pack_linear_weights.stage"
    packed = build_pipeline(load_config("eagle3_llama", overrides=limits | {key: "post_load_fusion"}))
    graphs = [packed.model.target_model.graph, packed.model.draft_model.graph]
    calls = [node for graph in graphs for node in graph.nodes if node.target is OP]
    assert len(calls) == 7 + 1 + 7, "a layer, the head, the drafter's layer"
    assert {node.args[3] for node in calls} == {4}
    assert not any(node.target is torch.ops.aten.linear.default for graph in graphs for node in graph.nodes)
    results = [
        [output.tokens for output in generate(made.model, made.cm, [[1, 2, 3], [5]], 12).outputs]
        for made in (plain, packed)
    ]
    assert results[0] == results[1]
    again = copy.deepcopy(packed.model.target_model)
    assert any(node.target is OP for node in again.graph.nodes)
