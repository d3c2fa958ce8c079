"""The MTP drafter: what it computes from its two inputs, and that it guesses its target."""

from __future__ import annotations

import torch
from transformers import BambaConfig, BambaForCausalLM

from auto_deploy_ext.embedded.export import export_module
from auto_deploy_ext.embedded.models.custom.modeling_hybrid import initialise_hybrid, use_source_ops
from auto_deploy_ext.embedded.models.custom.modeling_mtp import MTPDrafter, initialise_mtp

CONFIG = BambaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    attn_layer_indices=[0],
    mamba_n_heads=4,
    max_position_embeddings=256,
    attn_implementation="sdpa",
)


def drafter(**scales: float) -> MTPDrafter:
    model = MTPDrafter(CONFIG).eval()
    initialise_mtp(model, seed=5, **scales)
    return model


def inputs(batch: int, length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    return {
        "inputs_embeds": torch.randn(batch, length, 32, generator=generator),
        "position_ids": torch.arange(length).expand(batch, length),
        "hidden_states": torch.randn(batch, length, 32, generator=generator),
    }


@torch.no_grad()
def test_without_branches_it_mixes_normalised_embedding_and_hidden_state() -> None:
    given = inputs(2, 5)
    norm_hidden, last_hidden = drafter(attention_share=0.0, mlp_share=0.0, hidden_share=0.25)(**given)

    def normalised(x: torch.Tensor) -> torch.Tensor:
        return x / x.pow(2).mean(-1, keepdim=True).add(CONFIG.rms_norm_eps).sqrt()

    expected = normalised(given["inputs_embeds"]) + 0.25 * normalised(given["hidden_states"])
    torch.testing.assert_close(last_hidden, expected)
    torch.testing.assert_close(norm_hidden, normalised(expected))


@torch.no_grad()
def test_every_position_depends_on_all_earlier_ones_and_no_later_one() -> None:
    model, given = drafter(), inputs(1, 6)
    before = model(**given)[1]
    given["hidden_states"] = given["hidden_states"].clone()
    given["hidden_states"][0, 2] += 1.0
    changed = (model(**given)[1] - before).abs().amax(-1)[0]
    assert torch.all(changed[:2] == 0)
    assert torch.all(changed[2:] > 1e-4)


@torch.no_grad()
def test_one_export_serves_every_length_and_batch() -> None:
    model = drafter()
    exported = export_module(model, inputs(2, 5), role="draft")
    for batch, length in [(1, 4), (3, 8)]:
        given = inputs(batch, length)
        torch.testing.assert_close(exported(**given), model(**given))
    assert exported.get_input_embeddings() is None
    assert exported.get_output_embeddings() is None


@torch.no_grad()
def test_where_neither_has_branches_every_guess_is_right() -> None:
    config = BambaConfig(**{**CONFIG.to_dict(), "attn_layer_indices": []}, attn_implementation="sdpa")
    target = BambaForCausalLM(config).eval()
    use_source_ops(target)
    initialise_hybrid(target, seed=3, branch_scale=0.0)
    ids = torch.arange(64)[None]
    embeds = target.model.embed_tokens(ids)
    positions = torch.arange(64)[None]
    norm_hidden, _ = drafter(attention_share=0.0, mlp_share=0.0, hidden_share=0.0)(
        embeds, positions, torch.zeros_like(embeds)
    )
    guesses = target.lm_head(norm_hidden).argmax(-1)
    assert torch.equal(guesses, target(input_ids=ids, use_cache=False).logits.argmax(-1))
    assert guesses.unique().numel() == 64
