"""Grammars: compiling, masks, rollback, what no text may contain, and a missing xgrammar."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auto_deploy_ext.embedded.guided import (
    GrammarCompiler,
    GrammarError,
    GrammarSpec,
    GrammarState,
    MissingExtraError,
    Vocabulary,
)

from .conftest import EOS, VOCAB_SIZE

pytest.importorskip("xgrammar", reason="guided decoding needs extra guided")

COMPILER = GrammarCompiler(Vocabulary.of_bytes(VOCAB_SIZE, EOS))


def allowed(state: GrammarState) -> list[int]:
    """The tokens that may follow."""
    bits = np.zeros((1, -(-VOCAB_SIZE // 32)), dtype=np.int32)
    state.fill(bits, 0)
    return [token for token in range(VOCAB_SIZE) if (int(bits[0, token // 32]) >> (token % 32)) & 1]


def after(spec: GrammarSpec, text: bytes) -> GrammarState:
    state = COMPILER.start(spec)
    assert all(state.accept(byte) for byte in text)
    return state


@pytest.mark.parametrize(
    ("spec", "text", "following"),
    [
        (GrammarSpec.regex("(ab|cd)e"), b"", b"ac"),
        (GrammarSpec.regex("(ab|cd)e"), b"a", b"b"),
        (GrammarSpec.ebnf('root ::= "x" | "yz"'), b"", b"xy"),
        (GrammarSpec.json_schema({"enum": ["cat", "dog"]}), b'"', b"cd"),
        (GrammarSpec.json_schema({"type": "boolean"}), b"", b"ft"),
    ],
)
def test_a_mask_allows_what_may_follow(spec, text, following):
    assert bytes(allowed(after(spec, text))) == following


def test_only_the_end_may_follow_a_complete_text_and_anything_the_end():
    state = after(GrammarSpec.regex("ab"), b"ab")
    assert allowed(state) == [EOS] and not state.terminated
    assert state.accept(EOS) and state.terminated
    assert len(allowed(state)) == VOCAB_SIZE
    assert not state.accept(ord("a"))


def test_a_refused_token_changes_nothing_and_a_rollback_takes_tokens_back():
    state = after(GrammarSpec.regex("abc"), b"a")
    assert not state.accept(ord("c"))
    assert state.accept(ord("b")) and state.accept(ord("c")) and state.accept(EOS)
    state.rollback(3)
    assert bytes(allowed(state)) == b"b" and not state.terminated


def test_special_tokens_are_never_allowed():
    assert 257 not in allowed(COMPILER.start(GrammarSpec.regex(".*")))


def test_equal_grammars_are_compiled_once_and_have_states_of_their_own():
    spec = GrammarSpec.regex("[xy]z")
    first, second = COMPILER.start(spec), COMPILER.start(GrammarSpec.regex("[xy]z"))
    compiled = len(COMPILER._compiled)
    first.accept(ord("x"))
    assert bytes(allowed(first)) == b"z" and bytes(allowed(second)) == b"xy"
    COMPILER.start(spec)
    assert len(COMPILER._compiled) == compiled


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (GrammarSpec.regex("[a"), r"regex '\[a' cannot be compiled: .*Unclosed"),
        (GrammarSpec.ebnf("root ::= foo"), r"ebnf 'root ::= foo' cannot be compiled: .*\"foo\" is not defined"),
        (GrammarSpec.json_schema({"type": "objct"}), r"json_schema .* cannot be compiled: .*objct"),
    ],
)
def test_an_error_in_a_grammar_is_named(spec, message):
    with pytest.raises(GrammarError, match=message):
        COMPILER.start(spec)


def test_an_end_that_is_no_token_is_refused():
    with pytest.raises(ValueError, match="eos_token_id 300 is not among 258 tokens"):
        Vocabulary.of_bytes(VOCAB_SIZE, 300)


def test_ids_that_only_pad_the_logits_are_no_text():
    assert Vocabulary.of_bytes(VOCAB_SIZE, EOS).text([ord("a"), VOCAB_SIZE, 257, EOS, ord("b"), 10**6]) == "ab"


# xgrammar alone lets raw control characters into strings with maxLength, and surrogates into any string.
SHORT_STRING = GrammarSpec.json_schema({"type": "string", "maxLength": 4})


def test_a_json_string_contains_no_raw_control_characters():
    assert [token for token in allowed(after(SHORT_STRING, b'"')) if token < 0x20] == []


@pytest.mark.parametrize(
    ("lead", "low", "high"), [(0xE0, 0xA0, 0xBF), (0xED, 0x80, 0x9F), (0xF0, 0x90, 0xBF), (0xF4, 0x80, 0x8F)]
)
def test_no_text_contains_ill_formed_utf8(lead, low, high):
    for spec, text in ((SHORT_STRING, b'"'), (GrammarSpec.regex("[^x]*"), b"")):
        state = after(spec, text)
        assert state.accept(lead)
        following = allowed(state)
        assert (following[0], following[-1]) == (low, high)
        assert not state.accept(0xC0)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_every_walk_through_a_schema_ends_in_a_text_that_parses(data):
    schema = {
        "type": "object",
        "properties": {
            "s": {"type": "string", "maxLength": 3},
            "n": {"type": "integer", "minimum": -5, "maximum": 99},
            "l": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 2},
        },
        "required": ["s", "n", "l"],
        "additionalProperties": False,
    }
    state, text = COMPILER.start(GrammarSpec.json_schema(schema)), b""
    while not state.terminated:
        token = data.draw(st.sampled_from(allowed(state)))
        assert state.accept(token)
        text += bytes([token]) if token < 256 else b""
    value = json.loads(text.decode())  # strictly UTF-8
    assert len(value["s"]) <= 3 and -5 <= value["n"] <= 99 and set(value["l"]) <= {"x", "y"} and len(value["l"]) <= 2


def test_without_xgrammar_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(MissingExtraError, match=r"needs xgrammar.*pip install 'auto_deploy_ext\[guided\]'"):
        GrammarCompiler(Vocabulary.of_bytes(VOCAB_SIZE, EOS))
