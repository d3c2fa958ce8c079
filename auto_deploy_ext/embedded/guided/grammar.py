"""What constrains a text: grammars, their compilation by xgrammar, and the state of one request in its grammar."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

BITS = 32
"""Tokens per word of a bitmask."""

BitMask = npt.NDArray[np.int32]


class MissingExtraError(ImportError):
    """Guided decoding is asked for without the packages of extra `guided`."""


class GrammarError(ValueError):
    """A grammar that cannot be compiled."""


def load_xgrammar() -> ModuleType:
    """Import xgrammar.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import xgrammar
    except ImportError as error:
        raise MissingExtraError(
            f"guided decoding needs xgrammar, which cannot be imported ({error}): pip install 'auto_deploy_ext[guided]'"
        ) from error
    return xgrammar


@dataclass(frozen=True)
class GrammarSpec:
    """What a text must be.

    Attributes:
        kind: how `text` says it.
        text: a JSON schema, a regular expression, or a grammar in EBNF whose start is `root`.
    """

    kind: Literal["json_schema", "regex", "ebnf"]
    text: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> GrammarSpec:
        """JSON that a schema describes, strictly: no other keys, no white space of the model's own choosing."""
        return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def regex(cls, pattern: str) -> GrammarSpec:
        """A text that a regular expression matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def ebnf(cls, grammar: str) -> GrammarSpec:
        """A text that a grammar derives."""
        return cls("ebnf", grammar)


@dataclass(frozen=True)
class Vocabulary:
    """The texts of the tokens, as far as a grammar sees them.

    Attributes:
        tokens: by token id; an empty one is special and never allowed.
        eos_token_id: ends a text.
    """

    tokens: tuple[bytes, ...]
    eos_token_id: int

    def __post_init__(self) -> None:
        """Reject an end that is no token."""
        if not 0 <= self.eos_token_id < len(self.tokens):
            raise ValueError(f"eos_token_id {self.eos_token_id} is not among {len(self.tokens)} tokens")

    @classmethod
    def of_bytes(cls, vocab_size: int, eos_token_id: int) -> Vocabulary:
        """The vocabulary of the random models: 256 bytes, then special tokens."""
        return cls(tuple(bytes([token]) if token < 256 else b"" for token in range(vocab_size)), eos_token_id)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of generated tokens, special ones left out, and ids beyond the vocabulary, which pad the logits."""
        known = (token for token in tokens if token < len(self.tokens) and token != self.eos_token_id)
        return b"".join(self.tokens[token] for token in known).decode(errors="replace")


#: after these first bytes of a UTF-8 character, only some second bytes make one.
_SECOND_BYTES = {0xE0: range(0xA0, 0xC0), 0xED: range(0x80, 0xA0), 0xF0: range(0x90, 0xC0), 0xF4: range(0x80, 0x90)}


