"""Text to token ids and back: UTF-8 bytes for the random models, a checkpoint's own tokenizer for a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


class Tokenizer(Protocol):
    """What the command line needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Something readable for token ids."""


class ByteTokenizer:
    """A token is a UTF-8 byte; ids from 256 on have no text."""

    def encode(self, text: str) -> list[int]:
        """One token per byte."""
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        """Printable ASCII as itself, any other token as ``<id>``."""
        return "".join(chr(token) if 0x20 <= token < 0x7F else f"<{token}>" for token in token_ids)


def load_tokenizer(model: str | None) -> Tokenizer:
    """The tokenizer in a checkpoint directory, or bytes where ``model`` is none or has no tokenizer files."""
    if model and any((Path(model) / name).is_file() for name in TOKENIZER_FILES):
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
        return tokenizer
    return ByteTokenizer()
