"""Speculative rejection sampling: the drafter draws drafts, and what comes out is distributed as the target says."""

from __future__ import annotations

import torch


def probabilities(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """``[..., vocab]`` logits to float32 probabilities at a temperature above 0."""
    return torch.softmax(logits.float() / temperature, dim=-1)


def draw(weights: torch.Tensor) -> torch.Tensor:
    """Draw an index with probability proportional to its weight: ``[..., vocab]`` to int32 ``[...]``.

    An exponential clock of each index's rate; the first to ring wins. Nothing is read on the host. The random numbers
    are those of the device's default generator: `torch.manual_seed` makes them repeat.
    """
    clocks = torch.empty_like(weights).exponential_()
    return torch.argmax(weights / clocks, dim=-1).to(torch.int32)


def in_target_vocabulary(probs: torch.Tensor, d2t: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """A draft vocabulary's probabilities ``[..., draft vocab]`` as the target's ``[..., vocab]``, 0 elsewhere."""
    if d2t is None:
        return probs
    tokens = torch.arange(d2t.shape[0], device=d2t.device) + d2t
    return torch.zeros(*probs.shape[:-1], vocab_size, dtype=probs.dtype, device=probs.device).index_copy(
        -1, tokens, probs
    )


def verify(target: torch.Tensor, draft: torch.Tensor, drafted: torch.Tensor) -> torch.Tensor:
    """Accept drafts or replace them, position by position.

    A draft ``x`` drawn with ``q(x)`` is kept with probability ``min(1, p(x) / q(x))``, else replaced by a draw from
    ``max(p - q, 0)``, normalised. So the token of every position follows ``p``, whatever ``q`` is. A replacement never
    equals its draft: where the result equals the draft, it was accepted.

    Args:
        target: ``p``, float32 ``[n, K+1, vocab]``.
        draft: ``q``, float32 ``[n, K, vocab]``, from which the drafts have been drawn.
        drafted: int ``[n, K]``.

    Returns:
        int32 ``[n, K+1]``: tokens at all positions, the last drawn from ``p``; those behind a replaced draft are void.
    """
    drafted = drafted.to(torch.int64)
    verified = target[:, : drafted.shape[1]]
    p = verified.gather(2, drafted.unsqueeze(2)).squeeze(2)
    q = draft.gather(2, drafted.unsqueeze(2)).squeeze(2)
    rest = torch.clamp(verified - draft, min=0.0)
    # All of the rest is 0 only where q equals p up to rounding: then there is nothing else to draw.
    accepted = (torch.rand_like(p) * q < p) | (rest.amax(dim=-1) == 0)
    replaced = draw(torch.cat([rest, target[:, drafted.shape[1] :]], dim=1))
    kept = torch.where(accepted, drafted.to(torch.int32), replaced[:, : drafted.shape[1]])
    return torch.cat([kept, replaced[:, drafted.shape[1] :]], dim=1)
