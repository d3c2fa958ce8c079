"""The MTP-style drafter: one attention layer over the next token's embedding and the hidden state before it."""

from __future__ import annotations

import torch
from torch import nn
from transformers import BambaConfig
from transformers.models.bamba.modeling_bamba import BambaDecoderLayer, BambaRMSNorm, BambaRotaryEmbedding

NUM_CAPTURED_LAYERS = 1
"""The drafter starts from one captured state: the residual stream after the target's last layer."""


class MTPDrafter(nn.Module):
    """Guesses the token after next from the next token and the target's (later its own) hidden state.

    Embedding and head are the target's, so it has none of its own.

    Args:
        config: sizes and attention implementation; the same hidden size as the target's.
    """

    def __init__(self, config: BambaConfig) -> None:
        """Make the layer with uninitialised weights."""
        super().__init__()
        self.config = config
        self.embedding_norm = BambaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = BambaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = BambaDecoderLayer(config, layer_idx=0, layer_type="full_attention")
        self.final_layernorm = BambaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = BambaRotaryEmbedding(config)

    def get_input_embeddings(self) -> None:
        """None: tokens are embedded by the target's table."""
        return None

    def get_output_embeddings(self) -> None:
        """None: logits come from the target's head."""
        return None

    def forward(
        self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer over whole sequences.

        Args:
            inputs_embeds: ``[b, s, hidden]`` the target's embedding of the token after each position.
            position_ids: ``[b, s]`` int64.
            hidden_states: ``[b, s, hidden]`` the hidden state at each position.

        Returns:
            ``(norm_hidden_state, last_hidden_state)``, each ``[b, s, hidden]``: what the head is applied to, and what
            the next draft step starts from.
        """
        joined = torch.cat([self.embedding_norm(inputs_embeds), self.hidden_norm(hidden_states)], dim=-1)
        x = self.input_proj(joined)
        position_embeddings = self.rotary_emb(x, position_ids=position_ids)
        last_hidden_state, _ = self.layer(x, position_ids=position_ids, position_embeddings=position_embeddings)
        return self.final_layernorm(last_hidden_state), last_hidden_state


@torch.no_grad()
def initialise_mtp(
    model: MTPDrafter,
    seed: int,
    attention_share: float = 3.2,
    mlp_share: float = 0.3,
    contrast: float = 1.6,
    hidden_share: float = 0.5,
) -> None:
    """Fill a drafter with seeded weights that guess a target made by ``initialise_hybrid`` partly right.

    The projection passes the embedding through, to which that target's head answers with its usual next token, and
    adds a share of the hidden state, which carries context. The layer's branches disturb this, attention so much
    that what the drafter's cache holds shows in its guesses.

    Args:
        model: any dtype, on the CPU.
        seed: of the generator that all weights are drawn from.
        attention_share: scale of the attention's output projection.
        mlp_share: scale of the MLP's output projection.
        contrast: scale of queries and of keys; more makes attention pick single tokens.
        hidden_share: weight of the hidden state beside the embedding's 1.
    """
    generator = torch.Generator().manual_seed(seed)
    scales = {
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
            parameter.fill_(1.0)
    identity = torch.eye(model.config.hidden_size)
    model.input_proj.weight.copy_(torch.cat([identity, hidden_share * identity], dim=1))
