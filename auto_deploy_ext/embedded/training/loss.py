"""Distillation over the draft vocabulary: value and gradient in one go, because the output head is frozen."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

LOGIT_ROWS = 1 << 15
"""Rows whose logits are held at a time."""


class _Distillation(torch.autograd.Function):
    """See `distillation_loss`."""

    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        head: torch.Tensor,
        teacher: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        soft_share: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        flat = states.detach().flatten(0, -2).to(head.dtype)
        labels, weights = labels.flatten(), weights.flatten()
        wanted = soft_share * teacher.flatten(0, -2).float()
        wanted += (1 - soft_share) * head[labels.clamp_min(0)].float()
        gradient = torch.empty(flat.shape, dtype=torch.float32, device=flat.device)
        loss = torch.zeros((), dtype=torch.float32, device=flat.device)
        guesses = torch.empty_like(labels)
        for first in range(0, len(flat), LOGIT_ROWS):
            part = slice(first, first + LOGIT_ROWS)
            logits = F.linear(flat[part], head)
            likeliest, guesses[part] = logits.max(dim=-1)
            probabilities = logits.softmax(dim=-1)
            normaliser = likeliest.float() - probabilities.amax(dim=-1).float().log()
            expected = (flat[part].float() * wanted[part]).sum(dim=-1)
            loss += ((normaliser - expected) * weights[part]).sum()
            gradient[part] = (probabilities @ head).float().sub_(wanted[part]).mul_(weights[part][:, None])
        ctx.save_for_backward(gradient.view(states.shape))
        ctx.mark_non_differentiable(guesses)
        return loss, guesses.view(states.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0], None, None, None, None, None


def distillation_loss(
    states: torch.Tensor,
    head: torch.Tensor,
    teacher: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    soft_share: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy against a mixture of the teacher's distribution and its likeliest token.

    The first teaches more per token, the second is what greedy acceptance asks for. Logits are linear in the head's
    rows, so a distribution's mean row says all that the loss needs of it, and the logits are read three times only.

    Args:
        states: [batch, bases, hidden], normed.
        head: [draft vocabulary, hidden]; gets no gradient.
        teacher: [batch, bases, hidden], the head's mean row under the teacher's distribution; any strides.
        labels: int64 [batch, bases] draft tokens; what stands at weight 0 does not matter.
        weights: float32 [batch, bases].
        soft_share: The teacher's distribution's share, 0 to 1.

    Returns:
        The weighted sum, and the guesses, int64 [batch, bases].
    """
    with torch.autocast(states.device.type, enabled=False):
        loss, guesses = _Distillation.apply(states, head, teacher, labels, weights, soft_share)
    return loss, guesses
