"""Decoding with the backends triton (interpreted) and flashinfer (its double), for target and draft independently."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from auto_deploy_ext.embedded.config import load_config
from auto_deploy_ext.embedded.custom_ops import flashinfer_planner
from auto_deploy_ext.embedded.custom_ops.plan_ops import is_plan_op
from auto_deploy_ext.embedded.generation import generate
from auto_deploy_ext.embedded.pipeline import Pipeline, build_pipeline
from auto_deploy_ext.runtime.sanitizer import sanitize
from tests.double import flashinfer as double

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the real ones")

SMALL = """
model_kwargs: {model_type: llama, vocab_size: 256, hidden_size: 32, intermediate_size: 32, num_hidden_layers: 1,
               num_attention_heads: 2, num_key_value_heads: 1, head_dim: 64}
speculative_config: {decoding_type: Eagle3, max_draft_len: 2, eagle3_layers_to_capture: [0]}
speculative_model_kwargs: {num_captured_layers: 1}
kv_cache_config: {tokens_per_block: 4}
max_seq_len: 32
max_num_tokens: 32
seed: 3
transforms: {annotate_active_args: {stage: cache_init}, scope_host_mirrors: {stage: cache_init}}
"""
PROMPTS = [[7, 8, 9, 1, 2], [3, 4], [200, 100, 50]]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A function that gives the small pipeline with these values, each built once; flashinfer is the double."""
    path = tmp_path_factory.mktemp("backends") / "small.yaml"
    path.write_text(SMALL)

    @functools.cache
    def pipeline(target: str, draft: str, dtype: str = "bfloat16", compiled: str = "torch-simple") -> Pipeline:
        backends = {"attn_backend": target, "draft_attn_backend": draft, "dtype": dtype, "compile_backend": compiled}
        return build_pipeline(load_config(str(path), overrides=backends))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", double)
        patch.setattr(flashinfer_planner, "_planners", {})
        yield pipeline


def decode(pipeline: Pipeline, prompts: Any = PROMPTS, max_new_tokens: int = 8, **options: Any) -> list[list[int]]:
    result = generate(pipeline.model, pipeline.cm, prompts, max_new_tokens, **options)
    return [list(output.tokens) for output in result.outputs]


def test_flashinfer_decodes_the_tokens_of_torch_paged_and_plans_once_per_forward(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = build("flashinfer", "flashinfer")
    forwards: Counter[str] = Counter()
    uploads: list[None] = []  # each forward's lengths; FlashInfer's own plan is made anew where the ranges are others
    started = flashinfer_planner.SlotRing.copies_started
    monkeypatch.setattr(
        flashinfer_planner.SlotRing, "copies_started", lambda *args: (uploads.append(None), started(*args))[1]
    )
    for name in ("target_model", "draft_model"):
        consumer = getattr(pipeline.model, name)
        assert sum(is_plan_op(node.target) for node in consumer.graph.nodes) == 1
        consumer.register_forward_pre_hook(lambda *_, name=name: forwards.update([name]))
    double.calls.clear()
    flashinfer_planner._planners.clear()
    with sanitize(pipeline.cm.info):
        tokens = decode(pipeline)
    assert forwards["draft_model"] == 2 * forwards["target_model"]
    assert len(uploads) == sum(forwards.values())
    assert forwards["target_model"] < len(double.calls) < sum(forwards.values())
    assert len(flashinfer_planner._planners) == 2
    assert tokens == decode(build("torch_paged", "torch_paged"))


def test_consumers_as_graphs_are_planned_before_each_replay(build: Any) -> None:
    expected = decode(build("flashinfer", "flashinfer"))
    captured = build("flashinfer", "flashinfer", "bfloat16", "torch-cudagraph")
    for _ in range(2):  # the first batch of a kind runs eagerly, the second is captured
        assert decode(captured) == expected
    double.calls.clear()
    assert decode(captured) == expected
    for_graphs = [call for call in double.calls if call[1]]
    assert for_graphs and all(how == "again" for how, *_ in for_graphs), "no graph is captured anew"


def test_target_and_draft_choose_their_backend_apart(build: Any) -> None:
    pipeline = build("torch_paged", "flashinfer")
    planning = {
        name: any(is_plan_op(node.target) for node in getattr(pipeline.model, name).graph.nodes)
        for name in ("target_model", "draft_model")
    }
    assert planning == {"target_model": False, "draft_model": True}
    assert decode(pipeline) == decode(pipeline, speculative=False)


def test_triton_decodes_the_tokens_of_torch_paged(build: Any) -> None:
    pytest.importorskip("triton")
    import tests.triton_interpreter  # noqa: F401

    pipeline = build("triton", "triton", "float32")
    placeholders = {str(n.target) for n in pipeline.model.draft_model.graph.find_nodes(op="placeholder")}
    assert {name for name in placeholders if name.endswith("_host")} == {"batch_info_host"}
    few: Any = {"prompts": PROMPTS[1:2], "max_new_tokens": 4}
    assert decode(pipeline, **few) == decode(build("torch_paged", "torch_paged", "float32"), **few)


def test_float32_is_refused_when_the_model_is_built(build: Any) -> None:
    with pytest.raises(ValueError, match=r"draft_attn_backend: flashinfer computes in .* the model's dtype is float32"):
        build("torch", "flashinfer", "float32")
