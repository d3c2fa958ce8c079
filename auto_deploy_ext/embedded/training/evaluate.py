"""Acceptance by simulation: how many drafts a target would accept, walked over texts whose greedy tokens are known."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .corpus import batch_of
from .head import TrainedHead
from .prompts import PLAIN, Start, chat_prompt, encode
from .sampling import Rows, write
from .target import TrainingTarget

KINDS = ("chat", "plain")
"""Of prompts."""

OWN_PROMPTS = (
    ("chat", "Name five things that fit into a small backpack for a hike."),
    ("chat", "Why does bread rise in the oven?"),
    ("chat", "Write three sentences about a cat that is afraid of rain."),
    ("chat", "How can I remember the names of new people?"),
    ("plain", "A good library is more than a collection of books. It"),
    ("plain", "The three states of matter are"),
    ("plain", "On the last day of the holidays, the two sisters"),
    ("plain", "Steam engines changed the way in which goods"),
)
"""Held-out prompts where none are given."""


@dataclass(frozen=True)
class Continuation:
    """A prompt and its greedy continuation.

    Attributes:
        kind: "chat" or "plain".
        tokens: Both together.
        prompt_length: Tokens of the prompt.
        end: Drafting stops at this position: the end token's, or where the asked-for new tokens end.
    """

    kind: str
    tokens: list[int]
    prompt_length: int
    end: int


@dataclass(frozen=True)
class Acceptance:
    """How drafts fared.

    Attributes:
        length: Mean of accepted tokens plus one, per target step.
        positions: For each draft step the share of target steps whose drafts were accepted that far.
        steps: Target steps.
    """

    length: float
    positions: tuple[float, ...]
    steps: int

    @classmethod
    def of(cls, accepted: Sequence[int], draft_steps: int) -> Acceptance:
        """From the accepted drafts of every target step."""
        count = max(1, len(accepted))
        positions = tuple(sum(1 for a in accepted if a > step) / count for step in range(draft_steps))
        return cls(1 + sum(accepted) / count, positions, len(accepted))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"length": self.length, "positions": list(self.positions), "steps": self.steps}

    def __str__(self) -> str:
        shares = " ".join(f"{share:.3f}" for share in self.positions)
        return f"{self.length:.3f} (accepted at least 1, 2, ... drafts: {shares}; {self.steps} steps)"


def read_prompts(path: Path | None) -> list[tuple[str, str]]:
    """(kind, text) from a JSON list of `{"kind": "chat" | "plain", "text": ...}`, or the package's own.

    Raises:
        OSError: The file cannot be read.
        ValueError: It has another form, or lists nothing.
    """
    if path is None:
        return list(OWN_PROMPTS)
    form = '{"kind": "chat" or "plain", "text": "..."}'
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not a JSON list of {form}: {error}") from error
    if not isinstance(items, list) or not items:
        raise ValueError(f"{path} should be a JSON list of at least one {form}")
    return [_prompt(item, f"{path}, entry {number}: ", form) for number, item in enumerate(items, start=1)]


def _prompt(item: Any, where: str, form: str) -> tuple[str, str]:
    """One entry of a file of prompts, checked."""
    if not isinstance(item, dict) or not {"kind", "text"} <= item.keys():
        raise ValueError(f"{where}should be {form}, it is {json.dumps(item)[:80]}")
    kind, text = item["kind"], item["text"]
    if kind not in KINDS:
        raise ValueError(f'{where}kind should be "chat" or "plain", it is {json.dumps(kind)[:80]}')
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}text should be a string that is not empty, it is {json.dumps(text)[:80]}")
    return kind, text


def prompt_tokens(tokenizer: Any, prompts: Sequence[tuple[str, str]], vocab_size: int) -> list[tuple[str, list[int]]]:
    """(kind, token ids); without a tokenizer a prompt's bytes, and chats are plain."""
    found = []
    for kind, text in prompts:
        if tokenizer is None:
            found.append(("plain", [byte % vocab_size for byte in text.encode()]))
        elif kind == "chat" and getattr(tokenizer, "chat_template", None):
            found.append((kind, chat_prompt(tokenizer, text)))
        else:
            found.append(("plain", encode(tokenizer, text)))
    return found


def continue_greedily(
    target: TrainingTarget,
    prompts: Sequence[tuple[str, list[int]]],
    new_tokens: int,
    beyond: int,
    end_token: int | None,
) -> list[Continuation]:
    """Let the target continue prompts; `beyond` further tokens are what the last drafts are compared with."""
    starts = [Start(tuple(tokens), PLAIN) for _, tokens in prompts]
    rows = Rows.of(starts, [0.0] * len(starts), "greedy", target.device)
    rows.stirs.zero_()
    length = max(len(start.tokens) for start in starts) + new_tokens + beyond
    text = write(target, rows, None, length, 0).tokens.tolist()
    found = []
    for (kind, prompt), row in zip(prompts, text, strict=True):
        end = len(prompt) + new_tokens
        if end_token is not None and end_token in row[len(prompt) : end]:
            end = row.index(end_token, len(prompt))
        found.append(Continuation(kind, row, len(prompt), end))
    return found


def walk(matches: torch.Tensor, first: int, end: int) -> list[int]:
    """Accepted drafts of every target step.

    Args:
        matches: bool [steps, bases] on the CPU.
        first: The base of the first draft: a prompt's last position.
        end: Where drafting ends, exclusive.
    """
    run = matches.to(torch.int64).cumprod(dim=0).sum(dim=0).tolist()
    accepted = []
    base = first
    while base < min(end, len(run)):
        accepted.append(run[base])
        base += run[base] + 1
    return accepted


def greedy_acceptance(head: TrainedHead, continuations: Sequence[Continuation], scale: torch.Tensor) -> list[list[int]]:
    """Accepted drafts of every target step, for each continuation."""
    tokens = torch.tensor([item.tokens for item in continuations])
    found = []
    for part, items in zip(tokens.split(32), _parts(continuations, 32), strict=True):
        matches = head.matches(batch_of(head.target, part, scale)).cpu()
        for row, item in enumerate(items):
            found.append(walk(matches[:, row], item.prompt_length - 1, item.end - 1))
    return found


def sampled_acceptance(
    head: TrainedHead, text: torch.Tensor, counted: torch.Tensor, scale: torch.Tensor, rows: int
) -> Acceptance:
    """Acceptance on sampled sequences; right is a draft that is the target's likeliest.

    Args:
        head: What drafts.
        text: int [sequences, length].
        counted: bool [sequences, length], tokens that drafts are made for.
        scale: See `FeatureStore`.
        rows: Sequences at a time.
    """
    accepted: list[int] = []
    for part, wanted in zip(text.split(rows), counted.split(rows), strict=True):
        matches = head.matches(batch_of(head.target, part, scale)).cpu()
        for row, flags in enumerate(wanted.tolist()):
            for first, end in runs(flags):
                accepted += walk(matches[:, row], max(0, first - 1), end - 1)
    return Acceptance.of(accepted, head.steps)


def runs(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """Where flags are set: (first, end) of each run, the end exclusive."""
    padded = [False, *flags, False]
    edges = [index for index in range(len(flags) + 1) if padded[index] != padded[index + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _parts(items: Sequence[Continuation], size: int) -> list[Sequence[Continuation]]:
    return [items[first : first + size] for first in range(0, len(items), size)]