class TextRules:
    """What no text may contain whatever its grammar: ill-formed UTF-8 and, in JSON, raw control characters.

    xgrammar 0.2 allows both in places: surrogates everywhere, control characters in strings with `maxLength`.

    Args:
        vocabulary: the tokens.
        logits_size: width of a mask in tokens.
        json_text: whether control characters are forbidden.
    """

    def __init__(self, vocabulary: Vocabulary, logits_size: int, json_text: bool) -> None:
        tokens = vocabulary.tokens
        sound = [self._is_sound(token) and not (json_text and any(b < 0x20 for b in token)) for token in tokens]
        words = -(-logits_size // BITS)
        self._allowed: dict[int, BitMask] = {}
        self._flags: dict[int, list[bool]] = {}
        for lead in (0, *_SECOND_BYTES):
            seconds = _SECOND_BYTES.get(lead)
            flags = [
                ok and (seconds is None or not token or token[0] in seconds)
                for token, ok in zip(tokens, sound, strict=True)
            ]
            bits = np.zeros(words * BITS, dtype=np.uint8)
            bits[: len(flags)] = flags
            self._flags[lead] = flags
            self._allowed[lead] = np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
        self._leads = [token[-1] if token and token[-1] in _SECOND_BYTES else 0 for token in tokens]

    @staticmethod
    def _is_sound(token: bytes) -> bool:
        pairs = itertools.pairwise(token)
        return all(second in _SECOND_BYTES[first] for first, second in pairs if first in _SECOND_BYTES)

    def restrict(self, mask: BitMask, lead: int) -> None:
        """Forbid in a mask ``[words]`` what may not follow a text that ends in `lead`."""
        np.bitwise_and(mask, self._allowed[lead], out=mask)

    def allows(self, token: int, lead: int) -> bool:
        """Whether a token may follow."""
        return token < len(self._leads) and self._flags[lead][token]

    def lead_after(self, token: int) -> int:
        """The last byte of a token, where it restricts what follows; else 0."""
        return self._leads[token]


class GrammarState:
    """Where a request is in its grammar; only host functions touch it once its request runs.

    Args:
        matcher: xgrammar's.
        rules: what holds beside the grammar.
        name: for messages.
    """

    def __init__(self, matcher: Any, rules: TextRules, name: str = "") -> None:
        self.name = name
        self.failed = False
        self._matcher = matcher
        self._rules = rules
        self._leads = [0]

    @property
    def terminated(self) -> bool:
        """Whether the text has ended: nothing can follow."""
        return self._matcher.is_terminated()

    def fill(self, bits: BitMask, row: int) -> None:
        """Write the tokens that may follow into a row of an int32 bitmask ``[rows, words]``.

        The bitmask is numpy's, as torch might call CUDA while it hands a tensor to xgrammar.
        After the end every token may follow: whoever asked for the text takes none of them.
        """
        if self.failed or self.terminated:
            bits[row] = -1
        else:
            self._matcher.fill_next_token_bitmask(bits, row)
            self._rules.restrict(bits[row], self._leads[-1])

    def accept(self, token: int) -> bool:
        """Take a token; says whether the grammar allows it. A refused one changes nothing."""
        if self.terminated or not self._rules.allows(token, self._leads[-1]):
            return False
        if not self._matcher.accept_token(token):
            return False
        self._leads.append(self._rules.lead_after(token))
        return True

    def rollback(self, count: int) -> None:
        """Take back the last tokens."""
        if count:
            self._matcher.rollback(count)
            del self._leads[-count:]

    def rollback_to(self, length: int) -> None:
        """Take back all tokens but the first `length`, of which there may be fewer."""
        self.rollback(max(len(self._leads) - 1 - length, 0))


class GrammarCompiler:
    """Compiles grammars for a vocabulary; equal ones once.

    Args:
        vocabulary: the tokens.
        logits_size: width of the model's logits, at least the vocabulary's size; ids beyond it are never allowed.

    Raises:
        MissingExtraError: xgrammar is not installed.
    """

    def __init__(self, vocabulary: Vocabulary, logits_size: int | None = None) -> None:
        self._xgrammar = load_xgrammar()
        self.vocabulary = vocabulary
        self.logits_size = logits_size if logits_size is not None else len(vocabulary.tokens)
        info = self._xgrammar.TokenizerInfo(
            list(vocabulary.tokens),
            vocab_type=self._xgrammar.VocabType.RAW,
            vocab_size=self.logits_size,
            stop_token_ids=[vocabulary.eos_token_id],
        )
        self._compiler = self._xgrammar.GrammarCompiler(info, max_threads=1)
        self._compiled: dict[GrammarSpec, Any] = {}
        self._rules: dict[bool, TextRules] = {}

    def start(self, spec: GrammarSpec, name: str = "") -> GrammarState:
        """The state before the first token.

        Raises:
            GrammarError: the grammar has an error.
        """
        if spec not in self._compiled:
            self._compiled[spec] = self._compile(spec)
        json_text = spec.kind == "json_schema"
        if json_text not in self._rules:
            self._rules[json_text] = TextRules(self.vocabulary, self.logits_size, json_text)
        return GrammarState(self._xgrammar.GrammarMatcher(self._compiled[spec]), self._rules[json_text], name)

    def _compile(self, spec: GrammarSpec) -> Any:
        compile_kind = {
            "json_schema": lambda text: self._compiler.compile_json_schema(text, any_whitespace=False),
            "regex": self._compiler.compile_regex,
            "ebnf": self._compiler.compile_grammar,
        }
        try:
            return compile_kind[spec.kind](spec.text)
        except (RuntimeError, ValueError) as error:
            shown = spec.text if len(spec.text) <= 80 else f"{spec.text[:77]}..."
            reason = str(error).strip().rpartition(".cc:")[2].partition(": ")[2] or str(error).strip()
            raise GrammarError(f"{spec.kind} {shown!r} cannot be compiled: {reason}") from error
