"""The head in training: a drafter, the target's frozen parts that it uses, and what both say about a batch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig

from ..models.custom.modeling_eagle3 import Eagle3Drafter, Eagle3Options
from .corpus import Batch, DraftVocabulary
from .multi_step import MultiStepForward
from .target import TrainingTarget, stable_attention_kernels

INITIAL_STD = 0.02


def drafter_config(target: TrainingTarget, draft_vocab_size: int, intermediate_size: int | None) -> LlamaConfig:
    """A drafter's config: the target's sizes, one layer, and the draft vocabulary."""
    fields = target.config.to_dict()
    for name in ("model_type", "architectures", "quantization_config", "_name_or_path", "transformers_version"):
        fields.pop(name, None)
    fields |= {"num_hidden_layers": 1, "draft_vocab_size": draft_vocab_size, "tie_word_embeddings": False}
    if intermediate_size is not None:
        fields["intermediate_size"] = intermediate_size
    config = LlamaConfig(**fields)
    config._attn_implementation = "eager"
    return config


def make_drafter(config: Any, target: TrainingTarget, seed: int) -> Eagle3Drafter:
    """A drafter without embedding and head of its own, float32, on the target's device, with seeded weights."""
    options = Eagle3Options(
        target_hidden_size=target.hidden_size,
        num_captured_layers=len(target.capture),
        draft_vocab_size=config.draft_vocab_size,
        own_embedding=False,
        own_lm_head=False,
    )
    drafter = Eagle3Drafter(config, options).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(drafter.named_parameters()):
            if parameter.dim() == 2:
                std = parameter.shape[1] ** -0.5 if name == "fc.weight" else INITIAL_STD
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        norm = getattr(target.body, "norm", None)
        if isinstance(norm, nn.Module) and isinstance(norm.weight, torch.Tensor):
            # The head's rows are frozen, and they are used to states of this scale.
            drafter.norm.weight.copy_(norm.weight)
    return drafter.to(target.device)


class TrainedHead:
    """What a batch means for the head.

    Args:
        drafter: The weights that are trained; `fc` takes captured states divided by their channels' scale.
        target: The target.
        vocabulary: What may be drafted.
        steps: Draft steps.
    """

    def __init__(self, drafter: Eagle3Drafter, target: TrainingTarget, vocabulary: DraftVocabulary, steps: int) -> None:
        self.drafter = drafter
        self.target = target
        self.vocabulary = vocabulary
        self.steps = steps
        self.forward = MultiStepForward(drafter, steps)
        self.rows = target.head[vocabulary.tokens].contiguous()

    def autocast(self) -> Any:
        """Products in bfloat16 on a GPU, everything in float32 on the CPU."""
        return torch.autocast("cuda", dtype=torch.bfloat16) if self.target.device.type == "cuda" else nullcontext()

    def states(self, batch: Batch) -> list[torch.Tensor]:
        """For every step the normed states [batch, bases, hidden]."""
        with self.autocast(), stable_attention_kernels(self.target.device):
            return self.forward(self.target.embedding[batch.tokens].float(), batch.captured)

    def shifted(self, values: torch.Tensor, step: int) -> torch.Tensor:
        """What a step is to guess: of [batch, length, ...], what stands 1 + step behind each base."""
        bases = self.forward.bases(values.shape[1])
        return values[:, 1 + step : 1 + step + bases]

    @torch.no_grad()
    def teacher(self, batch: Batch) -> torch.Tensor:
        """The head's mean row under the target's distribution over the draft vocabulary, [batch, length, hidden]."""
        return F.linear(batch.last, self.rows).softmax(dim=-1) @ self.rows

    @torch.no_grad()
    def matches(self, batch: Batch) -> torch.Tensor:
        """Whether each guess is what the target says: bool [steps, batch, bases]."""
        found = []
        for step, states in enumerate(self.states(batch)):
            guesses = F.linear(states.to(self.rows.dtype), self.rows).argmax(dim=-1)
            found.append(self.vocabulary.tokens[guesses] == self.shifted(batch.labels, step))
        return torch.stack(found)
