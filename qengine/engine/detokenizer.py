"""Token ids to text, one token at a time, never showing half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BROKEN = "\ufffd"
MAX_PENDING = 8
MAX_PARTIAL = 3
"""A UTF-8 character has at most 4 bytes and a token at least one, so at most 3 tokens end in a partial character."""
CONTEXT = 6


class IncrementalDetokenizer:
    """Text of one sequence as it grows.

    A token's text depends on its neighbours (a leading space that is dropped at the start, bytes of one character), so
    a short window is decoded: the tokens of the last text shown, then those not shown yet. What the second part adds
    is the new text. While the window's text ends in U+FFFD, a character may be incomplete and nothing is shown; after
    MAX_PENDING such tokens the bytes are wrong rather than incomplete, and all but the last three are shown.

    prompt_token_ids: tokens before the sequence. Text continues theirs: prompt text + text is the text of both.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = special_ids(tokenizer) if skip_special_tokens else frozenset()
        self._options: dict[str, Any] = {
            "skip_special_tokens": skip_special_tokens,
            "clean_up_tokenization_spaces": False,
        }
        if not spaces_between_special_tokens:
            self._options["spaces_between_special_tokens"] = False
        self._shown = [t for t in prompt_token_ids[-CONTEXT:] if t not in self._skipped]
        self._shown_text = self._decode(self._shown)
        self._pending: list[int] = []

    def add(self, token_ids: Sequence[int]) -> str:
        """Append tokens; returns the text that became certain."""
        return "".join([self._add(token) for token in token_ids])

    def finish(self) -> str:
        """The rest of the text. A character still incomplete at the end is dropped."""
        text = self._decode(self._shown + self._pending)[len(self._shown_text) :]
        self._pending = []
        return text.rstrip(BROKEN)

    def _add(self, token: int) -> str:
        if token in self._skipped:
            return ""
        self._pending.append(token)
        text = self._decode(self._shown + self._pending)
        if not text.endswith(BROKEN):
            if len(text) <= len(self._shown_text):  # no text of its own: keep it with its neighbours
                return ""
            return self._show(len(self._pending), text)
        if len(self._pending) < MAX_PENDING:
            return ""
        count = len(self._pending) - MAX_PARTIAL
        return self._show(count, self._decode(self._shown + self._pending[:count]))

    def _show(self, count: int, text: str) -> str:
        """Move the window over `count` pending tokens; `text` is that of the window up to there."""
        new = text[len(self._shown_text) :]
        self._shown, self._pending = self._pending[:count], self._pending[count:]
        self._shown_text = self._decode(self._shown)
        return new

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, **self._options) if token_ids else ""
        return text


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that decoding with skip_special_tokens leaves out; computed once a tokenizer."""
    known = getattr(tokenizer, "_qengine_special_ids", None)
    if known is None:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        known = frozenset(id_ for id_, token in added.items() if getattr(token, "special", False))
        tokenizer._qengine_special_ids = known
    return known
