"""Text to token ids and back: UTF-8 bytes for the random models, a checkpoint's own tokenizer for a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from .models.sources import locate, resolve_source

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


class TokenizerError(ValueError):
    """A text cannot be encoded: there is no tokenizer, it cannot be loaded, or it has no chat template."""


class Tokenizer(Protocol):
    """What the command line needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt."""

    def encode_chat(self, text: str) -> list[int]:
        """Token ids of a conversation whose first turn is the text, up to where the answer begins."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Something readable for token ids."""


class ByteTokenizer:
    """A token is a UTF-8 byte; ids from 256 on have no text."""

    def encode(self, text: str) -> list[int]:
        """One token per byte."""
        return list(text.encode())

    def encode_chat(self, text: str) -> list[int]:
        """Raise: bytes have no template."""
        raise TokenizerError("a model without a checkpoint has no chat template: use prompt_style: plain")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Printable ASCII as itself, any other token as ``<id>``."""
        return "".join(chr(token) if 0x20 <= token < 0x7F else f"<{token}>" for token in token_ids)


class CheckpointTokenizer:
    """The tokenizer of a checkpoint, through transformers.

    Args:
        directory: Where its files are.

    Raises:
        TokenizerError: They are damaged or incomplete.
    """

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        self._directory = directory
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except Exception as error:  # of each tokenizer's own kind
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise TokenizerError(
                f"the tokenizer in {directory} cannot be loaded: {reason}; copy its files "
                f"({', '.join(TOKENIZER_FILES)}) again"
            ) from error

    def encode(self, text: str) -> list[int]:
        """Token ids, with the special tokens that the tokenizer puts around a text."""
        return self._tokenizer.encode(text)

    def encode_chat(self, text: str) -> list[int]:
        """Token ids by the tokenizer's chat template."""
        if not self._tokenizer.chat_template:
            raise TokenizerError(f"the tokenizer in {self._directory} has no chat template: use prompt_style: plain")
        turns = [{"role": "user", "content": text}]
        return self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, without special tokens."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


class NoTokenizer:
    """Stands for the tokenizer that a checkpoint does not have; its prompts are token ids.

    Args:
        directory: The checkpoint's.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def encode(self, text: str) -> list[int]:
        """Raise; the message says what is missing where."""
        raise TokenizerError(
            f"{self._directory} has no tokenizer (none of {', '.join(TOKENIZER_FILES)}): add one, or give prompts: as "
            "lists of token ids"
        )

    encode_chat = encode

    def decode(self, token_ids: Sequence[int]) -> str:
        """Every token as ``<id>``."""
        return "".join(f"<{token}>" for token in token_ids)


def load_tokenizer(model: str | None) -> Tokenizer:
    """The tokenizer of a checkpoint, given as `resolve_source` takes it; bytes where there is no checkpoint."""
    if model is None:
        return ByteTokenizer()
    path = locate(model)
    directory = resolve_source(model).directory if path.is_file() else path
    if any((directory / name).is_file() for name in TOKENIZER_FILES):
        return CheckpointTokenizer(directory)
    return NoTokenizer(directory)
