"""The Eagle3 drafter for Llama-like targets: one decoder layer over token embedding and hidden state side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding


@dataclass(frozen=True)
class Eagle3Options:
    """What an Eagle3 drafter has beyond a Llama layer's sizes.

    Attributes:
        target_hidden_size: Width of one captured state.
        num_captured_layers: Captured states that `fc` fuses.
        draft_vocab_size: Tokens that the drafter's head knows; fewer than the target's need the `d2t` map.
        own_embedding: Whether tokens are embedded by a table of the drafter's own, not the target's.
        own_lm_head: Whether the drafter has a head of its own, not the target's.
        slices_lm_head: Whether its head consists of those rows of the target's that are draft tokens.
    """

    target_hidden_size: int
    num_captured_layers: int
    draft_vocab_size: int
    own_embedding: bool
    own_lm_head: bool
    slices_lm_head: bool = False

    @property
    def has_lm_head(self) -> bool:
        """Whether the drafter holds a head: its own, or rows of the target's."""
        return self.own_lm_head or self.slices_lm_head

    @classmethod
    def from_config(cls, config: LlamaConfig, target: LlamaConfig) -> Eagle3Options:
        """Read them off a drafter's config, whose further attributes have the names of Eagle3 checkpoints.

        Args:
            config: The drafter's.
            target: The target's, where the defaults come from.

        Raises:
            ValueError: A part is shared that does not fit.
        """
        captured = captured_layers(getattr(config, "eagle_config", None))
        draft_vocab_size = getattr(config, "draft_vocab_size", None) or config.vocab_size
        if not isinstance(draft_vocab_size, int) or draft_vocab_size < 1:
            raise ValueError(f"draft_vocab_size should be a number of tokens, it is {draft_vocab_size!r}")
        if config.vocab_size != target.vocab_size:
            raise ValueError(
                f"the drafter's vocab_size is {config.vocab_size}, but the target knows {target.vocab_size} tokens: "
                "it is a drafter for another target"
            )
        own_lm_head = bool(getattr(config, "own_lm_head", True))
        options = cls(
            target_hidden_size=getattr(config, "target_hidden_size", None) or target.hidden_size,
            num_captured_layers=getattr(config, "num_captured_layers", None) or len(captured or ()) or 3,
            draft_vocab_size=draft_vocab_size,
            own_embedding=bool(getattr(config, "own_embedding", False)),
            own_lm_head=own_lm_head,
            slices_lm_head=not own_lm_head and draft_vocab_size != target.vocab_size,
        )
        if not options.own_embedding and config.hidden_size != target.hidden_size:
            raise ValueError(
                f"a drafter of hidden size {config.hidden_size} cannot share the embedding of a target of hidden size "
                f"{target.hidden_size}: set own_embedding: true"
            )
        if options.draft_vocab_size > target.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {options.draft_vocab_size}, but the target knows {target.vocab_size} tokens"
            )
        if not options.own_lm_head and config.hidden_size != target.hidden_size:
            raise ValueError(
                f"a drafter of hidden size {config.hidden_size} cannot share the head of a target of hidden size "
                f"{target.hidden_size}: set own_lm_head: true"
            )
        return options


def captured_layers(eagle_config: Any) -> list[int]:
    """The layers that a drafter's `eagle_config` names; none where there is nothing.

    Raises:
        ValueError: What is there does not list layers.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    layers = (eagle_config or {}).get(key) if isinstance(eagle_config, dict | None) else eagle_config
    if not isinstance(layers or [], list) or not all(isinstance(layer, int) for layer in layers or ()):
        raise ValueError(f"the drafter's eagle_config should be a mapping whose {key} lists layers, not {layers!r}")
    return layers or []


class Eagle3Attention(LlamaAttention):
    """Llama's attention over inputs that are twice as wide as the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        """Make the projections with uninitialised weights."""
        super().__init__(config, layer_idx=0)
        width = 2 * config.hidden_size
        for projection in ("q_proj", "k_proj", "v_proj"):
            out_features = getattr(self, projection).out_features
            setattr(self, projection, nn.Linear(width, out_features, bias=config.attention_bias))


