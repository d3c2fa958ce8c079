"""The sampled text and what the target computes on it: draft vocabulary, captured states, labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file

from ..models.checkpoint import readable
from .target import States, TrainingTarget, stable_attention_kernels

LABEL_ROWS = 8192
"""Tokens whose logits over the whole vocabulary are held at a time."""
COUNTED_ROWS = 8192
"""Sequences whose tokens are counted at a time."""
TRAINING_RESERVE = 44 << 30
"""Bytes of a GPU that states leave to the training step, and to the cache while text is written."""


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
    def most_frequent(
        cls, text: torch.Tensor, vocab_size: int, size: int, device: torch.device, counted: torch.Tensor | None = None
    ) -> DraftVocabulary:
        """Take the `size` tokens that the most sequences hold; ties go to the smaller id.

        A token counts once per sequence, or texts that run in circles would decide.

        Args:
            text: ints [sequences, length].
            vocab_size: Of the target.
            size: Of the draft vocabulary.
            device: Where it goes.
            counted: bool [sequences, length], tokens that count; None: all.
        """
        counts = torch.zeros(vocab_size + 1, dtype=torch.int64, device=device)
        for first in range(0, len(text), COUNTED_ROWS):
            part = text[first : first + COUNTED_ROWS].to(device=device, dtype=torch.int64)
            if counted is not None:
                part = part.masked_fill(~counted[first : first + COUNTED_ROWS].to(device), vocab_size)
            part = part.sort(dim=1).values
            new = torch.ones_like(part, dtype=torch.bool)
            new[:, 1:] = part[:, 1:] != part[:, :-1]
            counts += torch.bincount(part[new], minlength=vocab_size + 1)
        order = torch.sort(counts[:vocab_size].cpu(), descending=True, stable=True).indices
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


def save_text(path: Path, text: torch.Tensor, counted: torch.Tensor, about: dict[str, str]) -> None:
    """Keep a text, int32 [sequences, length], which tokens count, and what says how it was made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".partial")
    save_file({"tokens": text.contiguous(), "counted": counted.contiguous()}, scratch, metadata=about)
    scratch.replace(path)


def load_text(path: Path, about: dict[str, str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Read a kept text, and which of its tokens count.

    Raises:
        ValueError: It was made in another way than `about` says, or is damaged.
    """
    with readable(path, "delete it, and what is beside it, to sample again"):
        opened = safe_open(path, framework="pt")
    with opened as file:
        made = file.metadata() or {}
        different = sorted(key for key in about if made.get(key) != about[key])
        if different or "counted" not in file.keys():  # noqa: SIM118 (not a dict)
            raise ValueError(
                f"{path} was sampled with other settings ({', '.join(different)}); use the same ones to resume, or "
                "another --work-dir"
            )
        return file.get_tensor("tokens"), file.get_tensor("counted")


@dataclass(frozen=True)
class Batch:
    """Some sequences with the target's states.

    Attributes:
        tokens: int64 [batch, length].
        captured: [batch, length, layers * hidden], each channel divided by `FeatureStore.scale`.
        last: [batch, length, hidden] normed last states.
        labels: int64 [batch, length], the target's greedy next token.
        counted: float32 [batch, length], 1 where the next token is one that drafts are made for, else 0.
    """

    tokens: torch.Tensor
    captured: torch.Tensor
    last: torch.Tensor
    labels: torch.Tensor
    counted: torch.Tensor


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


@torch.no_grad()
def states_of(target: TrainingTarget, tokens: torch.Tensor) -> States:
    """Compute the states of whole sequences, int [rows, length]."""
    with stable_attention_kernels(target.device):
        captured, last = target.features(tokens.to(device=target.device, dtype=torch.int64))
    return States(captured, last, greedy_labels(target, last))


def batch_of(target: TrainingTarget, tokens: torch.Tensor, scale: torch.Tensor) -> Batch:
    """Compute a batch's states, int [batch, length] tokens; all of them count."""
    tokens = tokens.to(device=target.device, dtype=torch.int64)
    states = states_of(target, tokens)
    counted = torch.ones(tokens.shape, device=target.device)
    captured = (states.captured / scale).to(target.dtype)
    return Batch(tokens, captured, states.last, states.labels.to(torch.int64), counted)


class FeatureStore:
    """States of a text, kept on the target's device.

    Args:
        target: The model.
        text: int32 [sequences, length] on the CPU.
        rows: Sequences that are computed at a time, or that each part of `states` has.
        counted: bool [sequences, length], which tokens count; None: all.
        chosen: The sequences that batches are taken from, by number; None: all.
        states: What was kept of the text's states when it was written, in parts; None computes them. They are taken
            over and changed.
        scale: What `channel_scale` gave, or None to take it from the first sequences.
        progress: Told the tokens of each computed part.
    """

    def __init__(
        self,
        target: TrainingTarget,
        text: torch.Tensor,
        rows: int,
        counted: torch.Tensor | None = None,
        chosen: Sequence[int] | None = None,
        states: list[States] | None = None,
        scale: torch.Tensor | None = None,
        progress: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        self.text = text
        self.rows = rows
        self.chosen = range(len(text)) if chosen is None else chosen
        if counted is None:
            counted = torch.ones(text.shape, dtype=torch.bool)
        self._parts: list[tuple[torch.Tensor, States, torch.Tensor]] = []
        for number, part in enumerate(text.split(rows)):
            if states is None:
                kept = states_of(target, part)
                progress(part.numel())
            else:
                kept = states[number]
            if scale is None:
                scale = channel_scale(kept.captured[:1024])
            for some in kept.captured[: len(part)].split(256):
                some.div_(scale)
            following = counted[number * rows : number * rows + len(part)].roll(-1, dims=1)
            following[:, -1] = False
            self._parts.append((part.to(target.device), kept, following.to(target.device)))
        assert scale is not None, "a text without sequences"
        self.scale = scale

    def __len__(self) -> int:
        return len(self.chosen)

    @property
    def nbytes(self) -> int:
        """Memory that the states take."""
        return sum(kept.captured.nbytes + kept.last.nbytes for _, kept, _ in self._parts)

    def batch(self, sequences: Sequence[int]) -> Batch:
        """Put some of the chosen sequences together."""
        places = [divmod(self.chosen[sequence], self.rows) for sequence in sequences]
        parts = self._parts
        return Batch(
            tokens=torch.stack([parts[part][0][row] for part, row in places]).to(torch.int64),
            captured=torch.stack([parts[part][1].captured[row] for part, row in places]),
            last=torch.stack([parts[part][1].last[row] for part, row in places]),
            labels=torch.stack([parts[part][1].labels[row] for part, row in places]).to(torch.int64),
            counted=torch.stack([parts[part][2][row] for part, row in places]).float(),
        )


def sequences_that_fit(target: TrainingTarget, length: int) -> int | None:
    """How many sequences' states a GPU holds beside training; None on a CPU, where the user decides."""
    if target.device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(target.device)
    per_token = (len(target.capture) + 1) * target.hidden_size * target.head.element_size() + 8
    return max(1, (free - min(TRAINING_RESERVE, free // 2)) // (per_token * length))
