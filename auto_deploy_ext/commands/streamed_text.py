"""Prints a continuation while it is generated, what was drafted and accepted in another colour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from ..embedded.requests import TokenEvent
    from ..embedded.tokenizer import Tokenizer

DRAFTED_STYLE = "green"
"""Of accepted drafts; what the target said itself is left as it is."""

_INCOMPLETE = "\ufffd"


class StreamedText:
    """Receives a request's token events and prints what is new.

    A character whose bytes are spread over several tokens is printed when its last token is there.

    Args:
        console: Where to; colours only if it is a terminal.
        tokenizer: Of the model.
    """

    def __init__(self, console: Console, tokenizer: Tokenizer) -> None:
        self._console = console
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._printed = ""

    def __call__(self, event: TokenEvent) -> None:
        """Print the text of the event's tokens; ends the line after the last ones."""
        for number, token in enumerate(event.tokens):
            self._tokens.append(token)
            text = self._tokenizer.decode(self._tokens)
            last = event.finished and number == len(event.tokens) - 1
            if text.endswith(_INCOMPLETE) and not last:
                continue
            style = DRAFTED_STYLE if number < event.num_drafted_accepted else None
            self._console.out(text[len(self._printed) :], style=style, end="", highlight=False)
            self._printed = text
        if event.finished:
            self._console.out("\n", end="")
        self._console.file.flush()
