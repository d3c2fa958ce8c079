"""The hybrid target computes what transformers' Bamba computes, and exports with dynamic shapes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import BambaConfig, BambaForCausalLM, DynamicCache
from transformers.models.bamba.modeling_bamba import BambaMixer

from auto_deploy_ext.embedded.export import export_module
from auto_deploy_ext.embedded.models.custom.modeling_hybrid import initialise_hybrid, use_source_ops
from auto_deploy_ext.embedded.models.factory import CausalLMFactory

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_layer_indices": [1],
    "mamba_n_heads": 4,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
    "max_position_embeddings": 256,
}


def bamba(**changes: object) -> BambaForCausalLM:
    model = BambaForCausalLM(BambaConfig(**{**SIZES, **changes}, attn_implementation="sdpa")).eval()
    initialise_hybrid(model, seed=3)
    return model


@pytest.mark.parametrize("length", [1, 7, 8, 21])
@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.1, 0.3)])
@torch.no_grad()
def test_logits_equal_those_of_transformers(length: int, limits: tuple[float, float]) -> None:
    original = bamba(time_step_limit=limits)
    patched = copy.deepcopy(original)
    assert use_source_ops(patched) == 2
    ids = torch.arange(2 * length).view(2, length) * 5 % 64
    expected = original(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(patched(input_ids=ids, use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_copy_of_a_patched_model_uses_its_own_weights() -> None:
    model = bamba()
    use_source_ops(model)
    clone = copy.deepcopy(model)
    ids = torch.arange(9)[None]
    before = clone(input_ids=ids, use_cache=False).logits
    for parameter in model.parameters():
        parameter.zero_()
    assert torch.equal(clone(input_ids=ids, use_cache=False).logits, before)


@torch.no_grad()
def test_one_export_of_a_mixer_serves_every_length_and_batch() -> None:
    mixer = next(module for module in bamba().modules() if isinstance(module, BambaMixer))
    patched = copy.deepcopy(mixer)
    use_source_ops(patched)
    exported = export_module(patched, {"hidden_states": torch.randn(2, 5, 32)})
    for batch, length in [(1, 4), (3, 8), (2, 19)]:
        hidden = torch.randn(batch, length, 32, generator=torch.Generator().manual_seed(length))
        torch.testing.assert_close(exported(hidden_states=hidden), mixer(hidden), rtol=1e-5, atol=1e-5)


def test_a_cache_is_refused() -> None:
    model = bamba()
    use_source_ops(model)
    with pytest.raises(ValueError, match="takes no cache"):
        model(input_ids=torch.arange(4)[None], cache=DynamicCache(config=model.config))


def test_a_tied_head_is_refused() -> None:
    with pytest.raises(ValueError, match="tie_word_embeddings: false"):
        bamba(tie_word_embeddings=True)


def test_a_seed_decides_the_weights() -> None:
    first, same, other = bamba(), bamba(), bamba()
    initialise_hybrid(other, seed=4)
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name)), name
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


@torch.no_grad()
def test_a_local_checkpoint_loads_into_the_exportable_model(tmp_path: Path) -> None:
    original = bamba()
    original.save_pretrained(tmp_path)
    factory = CausalLMFactory(str(tmp_path))
    model = factory.build_model()
    assert factory.load_or_random_init(model, torch.device("cpu")) == len(list(original.parameters()))
    ids, positions = torch.arange(11)[None], torch.arange(11)[None]
    logits = model(model.get_input_embeddings()(ids), positions)
    torch.testing.assert_close(logits, original(input_ids=ids, use_cache=False).logits, rtol=1e-5, atol=1e-5)
