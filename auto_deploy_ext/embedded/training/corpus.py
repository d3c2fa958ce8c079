"""The sampled text and what the target computes on it: draft vocabulary, captured states, labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file

from .target import TrainingTarget, stable_attention_kernels

LABEL_ROWS = 8192
"""Tokens whose logits over the whole vocabulary are held at a time."""
TRAINING_RESERVE = 34 << 30
"""Bytes of a GPU that states leave to the training step."""


@dataclass(frozen=True)
class DraftVocabulary:
    """The target's tokens that the head may draft.

    Attributes:
        tokens: int64 [draft vocabulary], ascending target ids, on the target's device.
        index: int64 [vocabulary], a target id's place in `tokens`, or -1.
    """

    tokens: torch.Tensor
    index: torch.Tensor

    @classmethod
    def most_frequent(cls, text: torch.Tensor, vocab_size: int, size: int, device: torch.device) -> DraftVocabulary:
        """Take the `size` most frequent tokens of a text (int [..]); ties go to the smaller id."""
        counts = torch.bincount(text.flatten().to(torch.int64), minlength=vocab_size)[:vocab_size]
        order = torch.sort(counts, descending=True, stable=True).indices
        return cls.of(order[: min(size, vocab_size)].sort().values, vocab_size, device)

    @classmethod
    def of(cls, tokens: torch.Tensor, vocab_size: int, device: torch.device) -> DraftVocabulary:
        """The vocabulary of ascending ids."""
        index = torch.full((vocab_size,), -1, dtype=torch.int64)
        index[tokens] = torch.arange(len(tokens))
        return cls(tokens.to(device), index.to(device))

    def share(self, text: torch.Tensor) -> float:
        """How much of a text can be drafted."""
        return float((self.index.cpu()[text.flatten().to(torch.int64)] >= 0).float().mean())


def save_text(path: Path, text: torch.Tensor, about: dict[str, str]) -> None:
    """Keep a text, int32 [sequences, length], with what says how it was made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".partial")
    save_file({"tokens": text.contiguous()}, scratch, metadata=about)
    scratch.replace(path)


def load_text(path: Path, about: dict[str, str]) -> torch.Tensor:
    """Read a kept text.

    Raises:
        ValueError: It was made in another way than `about` says.
    """
    with safe_open(path, framework="pt") as file:
        made = file.metadata() or {}
        different = sorted(key for key in about if made.get(key) != about[key])
        if different:
            raise ValueError(
                f"{path} was sampled with other settings ({', '.join(different)}); use the same ones to resume, or "
                "another --work-dir"
            )
        return file.get_tensor("tokens")


@dataclass(frozen=True)
class Batch:
    """Some sequences with the target's states.

    Attributes:
        tokens: int64 [batch, length].
        captured: [batch, length, layers * hidden], each channel divided by `FeatureStore.scale`.
        last: [batch, length, hidden] normed last states.
        labels: int64 [batch, length], the target's greedy next token.
    """

    tokens: torch.Tensor
    captured: torch.Tensor
    last: torch.Tensor
    labels: torch.Tensor


@torch.no_grad()
def greedy_labels(target: TrainingTarget, last: torch.Tensor) -> torch.Tensor:
    """The target's likeliest next token after each position: [batch, length, hidden] to int32 [batch, length]."""
    flat = last.flatten(0, 1)
    labels = [F.linear(part, target.head).argmax(dim=-1).to(torch.int32) for part in flat.split(LABEL_ROWS)]
    return torch.cat(labels).view(last.shape[:2])


@torch.no_grad()
def channel_scale(captured: torch.Tensor) -> torch.Tensor:
    """Root mean square of every channel, float32, the first position left out because its states are outliers."""
    square = captured[:, 1:].float().pow(2).mean(dim=(0, 1))
    return square.sqrt().clamp_min(1e-4)


def batch_of(target: TrainingTarget, tokens: torch.Tensor, scale: torch.Tensor) -> Batch:
    """Compute a batch's states, int [batch, length] tokens."""
    tokens = tokens.to(device=target.device, dtype=torch.int64)
    with stable_attention_kernels(target.device):
        captured, last = target.features(tokens)
    captured = (captured / scale).to(target.dtype)
    return Batch(tokens, captured, last, greedy_labels(target, last).to(torch.int64))


class FeatureStore:
    """States of a text, computed once and kept on the target's device.

    Args:
        target: The model.
        text: int32 [sequences, length] on the CPU.
        rows: Sequences that are computed at a time.
        scale: What `channel_scale` gave, or None to take it from the first rows.
        progress: Told the tokens of each part.
    """

    def __init__(
        self,
        target: TrainingTarget,
        text: torch.Tensor,
        rows: int,
        scale: torch.Tensor | None = None,
        progress: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        self.text = text
        self.rows = rows
        if scale is None:
            with stable_attention_kernels(target.device):
                scale = channel_scale(target.features(text[:rows].to(target.device, torch.int64))[0])
        self.scale = scale
        self._parts: list[Batch] = []
        for part in text.split(rows):
            batch = batch_of(target, part, scale)
            self._parts.append(Batch(part.to(target.device), batch.captured, batch.last, batch.labels.to(torch.int32)))
            progress(part.numel())

    def __len__(self) -> int:
        return int(self.text.shape[0])

    @property
    def nbytes(self) -> int:
        """Memory that the states take."""
        return sum(part.captured.nbytes + part.last.nbytes for part in self._parts)

    def batch(self, sequences: Sequence[int]) -> Batch:
        """Put some sequences together."""
        places = [divmod(sequence, self.rows) for sequence in sequences]
        parts = self._parts
        return Batch(
            tokens=torch.stack([parts[part].tokens[row] for part, row in places]).to(torch.int64),
            captured=torch.stack([parts[part].captured[row] for part, row in places]),
            last=torch.stack([parts[part].last[row] for part, row in places]),
            labels=torch.stack([parts[part].labels[row] for part, row in places]).to(torch.int64),
        )


def sequences_that_fit(target: TrainingTarget, length: int) -> int | None:
    """How many sequences' states a GPU holds beside training; None on a CPU, where the user decides."""
    if target.device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(target.device)
    per_token = (len(target.capture) + 1) * target.hidden_size * target.head.element_size() + 8
    return max(1, (free - min(TRAINING_RESERVE, free // 2)) // (per_token * length))
