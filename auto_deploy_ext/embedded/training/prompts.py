"""How sampled texts start: as people's prompts do, or with a word or two; and the pieces of a chat template."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .seeds import CHAT_STEMS, chat_stem, chat_turn, plain_start

PLAIN, USER, ANSWER = 0, 1, 2
"""Whose tokens a row's are."""

PLAIN_OPENINGS = (
    "The", "A", "In", "It was", "When", "After the", "There are", "This article", "She", "He", "We", "If you",
    "One of the", "For many", "Many people", "During the", "According to", "According to the", "The first",
    "The history of", "The main", "In the early", "In this", "Long ago", "On a", "As the", "My", "I", "How to",
    "Chapter 1", "Abstract:", "Introduction\n", "Question:", "Title:", "Step 1:", "# ", "## ", "- ", "1. ", "import",
    "import numpy", "from", "def ", "class ", "#include", "function", "public class", "SELECT", "<html>", "{\n",
    "Recipe:", "Dear", "Scientists", "Researchers", "The city of", "The river", "The human", "Water", "Mathematics",
    "The theory of", "A computer", "Music", "Children", "Plants", "The sun", "World War", "The country", "Energy",
    "Health", "Students", "Learning", "Learning to", "The best way to", "Every", "Although", "Because", "To", "Let",
    "An", "At the", "Once", "Two", "Most", "Some", "Animals", "The company", "The president", "The population of",
    "The teacher", "Two friends", "Mom", "Tom", "Lily", "Winter", "Early in the", "Far from",
)  # fmt: skip
"""Words that a plain text begins with; the target goes on from there."""

CHAT_OPENINGS = (
    "", "", "", "", "What is", "What are", "What", "How", "How do", "How can I", "How does", "Why", "Why do", "Why is",
    "Who", "When", "Where", "Which", "Can you", "Can you explain", "Could you", "Write", "Write a", "Write an",
    "Write a short", "Write a story about", "Write a poem", "Write a letter", "Write an email", "Write a Python",
    "Write a function", "Create a", "Explain", "Explain the", "Explain how", "Explain why", "Describe", "Describe the",
    "Give me", "Give an example", "List", "List the", "Name", "Tell me", "Tell me about", "Summarize", "Summarize the",
    "Translate", "Compare", "Define", "Suggest", "Help me", "I", "I am", "I have a", "I want to", "I need", "My",
    "Is", "Is it", "Are", "Do", "Does", "Should I", "Please", "Make a", "Generate a", "Rewrite", "Classify",
    "Calculate", "Find the", "Solve", "Compose a", "Design a", "Imagine", "Hi", "Hello", "In", "The", "If", "For",
    "Here is",
)  # fmt: skip
"""Words that a user turn begins with; the target writes the rest of it."""

STEM_SHARE = 0.65
"""Of user turns: the target completes them; the others are whole."""

_USER, _ANSWER = "\u2021user\u2021", "\u2021answer\u2021"


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template as token ids.

    Attributes:
        before_user: Everything before the first user turn.
        after_user: From the end of a user turn to the start of the answer; the first token ends the turn.
        after_answer: From the end of an answer to the next user turn; the first token ends the answer.
        sentence_ends: Tokens that end a sentence, so that a user turn can end there.
        follow_ups: Beginnings of further user turns; none leaves them to the target.
    """

    before_user: tuple[int, ...]
    after_user: tuple[int, ...]
    after_answer: tuple[int, ...]
    sentence_ends: tuple[int, ...] = ()
    follow_ups: tuple[tuple[int, ...], ...] = ((),)

    @classmethod
    def of(cls, tokenizer: Any) -> ChatTemplate | None:
        """Read it off a tokenizer of transformers; None where there is no template, or turns cannot be told apart."""
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            return None
        messages = [
            {"role": "user", "content": _USER},
            {"role": "assistant", "content": _ANSWER},
            {"role": "user", "content": _USER},
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        before, _, rest = text.partition(_USER)
        after_user, _, rest = rest.partition(_ANSWER)
        after_answer, _, _ = rest.partition(_USER)
        pieces = [tuple(encode(tokenizer, piece)) for piece in (before, after_user, after_answer)]
        if not pieces[0] or min(len(pieces[1]), len(pieces[2])) < 2:
            return None
        return cls(pieces[0], pieces[1], pieces[2])


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text as it stands, without special tokens around it."""
    return list(tokenizer(text, add_special_tokens=False).input_ids) if text else []


