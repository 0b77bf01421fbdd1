"""One tool call written as a JSON object, read as it comes."""

from __future__ import annotations

import json
from collections.abc import Callable

from qengine.server.tools.json_scanner import JsonScanner
from qengine.server.tools.parts import CallArguments, CallStart, Part

NAME = "name"
ARGUMENTS = ("arguments", "parameters")
IGNORED = ("type", "id")


class CallReader:
    """Reads {"name": ..., "arguments": {...}}, in any order of its keys; a string of JSON as arguments is unpacked.

    index, make_id: of the call. eager: hand arguments on as they come, when the name is known; else at the call's
    end, so that nothing comes of one that is malformed. needs_arguments: an object without them is no call.
    """

    def __init__(self, index: int, make_id: Callable[[], str], *, eager: bool, needs_arguments: bool = False) -> None:
        self.done = False
        self.started = False
        self._index = index
        self._make_id = make_id
        self._eager = eager
        self._needs = needs_arguments
        self._scanner = JsonScanner()
        self._name: str | None = None
        self._value: str | None = None
        self._field = ""
        self._arguments: str | None = None
        self._sent = 0

    def feed(self, char: str) -> list[Part] | None:
        """What a character adds; None if this is no call after all."""
        scanner = self._scanner
        opened = scanner.depth
        if not scanner.feed(char) or (opened == 0 and char == "["):
            return None
        if scanner.value_starts:
            self._field, self._value = json.loads(scanner.key), ""
            if not self._known(char):
                return None
        if self._value is not None and not (scanner.value_ended and self._is_scalar):
            self._value += char
        if scanner.value_ended and not self._take():
            return None
        if scanner.done:
            return self._end()
        return self._news() if self._eager else []

    @property
    def depth(self) -> int:
        """Brackets open."""
        return self._scanner.depth

    @property
    def _is_scalar(self) -> bool:
        return self._value is not None and self._value[:1] not in ("{", "[", '"')

    def _known(self, char: str) -> bool:
        """Whether a value that begins so may be that of the field."""
        if self._field == NAME:
            return char == '"' and self._name is None
        if self._field in ARGUMENTS:
            return char in '{"' and self._arguments is None
        return self._field in IGNORED

    def _take(self) -> bool:
        """Note the value of the field that has just ended."""
        assert self._value is not None, "a value ends that has not begun"
        value, self._value = self._value, None
        if self._field == NAME:
            self._name = json.loads(value)
            return bool(self._name)
        if self._field in ARGUMENTS:
            self._arguments = unpacked(value) if value[0] == '"' else value
            return self._arguments is not None
        return True

    def _end(self) -> list[Part] | None:
        if self._name is None or (self._arguments is None and self._needs):
            return None
        if self._arguments is None:
            self._arguments = "{}"
        self.done = True
        return self._news()

    def _news(self) -> list[Part]:
        """What can be handed on now."""
        arguments = self._arguments
        if arguments is None and self._field in ARGUMENTS and self._value and self._value[0] == "{":
            arguments = self._value
        if self._name is None or arguments is None:
            return []
        parts: list[Part] = []
        if not self.started:
            self.started = True
            parts.append(CallStart(self._index, self._make_id(), self._name))
        if len(arguments) > self._sent:
            parts.append(CallArguments(self._index, arguments[self._sent :]))
            self._sent = len(arguments)
        return parts


def unpacked(value: str) -> str | None:
    """The JSON object in a JSON string, as text; None if there is none in it."""
    try:
        text = json.loads(value)
        inner = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return text if isinstance(inner, dict) else None
