"""The text and the bytes of single tokens, as logprobs show them."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from qengine.engine.detokenizer import BROKEN

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """Of one tokenizer; None if there is none, then every text is "token_id:N". Remembers what it was asked."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, list[int]] = {}

    def text(self, token: int) -> str:
        """Alone, without neighbours: part of a character shows as U+FFFD."""
        known = self._texts.get(token)
        if known is None:
            if self._tokenizer is None:
                known = f"token_id:{token}"
            else:
                known = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
            self._texts[token] = known
        return known

    def bytes(self, token: int) -> list[int]:
        """UTF-8; of a token that is part of a character, its true bytes."""
        known = self._bytes.get(token)
        if known is None:
            text = self.text(token)
            known = list(text.encode("utf-8", "replace"))
            if BROKEN in text and self._tokenizer is not None:
                known = _true_bytes(self._tokenizer.convert_ids_to_tokens(token)) or known
            self._bytes[token] = known
        return known


def _true_bytes(piece: str | None) -> list[int] | None:
    """Bytes of a vocabulary entry: byte fallback (`<0xE2>`) or GPT-2's byte alphabet; None if it is neither."""
    if piece is None:
        return None
    match = _BYTE_TOKEN.fullmatch(piece)
    if match:
        return [int(match[1], 16)]
    alphabet = _byte_alphabet()
    if all(letter in alphabet for letter in piece):
        return [alphabet[letter] for letter in piece]
    return None


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """Letter -> byte: printable bytes stand for themselves, the others follow from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
