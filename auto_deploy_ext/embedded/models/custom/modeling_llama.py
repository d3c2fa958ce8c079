"""The Llama target: transformers' own, with seeded weights whose continuations a drafter can partly guess."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel


@torch.no_grad()
def initialise_llama(
    model: PreTrainedModel,
    seed: int,
    first_share: float = 2.8,
    attention_share: float = 1.0,
    mlp_share: float = 0.4,
    contrast: float = 1.6,
) -> None:
    """Fill a Llama-like causal language model with seeded weights.

    The residual stream carries the token's embedding, and the head consists of the embedding's rows in another order:
    by itself a token is followed by a fixed other one. Branches are strong enough to overrule that in some contexts,
    attention more than the MLP, so what is generated depends on what the caches hold. The first layer has the largest
    say, because a drafter of one layer can follow that.

    Args:
        model: Any dtype, on the CPU, so that every device starts from the same numbers; embedding and head not tied.
        seed: Of the generator that all weights are drawn from.
        first_share: Scale of the first layer's attention's output projection.
        attention_share: Scale of the other layers'.
        mlp_share: Scale of the MLP's output projection.
        contrast: Scale of queries and of keys; more makes attention pick single tokens.

    Raises:
        ValueError: Embedding and head are tied.
    """
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    if embedding.weight is head.weight:
        raise ValueError("random weights need a head of their own: set model_kwargs.tie_word_embeddings: false")
    generator = torch.Generator().manual_seed(seed)
    scales = {
        "layers.0.self_attn.o_proj.weight": first_share,
        "q_proj.weight": contrast,
        "k_proj.weight": contrast,
        "o_proj.weight": attention_share,
        "down_proj.weight": mlp_share,
    }
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() == 2:
            scale = next((scale for suffix, scale in scales.items() if name.endswith(suffix)), 1.0)
            draw = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(draw * (scale * parameter.shape[1] ** -0.5))
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    rows = torch.randn(embedding.weight.shape, generator=generator)
    rows = rows / rows.pow(2).mean(dim=-1, keepdim=True).sqrt()
    order = torch.randperm(len(rows), generator=generator)
    embedding.weight.copy_(rows)
    head.weight.copy_(rows[order] * rows.shape[1] ** -0.5)
