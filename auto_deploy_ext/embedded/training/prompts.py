"""How sampled texts start: openings of plain text and of user turns, and the pieces of a chat template."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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

_USER, _ANSWER = "\u2021user\u2021", "\u2021answer\u2021"


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template as token ids.

    Attributes:
        before_user: Everything before the first user turn.
        after_user: From the end of a user turn to the start of the answer; the first token ends the turn.
        after_answer: From the end of an answer to the next user turn; the first token ends the answer.
    """

    before_user: tuple[int, ...]
    after_user: tuple[int, ...]
    after_answer: tuple[int, ...]

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
        return cls(*pieces)


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
        is_chat: Whether a user turn is to be written next; else plain text.
    """

    tokens: tuple[int, ...]
    is_chat: bool


class StartMaker:
    """Draws starts.

    Args:
        tokenizer: Of the target, or None: then a start is some random tokens.
        vocab_size: Of the target.
        chat_share: Share of chats, where the tokenizer has a template.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, chat_share: float) -> None:
        self.chat = ChatTemplate.of(tokenizer)
        self.chat_share = chat_share if self.chat else 0.0
        special = set(tokenizer.all_special_ids) if tokenizer is not None else set()
        self.ordinary = [token for token in range(vocab_size) if token not in special]
        self.plain_openings = self._encode(tokenizer, PLAIN_OPENINGS)
        self.chat_openings = self._encode(tokenizer, CHAT_OPENINGS)

    @staticmethod
    def _encode(tokenizer: Any, openings: Sequence[str]) -> list[tuple[int, ...]]:
        return [] if tokenizer is None else [tuple(encode(tokenizer, text)) for text in openings]

    def draw(self, generator: random.Random) -> Start:
        """One start."""
        if self.chat and generator.random() < self.chat_share:
            return Start(self.chat.before_user + generator.choice(self.chat_openings), True)
        if self.plain_openings and generator.random() < 0.7:
            return Start(generator.choice(self.plain_openings), False)
        return Start((generator.choice(self.ordinary),), False)
