"""Guided decoding with speculation: grammars by xgrammar, masks filled by host functions, images in prompts."""

from __future__ import annotations

from .decoder import GuidedDecoder, GuidedError, GuidedRow
from .engine import FinishReason, GuidedEngine, GuidedOutput, GuidedRequest
from .grammar import GrammarCompiler, GrammarError, GrammarSpec, GrammarState, MissingExtraError, Vocabulary

__all__ = [
    "FinishReason",
    "GrammarCompiler",
    "GrammarError",
    "GrammarSpec",
    "GrammarState",
    "GuidedDecoder",
    "GuidedEngine",
    "GuidedError",
    "GuidedOutput",
    "GuidedRequest",
    "GuidedRow",
    "MissingExtraError",
    "Vocabulary",
]
