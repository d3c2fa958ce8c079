"""Distillation over the draft vocabulary: value and gradient in one go, because the output head is frozen."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

LOGIT_ROWS = 1 << 15
"""Rows whose logits are held in float32 at a time."""


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
        rows_per_batch = max(1, LOGIT_ROWS // states.shape[1])
        gradient = torch.empty_like(flat)
        loss = torch.zeros((), dtype=torch.float32, device=flat.device)
        guesses = torch.empty_like(labels)
        for first in range(0, states.shape[0], rows_per_batch):
            part = slice(first * states.shape[1], (first + rows_per_batch) * states.shape[1])
            soft = teacher[first : first + rows_per_batch].reshape(-1, teacher.shape[-1])
            logits = F.linear(flat[part], head).float()
            label = labels[part].clamp_min(0)[:, None]
            normaliser = logits.logsumexp(dim=-1)
            expected = soft_share * (logits * soft).sum(dim=-1)
            expected += (1 - soft_share) * logits.gather(1, label)[:, 0]
            loss += ((normaliser - expected) * weights[part]).sum()
            guesses[part] = logits.argmax(dim=-1)
            slope = logits.sub_(normaliser[:, None]).exp_()
            slope.add_(soft, alpha=-soft_share)
            slope.scatter_add_(1, label, torch.full_like(label, soft_share - 1, dtype=slope.dtype))
            slope.mul_(weights[part][:, None])
            gradient[part] = slope.to(head.dtype) @ head
        ctx.save_for_backward(gradient.view(states.shape))
        ctx.mark_non_differentiable(guesses)
        return loss, guesses.view(states.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient.float() * gradients[0], None, None, None, None, None


def distillation_loss(
    states: torch.Tensor,
    head: torch.Tensor,
    teacher: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    soft_share: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy against a mixture of the teacher's distribution and its likeliest token.

    The first teaches more per token, the second is what greedy acceptance asks for.

    Args:
        states: [batch, bases, hidden], normed.
        head: [draft vocabulary, hidden]; gets no gradient.
        teacher: [batch, bases, draft vocabulary] probabilities, any strides.
        labels: int64 [batch, bases] draft tokens; what stands at weight 0 does not matter.
        weights: float32 [batch, bases].
        soft_share: The teacher's distribution's share, 0 to 1.

    Returns:
        The weighted sum, and the guesses, int64 [batch, bases].
    """
    with torch.autocast(states.device.type, enabled=False):
        loss, guesses = _Distillation.apply(states, head, teacher, labels, weights, soft_share)
    return loss, guesses
