"""On a GPU: the benchmark measures, counts launches and looks at run-ahead, eagerly and with device graphs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from auto_deploy_ext import kernels
from auto_deploy_ext.bench.cells import Backend
from auto_deploy_ext.bench.pipelines import Limits, ModelSource
from auto_deploy_ext.commands.cli import EXIT_OK, main

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or not kernels.has_triton(), reason="needs a GPU and Triton"
)


@pytest.fixture
def config(tmp_path: Path) -> str:
    """The tiny model in the GPU's types and head size."""
    path = Path(__file__).parents[2] / "configs" / "embedded" / "bench_tiny.yaml"
    fields = yaml.safe_load(path.read_text())
    fields |= {"device": "cuda", "dtype": "bfloat16", "attn_backend": "triton"}
    fields["kv_cache_config"] = {"tokens_per_block": 16}
    fields["model_kwargs"] |= {"head_dim": 64}
    made = tmp_path / "tiny.yaml"
    made.write_text(yaml.safe_dump(fields))
    return str(made)


def test_a_short_run_fills_every_field(config: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["--attn", "triton", "--k", "3", "--batch", "2", "--context", "40", "--policies", "auto", "scoped"]
    effort = ["--repetitions", "3", "--block-ms", "1", "--parts", "cells", "launches", "--json", str(out)]
    assert main(["bench", "--config", config, *arguments, *effort]) == EXIT_OK
    result = json.loads(out.read_text())
    assert result["left_out"] == []
    assert len(result["cells"]) == 2 * 3 * 2
    assert {cell["compile_backend"] for cell in result["cells"]} == {"torch-cudagraph", "torch-simple"}
    for cell in result["cells"]:
        assert cell["step_us"] > 0, cell
        assert 0 <= cell["run_ahead"] <= 1, cell
        assert cell["transfers"] == 0, f"triton reads no mirror: {cell}"
    by_fusion = {entry["fused"]: entry for entry in result["launches"]}
    shown = json.dumps(result["launches"])
    assert all(entry["what"] == "kernels" for entry in by_fusion.values()), shown
    assert 0 < by_fusion[True]["per_draft_step"] < by_fusion[False]["per_draft_step"], shown
    assert result["device"]["is_gpu"]
    assert result["versions"]["triton"]


def test_weights_are_made_on_the_gpu(config: str) -> None:
    source = ModelSource(config)
    wrapper = source.base()
    tensors = dict((*wrapper.named_parameters(), *wrapper.named_buffers()))
    elsewhere = [name for name, tensor in tensors.items() if tensor.device.type != "cuda"]
    assert elsewhere == []
    assert all(tensor.isfinite().all() for tensor in tensors.values() if tensor.is_floating_point())
    pipeline = source.build(Backend("triton", "torch-simple", 3), Limits(2, 128), [2])
    noise = [c for c in pipeline.cm.kv_cache_manager.resources.values() if c.is_floating_point()]
    assert all(0.5 < cache.float().std() < 2 for cache in noise)