class Eagle3Layer(nn.Module):
    """The drafter's only layer, `midlayer` in checkpoints."""

    def __init__(self, config: LlamaConfig) -> None:
        """Make it with uninitialised weights."""
        super().__init__()
        self.self_attn = Eagle3Attention(config)
        self.mlp = LlamaMLP(config)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        inputs_embeds: torch.Tensor,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """Give the residual stream after the layer.

        Args:
            inputs_embeds: [b, s, hidden].
            hidden_states: [b, s, hidden], the residual stream before it.
            position_embeddings: cos and sin, each [b, s, head_dim].
        """
        both = torch.cat([self.input_layernorm(inputs_embeds), self.hidden_norm(hidden_states)], dim=-1)
        attended, _ = self.self_attn(both, position_embeddings=position_embeddings)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Eagle3Drafter(nn.Module):
    """Guesses the token after next from the next token and a hidden state.

    Its weights have the names of Eagle3 checkpoints: `fc`, `midlayer.*`, `norm`, `lm_head`, `embed_tokens`, `d2t`,
    `t2d`.
    `fc` and `d2t` are used by the wrapper, between the two models, and not by `forward`.

    Args:
        config: Sizes of the layer and its attention implementation.
        options: See `Eagle3Options`.
    """

    exported_attributes = ("fc", "d2t", "t2d")
    """What `export_to_gm` keeps beside the graph."""

    d2t: torch.Tensor | None
    t2d: torch.Tensor | None

    def __init__(self, config: LlamaConfig, options: Eagle3Options) -> None:
        """Make it with uninitialised weights; `d2t` maps each draft token to the target's of the same number."""
        super().__init__()
        self.config = config
        self.options = options
        hidden = config.hidden_size
        self.fc = nn.Linear(options.num_captured_layers * options.target_hidden_size, hidden, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(hidden, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if options.own_embedding else None
        self.lm_head = nn.Linear(hidden, options.draft_vocab_size, bias=False) if options.has_lm_head else None
        has_map = options.draft_vocab_size != config.vocab_size
        known = torch.arange(config.vocab_size) < options.draft_vocab_size
        self.register_buffer("d2t", torch.zeros(options.draft_vocab_size, dtype=torch.int64) if has_map else None)
        self.register_buffer("t2d", known if has_map else None)

    def get_input_embeddings(self) -> nn.Embedding | None:
        """The drafter's own table, or None where the target's is used."""
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Linear | None:
        """The drafter's own head or its rows of the target's, or None where all of the target's is used."""
        return self.lm_head

    def forward(
        self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer over whole sequences.

        Args:
            inputs_embeds: [b, s, hidden] embedding of the token after each position.
            position_ids: [b, s] int64.
            hidden_states: [b, s, hidden] what `fc` made of the target's states, or the drafter's own last state.

        Returns:
            (norm_hidden_state, last_hidden_state), each [b, s, hidden]: what the head is applied to, and what the
            next draft step starts from.
        """
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)
        last_hidden_state = self.midlayer(inputs_embeds, hidden_states, position_embeddings)
        return self.norm(last_hidden_state), last_hidden_state


EAGLE3_DERIVED = ("t2d", "lm_head.weight")
"""What a checkpoint may leave out although the drafter has it: see `derive_eagle3`."""
EAGLE3_FIELDS = (
    "target_hidden_size",
    "num_captured_layers",
    "draft_vocab_size",
    "own_embedding",
    "own_lm_head",
    "eagle_config",
)
"""What `Eagle3Options.from_config` reads beside a Llama's own fields."""


def eagle3_weight_name(name: str) -> str:
    """The drafter's name of a checkpoint's weight: some call the layer ``layers.0`` and put ``model.`` in front."""
    name = name.removeprefix("model.")
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


@torch.no_grad()
def derive_eagle3(drafter: Any, target: Any, names: set[str]) -> None:
    """Fill what a checkpoint left out: `t2d` follows from `d2t`, and a head is rows of the target's.

    Args:
        drafter: An `Eagle3Drafter`, exported or not, with all else loaded.
        target: The target, exported or not, loaded.
        names: Weights that the checkpoint has, as the drafter names them.

    Raises:
        ValueError: `d2t` names tokens that the target does not have.
    """
    head, own_head = target.get_output_embeddings().weight, drafter.get_output_embeddings()
    if drafter.d2t is not None:
        known = torch.arange(len(drafter.d2t), device=drafter.d2t.device) + drafter.d2t
        if not bool(((known >= 0) & (known < len(head))).all()):
            raise ValueError(f"d2t gives tokens {known.min()} to {known.max()}, the target knows 0 to {len(head) - 1}")
        if "t2d" not in names:
            drafter.t2d.zero_()[known] = True
        head = head[known]
    if "lm_head.weight" not in names and own_head is not None:
        own_head.weight.copy_(head)


@torch.no_grad()
def initialise_eagle3(
    drafter: Eagle3Drafter,
    target: PreTrainedModel,
    seed: int,
    context_share: float = 1.2,
    focus: float = 2.0,
    forget: float = 0.8,
    mlp_share: float = 0.1,
) -> None:
    """Fill a drafter with seeded weights that guess a target made by `initialise_llama` partly right.

    Such a target answers a token with a fixed other one unless its branches, which see the context, overrule that. The
    drafter does the same with less: where its heads allow, the first of them are those of the target's first layer, so
    they see the context in the drafter's own cache. The others look at the own position and carry the embedding of its
    token into the residual stream, where `fc` has left what the target's later layers added at the position before.

    Args:
        drafter: Any dtype, on the CPU; without an own embedding and head its guesses need the target's width.
        target: The target, already initialised, on the CPU.
        seed: Of the generator that all weights are drawn from.
        context_share: Weight in `fc` of the last captured state less the first.
        focus: How strongly a position attends to itself in the carrying heads.
        forget: How much of the previous position's state these take off the stream.
        mlp_share: Scale of the MLP's output.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    for _, parameter in sorted(drafter.named_parameters()):
        parameter.copy_(normal(*parameter.shape) if parameter.dim() == 2 else torch.ones(parameter.shape))
    drafter.midlayer.mlp.down_proj.weight.mul_(mlp_share)
    attention = drafter.midlayer.self_attn
    taken = _take_heads(attention, target)
    _carry_embeddings(attention, taken, generator, focus, forget)

    hidden = drafter.config.hidden_size
    blocks = torch.zeros(drafter.options.num_captured_layers, hidden, drafter.options.target_hidden_size)
    blocks[-1] += context_share * torch.eye(*blocks.shape[1:])
    blocks[0] -= context_share * torch.eye(*blocks.shape[1:])
    drafter.fc.weight.copy_(torch.cat(tuple(blocks), dim=1))

    known = torch.arange(drafter.options.draft_vocab_size)
    if drafter.d2t is not None and drafter.t2d is not None:
        known = torch.randperm(drafter.config.vocab_size, generator=generator)[: len(known)].sort().values
        drafter.d2t.copy_(known - torch.arange(len(known)))
        drafter.t2d.zero_()[known] = True
    if hidden == target.config.hidden_size:
        head: Any = target.get_output_embeddings()
        embedding: Any = target.get_input_embeddings()
        if drafter.lm_head is not None:
            drafter.lm_head.weight.copy_(head.weight[known])
        if drafter.embed_tokens is not None:
            drafter.embed_tokens.weight.copy_(embedding.weight)


def _take_heads(attention: Eagle3Attention, target: PreTrainedModel) -> int:
    """Copy the target's first attention layer into the drafter's first heads; gives how many key/value heads it took.

    None are taken where sizes differ or no head would be left to carry the embedding.
    """
    source: Any = next((m for m in target.modules() if isinstance(m, LlamaAttention)), None)
    if source is None or source.q_proj.in_features * 2 != attention.q_proj.in_features:
        return 0
    kv_heads = source.config.num_key_value_heads
    same_heads = (source.head_dim, source.num_key_value_groups) == (attention.head_dim, attention.num_key_value_groups)
    if not same_heads or kv_heads >= attention.config.num_key_value_heads:
        return 0
    for name in ("q_proj", "k_proj", "v_proj"):
        weight, copied = getattr(attention, name).weight, getattr(source, name).weight
        weight[: len(copied)] = torch.cat([copied, torch.zeros_like(copied)], dim=1)
    attention.o_proj.weight[:, : source.o_proj.in_features] = source.o_proj.weight
    return kv_heads


def _carry_embeddings(
    attention: Eagle3Attention, first_head: int, generator: torch.Generator, focus: float, forget: float
) -> None:
    """Queries and keys alike, so that a position finds itself; values that the output projection takes apart again."""
    head_dim, groups = attention.head_dim, attention.num_key_value_groups
    kv_rows = slice(first_head * head_dim, None)
    query_rows = slice(first_head * groups * head_dim, None)
    kv_width, width = attention.k_proj.weight[kv_rows].shape
    hidden = width // 2
    keys = torch.zeros(kv_width, width)
    keys[:, :hidden] = torch.randn(kv_width, hidden, generator=generator) * focus * hidden**-0.5
    per_query_head = keys.view(-1, head_dim, width).repeat_interleave(groups, dim=0)
    attention.k_proj.weight[kv_rows] = keys.to(attention.k_proj.weight.dtype)
    attention.q_proj.weight[query_rows] = per_query_head.flatten(0, 1).to(attention.q_proj.weight.dtype)
    # Orthonormal columns (all of the embedding gets through) or, where heads are too few for that, rows.
    tall = torch.randn(max(kv_width, hidden), min(kv_width, hidden), generator=generator)
    basis = torch.linalg.qr(tall).Q
    basis = basis if kv_width >= hidden else basis.T
    values = torch.cat([basis, -forget * basis], dim=1)
    attention.v_proj.weight[kv_rows] = values.to(attention.v_proj.weight.dtype)
    back = basis.T.reshape(hidden, -1, 1, head_dim).expand(-1, -1, groups, -1) / groups
    attention.o_proj.weight[:, query_rows] = back.reshape(hidden, -1).to(attention.o_proj.weight.dtype)
