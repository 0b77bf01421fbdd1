"""Follows one JSON object or list, character by character."""

from __future__ import annotations

import re

SPACE = " \t\n\r"
_SCALAR = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|true|false|null")
_WORDS = ("true", "false", "null")
_NUMBER_PREFIX = re.compile(r"-?((0|[1-9]\d*)(\.\d*)?([eE][+-]?\d*)?)?")
_CLOSES = {"{": "}", "[": "]"}
_DEEPEST = 200


class JsonScanner:
    """Accepts the characters of one object or list; `done` when it is complete.

    key: the key whose value is being read, at depth 1 of an object, as JSON text; value_starts: True right after the
    first character of such a value; value_ended: True right after its last, or with the character behind a number or
    word. depth: brackets open.
    """

    def __init__(self) -> None:
        self.done = False
        self.key = ""
        self.value_starts = False
        self.value_ended = False
        self._stack: list[str] = []
        self._expect = "open"
        self._text = ""
        self._escape = 0
        self._is_key = False

    @property
    def depth(self) -> int:
        """Brackets open."""
        return len(self._stack)

    def feed(self, char: str) -> bool:
        """Take a character; False if it cannot come here, after which the scanner is of no use."""
        self.value_starts = self.value_ended = False
        if self.done:
            return False
        if self._expect == "string":
            return self._in_string(char)
        if self._expect == "scalar":
            if char not in SPACE + ",}]":
                self._text += char
                return self._may_be_scalar()
            if _SCALAR.fullmatch(self._text) is None:
                return False
            self._end_value()
        if char in SPACE:
            return True
        return self._token(char)

    def _token(self, char: str) -> bool:
        expect = self._expect
        if char == '"' and expect in ("key", "key or end", "value", "value or end"):
            self._is_key = expect.startswith("key")
            return self._begin("string", char)
        if char in "{[" and expect in ("open", "value", "value or end"):
            return self._open(char)
        if char in "}]" and self._stack and _CLOSES[self._stack[-1]] == char:
            return self._close() if expect in ("comma", "key or end", "value or end") else False
        if char == "," and expect == "comma":
            self._expect = "key" if self._stack[-1] == "{" else "value"
            return True
        if char == ":" and expect == "colon":
            self._expect = "value"
            return True
        if expect in ("value", "value or end") and (char.isascii() and (char.isdigit() or char in "-tfn")):
            return self._begin("scalar", char)
        return False

    def _begin(self, kind: str, char: str) -> bool:
        if not (kind == "string" and self._is_key):
            self.value_starts = self._at_member()
        self._expect, self._text = kind, char
        return True

    def _open(self, char: str) -> bool:
        if self.depth >= _DEEPEST:
            return False
        self.value_starts = bool(self._stack) and self._at_member()
        self._stack.append(char)
        self._expect = "key or end" if char == "{" else "value or end"
        return True

    def _close(self) -> bool:
        self._stack.pop()
        if not self._stack:
            self.done = True
        else:
            self._end_value()
        return True

    def _in_string(self, char: str) -> bool:
        if self._escape == 1:
            if char == "u":
                self._escape = 5
            elif char in '"\\/bfnrt':
                self._escape = 0
            else:
                return False
        elif self._escape > 1:
            if char not in "0123456789abcdefABCDEF":
                return False
            self._escape = 0 if self._escape == 2 else self._escape - 1
        elif char == "\\":
            self._escape = 1
        elif char == '"':
            self._end_string()
        elif char < " ":
            return False
        if self._is_key and self.depth == 1:
            self._text += char
        return True

    def _end_string(self) -> None:
        if not self._is_key:
            self._end_value()
            return
        self._is_key, self._expect = False, "colon"
        if self.depth == 1:
            self.key = self._text + '"'

    def _end_value(self) -> None:
        self.value_ended = self._at_member()
        self._expect = "comma"

    def _at_member(self) -> bool:
        return self._stack == ["{"]

    def _may_be_scalar(self) -> bool:
        return any(word.startswith(self._text) for word in _WORDS) or _NUMBER_PREFIX.fullmatch(self._text) is not None
