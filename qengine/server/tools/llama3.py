"""Llama 3's JSON form: {"name": ..., "parameters": {...}} at the beginning of a line, or after <|python_tag|>."""

from __future__ import annotations

from typing import ClassVar

from qengine.server.tools.base import Format, ToolParser, ToolStream
from qengine.server.tools.forms import json_call, some_of
from qengine.server.tools.json_scanner import SPACE

PYTHON_TAG = "<|python_tag|>"


class Llama3Stream(ToolStream):
    """Several calls have ";" or "," or a new line between them. Objects with other keys are content."""

    markers: ClassVar[tuple[str, ...]] = (PYTHON_TAG,)
    needs_arguments: ClassVar[bool] = True

    def __init__(self, *, eager: bool) -> None:
        super().__init__(eager=eager)
        self._line_begins = True

    def _begin(self, marker: str) -> None:
        self._line_begins = True

    def _called(self) -> None:
        self._state = self._between

    def _in_text(self, char: str) -> None:
        if char == "{" and self._line_begins and not self._held:
            self._open(char)
            return
        super()._in_text(char)

    def _say(self, text: str) -> None:
        for char in text:
            self._line_begins = char == "\n" or (self._line_begins and char in SPACE)
        super()._say(text)

    def _fail(self, char: str) -> None:
        self._line_begins = False
        super()._fail(char)

    def _between(self, char: str) -> None:
        """After a call."""
        self._line_begins = True
        if char in SPACE:
            self._say(char)
        elif char not in ";,":
            self._state = self._in_text
            self._in_text(char)


class Llama3Parser(ToolParser):
    """See the module."""

    name: ClassVar[str] = "llama3_json"
    stream_type: ClassVar[type[ToolStream]] = Llama3Stream

    def forced(self, functions: list[tuple[str, Format]], *, parallel: bool) -> Format:
        """See ToolParser."""
        tags = [json_call("", name, "parameters", schema, "") for name, schema in functions]
        return some_of(tags, "; ", parallel=parallel)