def chat_prompt(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a chat with one user turn, ready for the answer."""
    messages = [{"role": "user", "content": text}]
    return encode(tokenizer, tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


@dataclass(frozen=True)
class Start:
    """How one sequence starts.

    Attributes:
        tokens: Its first tokens.
        role: Who goes on: `PLAIN`, `USER` or `ANSWER`.
    """

    tokens: tuple[int, ...]
    role: int


class StartMaker:
    """Draws starts.

    Args:
        tokenizer: Of the target, or None: then a start is some random tokens.
        vocab_size: Of the target.
        chat_share: Share of chats, where the tokenizer has a template.
        general_share: Share of texts that only a word or two begin; the others begin as `seeds` says.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, chat_share: float, general_share: float = 1.0) -> None:
        self.tokenizer = tokenizer
        self.chat = ChatTemplate.of(tokenizer)
        self.chat_share = chat_share if self.chat else 0.0
        general = general_share if tokenizer is not None else 1.0
        shares = {
            "chat": (1 - general) * self.chat_share,
            "plain": (1 - general) * (1 - self.chat_share),
            "general": general,
        }
        self.shares = {kind: share for kind, share in shares.items() if share > 0}
        """Kinds of starts."""
        special = set(tokenizer.all_special_ids) if tokenizer is not None else set()
        self.ordinary = [token for token in range(vocab_size) if token not in special]
        if self.chat:
            ends = {encoded[-1] for text in ("Why?", "Go.", "Go!") if (encoded := encode(tokenizer, text))}
            follow_ups = tuple(tuple(encode(tokenizer, text)) for text in CHAT_STEMS)
            self.chat = replace(self.chat, sentence_ends=tuple(sorted(ends)), follow_ups=follow_ups)

    def draw(self, generator: random.Random, kind: str, count: int) -> list[Start]:
        """Some starts of a kind out of `shares`; the tokenizer is called once, because that is much quicker."""
        plans = [self._plan(generator, kind) for _ in range(count)]
        encoded: Sequence[Sequence[int]] = [()] * count
        if self.tokenizer is not None:
            encoded = self.tokenizer([text for _, text, _, _ in plans], add_special_tokens=False).input_ids
        starts = []
        for (before, _, after, role), tokens in zip(plans, encoded, strict=True):
            starts.append(Start((*before, *tokens, *after), role))
        return starts

    def _plan(self, generator: random.Random, kind: str) -> tuple[tuple[int, ...], str, tuple[int, ...], int]:
        """A start: tokens before a text, the text, tokens behind it, and who goes on."""
        if kind == "plain":
            return (), plain_start(generator), (), PLAIN
        if kind == "chat":
            assert self.chat is not None
            if generator.random() < STEM_SHARE:
                return self.chat.before_user, chat_stem(generator), (), USER
            return self.chat.before_user, chat_turn(generator), self.chat.after_user, ANSWER
        if self.chat and generator.random() < self.chat_share:
            return self.chat.before_user, generator.choice(CHAT_OPENINGS), (), USER
        if self.tokenizer is not None and generator.random() < 0.7:
            return (), generator.choice(PLAIN_OPENINGS), (), PLAIN
        return (generator.choice(self.ordinary),), "", (), PLAIN


class Excluded:
    """Tells texts that hold a prompt, or most of one: any `RUN` of its tokens in a row, or all of a shorter one.

    Args:
        prompts: Token ids of each.
    """

    RUN = 8

    def __init__(self, prompts: Sequence[Sequence[int]]) -> None:
        runs: dict[int, set[tuple[int, ...]]] = {}
        for prompt in prompts:
            length = min(self.RUN, len(prompt))
            for first in range(len(prompt) - length + 1):
                runs.setdefault(length, set()).add(tuple(prompt[first : first + length]))
        self.runs = {length: torch.tensor(sorted(found)) for length, found in runs.items() if length}

    @staticmethod
    def _hashes(windows: torch.Tensor) -> torch.Tensor:
        powers = [0x9E3779B1**power % (1 << 61) for power in range(1, windows.shape[-1] + 1)]
        factors = torch.tensor(powers, device=windows.device)
        return (windows.to(torch.int64) * factors).sum(dim=-1)  # wraps around, which does not matter

    def __call__(self, text: torch.Tensor, device: torch.device, rows: int = 2048) -> torch.Tensor:
        """Which rows of a text hold one.

        Args:
            text: int [rows, length] on the CPU.
            device: Where to look.
            rows: How many at a time.

        Returns:
            bool [rows] on the CPU.
        """
        found = torch.zeros(text.shape[0], dtype=torch.bool)
        for length, runs in self.runs.items():
            if length > text.shape[1]:
                continue
            wanted = self._hashes(runs.to(device))
            for first in range(0, text.shape[0], rows):
                windows = text[first : first + rows].to(device).unfold(1, length, 1)
                found[first : first + rows] |= torch.isin(self._hashes(windows), wanted).any(dim=1).cpu()
        return found
