"""The head's training forward: all draft steps from every position at once.

At inference the head's cache holds, for a draft that starts at position t, the keys of step 0 at positions <= t
(computed from the target's states), and behind them the keys of its own earlier steps. Step j therefore attends, in
training, to step 0's keys up to its base position and to one key of each later step: that of the same base. Steps after
the first are fed the head's own previous states, and the tokens that a draft accepted so far would have.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ..models.custom.modeling_eagle3 import Eagle3Drafter


def _norm(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight = norm.weight
    assert isinstance(weight, torch.Tensor)
    return F.rms_norm(x, (x.shape[-1],), weight, norm.variance_epsilon)  # type: ignore[arg-type]


def _for_products(x: torch.Tensor) -> torch.Tensor:
    """In autocast's dtype, so that it is converted once and not by each product that takes it."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


class MultiStepForward:
    """Runs a drafter's weights over all bases.

    Args:
        drafter: Its parameters are used as they are; its own forward is not.
        steps: Draft steps, at least 1.
    """

    def __init__(self, drafter: Eagle3Drafter, steps: int) -> None:
        self.drafter = drafter
        self.steps = steps
        attention = drafter.midlayer.self_attn
        self.head_dim = attention.q_proj.out_features // int(drafter.config.num_attention_heads)
        self.kv_heads = int(drafter.config.num_key_value_heads or drafter.config.num_attention_heads)
        self.groups = int(drafter.config.num_attention_heads) // self.kv_heads
        self.scaling = float(attention.scaling)

    def bases(self, length: int) -> int:
        """Positions of a sequence that all steps fit behind: they are 0 to this, exclusive."""
        return length - self.steps

    def __call__(self, embeds: torch.Tensor, captured: torch.Tensor) -> list[torch.Tensor]:
        """Run all steps.

        Args:
            embeds: float32 [batch, length, hidden], the tokens' embeddings, of the positions themselves.
            captured: [batch, length, layers * hidden], what `fc` fuses.

        Returns:
            For each step the normed state [batch, bases, hidden] that the head is applied to. From base t, step j
            guesses the token at position t + 2 + j, given those up to t + 1 + j.
        """
        bases = self.bases(embeds.shape[1])
        positions = torch.arange(embeds.shape[1], device=embeds.device)[None]
        cos, sin = self.drafter.rotary_emb(embeds, position_ids=positions)
        causal = torch.ones(bases, bases, dtype=torch.bool, device=embeds.device).tril()
        hidden = self.drafter.fc(captured[:, :bases]).float()
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        outputs = []
        for step in range(self.steps):
            there = slice(step, step + bases)
            token = embeds[:, 1 + step : 1 + step + bases]
            hidden = self._layer(token, hidden, (cos[:, there], sin[:, there]), causal, keys, values)
            outputs.append(_norm(self.drafter.norm, hidden))
        return outputs

    def _layer(
        self,
        token: torch.Tensor,
        hidden: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        causal: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> torch.Tensor:
        """One step of the layer; its keys and values, [batch, kv_heads, bases, dim], are added to those of before."""
        layer = self.drafter.midlayer
        attention = layer.self_attn
        both = torch.cat([_norm(layer.input_layernorm, token), _norm(layer.hidden_norm, hidden)], dim=-1)
        both = _for_products(both)
        shape = (*both.shape[:2], -1, self.head_dim)
        query = attention.q_proj(both).view(shape).transpose(1, 2)
        key = attention.k_proj(both).view(shape).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *rotation)
        query, key = _for_products(query), _for_products(key)
        keys.append(key)
        values.append(attention.v_proj(both).view(shape).transpose(1, 2))
        if len(keys) == 1:
            attended = self._first_step(query, key, values[0])
        else:
            attended = self._attend(query, causal, keys, values)
        hidden = hidden + attention.o_proj(attended.transpose(1, 2).flatten(2))
        return hidden + layer.mlp(_for_products(_norm(layer.post_attention_layernorm, hidden)))

    def _first_step(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        key, value = (x.repeat_interleave(self.groups, dim=1) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scaling)

    def _attend(
        self, query: torch.Tensor, causal: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> torch.Tensor:
        """Attention of step j >= 1: [batch, heads, bases, dim]."""
        batch, heads, bases, dim = query.shape
        query = (query * self.scaling).reshape(batch, self.kv_heads, self.groups * bases, dim)
        scores = torch.matmul(query, keys[0].transpose(2, 3)).view(batch, self.kv_heads, self.groups, bases, bases)
        scores = scores.masked_fill(~causal, -torch.inf)
        grouped = query.view(batch, self.kv_heads, self.groups, bases, dim)
        own = [(grouped * key[:, :, None]).sum(dim=-1, keepdim=True) for key in keys[1:]]
        weights = torch.cat([scores, *(part.to(scores.dtype) for part in own)], dim=-1).softmax(dim=-1)
        weights = weights.to(values[0].dtype)
        first = weights[..., :bases].reshape(batch, self.kv_heads, self.groups * bases, bases)
        out = torch.matmul(first, values[0]).view(batch, self.kv_heads, self.groups, bases, dim)
        for index, value in enumerate(values[1:]):
            place = bases + index
            out = out + weights[..., place : place + 1] * value[:, :, None]
        return out.reshape(batch, heads, bases, dim)
