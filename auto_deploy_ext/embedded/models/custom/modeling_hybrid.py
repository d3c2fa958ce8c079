"""The hybrid target: transformers' Bamba with its Mamba2 mixers computed by the exportable source ops."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import BambaForCausalLM
from transformers.models.bamba.modeling_bamba import BambaMixer

from ...custom_ops import torch_causal_conv, torch_ssm  # noqa: F401  (registers the ops)


def mixer_forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """What ``BambaMixer.forward`` computes without cache and padding, in terms of the source ops.

    transformers' own chunked scan pads to a multiple of the chunk size, which export resolves for the example's length.

    Args:
        self: the ``BambaMixer`` (its sizes are Optional to a type checker, hence no annotation).
        hidden_states: ``[b, s, hidden]``.
        **kwargs: what the decoder layer passes along; a cache or a padding mask is refused.

    Returns:
        ``[b, s, hidden]`` in the dtype of ``hidden_states``.

    Raises:
        ValueError: a cache or a padding mask was given.
    """
    for name in ("cache", "attention_mask"):
        if kwargs.get(name) is not None:
            raise ValueError(f"a mixer made of source ops takes no {name}: caches are inserted after export")
    batch, length, _ = hidden_states.shape
    grouped = self.n_groups * self.ssm_state_size
    gate, conv_in, dt = self.in_proj(hidden_states).split(
        [self.intermediate_size, self.conv_dim, self.num_heads], dim=-1
    )
    conv_out = self.act(torch.ops.auto_deploy_ext.torch_causal_conv1d(conv_in, self.conv1d.weight, self.conv1d.bias))
    x, B, C = conv_out.split([self.intermediate_size, grouped, grouped], dim=-1)
    y = torch.ops.auto_deploy_ext.torch_ssm(
        x.reshape(batch, length, self.num_heads, self.head_dim),
        -torch.exp(self.A_log.float()),
        B.reshape(batch, length, self.n_groups, self.ssm_state_size),
        C.reshape(batch, length, self.n_groups, self.ssm_state_size),
        self.D,
        dt,
        self.dt_bias,
        float(self.time_step_limit[0]),
        float(self.time_step_limit[1]),
        self.chunk_size,
    )
    y = self.norm(y.reshape(batch, length, self.intermediate_size), gate)
    return self.out_proj(y.to(hidden_states.dtype))


def use_source_ops(model: nn.Module) -> int:
    """Make every ``BambaMixer`` below ``model`` compute with the source ops; returns how many there are."""
    mixers = [module for module in model.modules() if isinstance(module, BambaMixer)]
    for mixer in mixers:
        mixer.forward = MethodType(mixer_forward, mixer)
    return len(mixers)


@torch.no_grad()
def initialise_hybrid(model: BambaForCausalLM, seed: int, branch_scale: float = 1.1, logit_scale: float = 2.0) -> None:
    """Fill a model with seeded weights whose greedy continuations a drafter can partly guess.

    The residual stream carries the token's embedding, the head consists of the embedding rows in another order, so
    by itself a token is followed by a fixed other one; the layers' branches (attention, SSM, MLP) are strong enough
    to overrule that in some contexts.

    Args:
        model: any dtype, on the CPU (so that every device starts from the same numbers).
        seed: of the generator that all weights are drawn from.
        branch_scale: norm of a branch's output relative to an embedding's.
        logit_scale: spread of the logits.

    Raises:
        ValueError: embedding and head are tied.
    """
    if model.lm_head.weight is model.model.embed_tokens.weight:
        raise ValueError("random weights need a head of their own: set model_kwargs.tie_word_embeddings: false")
    generator = torch.Generator().manual_seed(seed)

    def normal(like: torch.Tensor, std: float) -> torch.Tensor:
        return (torch.randn(like.shape, generator=generator) * std).to(like.dtype)

    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() == 2:
            parameter.copy_(normal(parameter, parameter.shape[1] ** -0.5))
        elif name.endswith(("norm.weight", "mamba.D")):
            parameter.fill_(1.0)
        elif name.endswith("conv1d.weight"):
            parameter.copy_(normal(parameter, parameter.shape[-1] ** -0.5))
        elif name.endswith("dt_bias"):
            parameter.copy_(normal(parameter, 0.5) - 1.0)
        elif name.endswith("bias"):
            parameter.zero_()
        elif name.endswith("A_log"):
            parameter.copy_(torch.linspace(-2.0, 1.0, parameter.numel()))
    vocab, hidden = model.lm_head.weight.shape
    embedding = torch.randn(vocab, hidden, generator=generator)
    embedding = embedding / embedding.pow(2).mean(-1, keepdim=True).sqrt()
    order = torch.randperm(vocab, generator=generator)
    model.model.embed_tokens.weight.copy_(embedding)
    model.lm_head.weight.copy_(embedding[order] * (logit_scale / hidden**0.5))
    for name, parameter in model.named_parameters():
        if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
            parameter.mul_(branch_scale)
