"""Hermes' and Qwen's form: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them."""

from __future__ import annotations

from typing import ClassVar

from qengine.server.tools.base import Format, ToolParser, ToolStream
from qengine.server.tools.forms import json_call, some_of
from qengine.server.tools.json_scanner import SPACE

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesStream(ToolStream):
    """A missing closing tag is forgiven; so is text between the object and the tag, which is content."""

    markers: ClassVar[tuple[str, ...]] = (OPEN,)

    def _begin(self, marker: str) -> None:
        self._markers = self.markers
        if marker == OPEN:
            self._raw, self._state = OPEN, self._at_object

    def _called(self) -> None:
        self._state, self._markers = self._in_text, (OPEN, CLOSE)

    def _at_object(self, char: str) -> None:
        if char in SPACE:
            self._raw += char
        elif char == "{":
            self._open(char)
        else:
            self._fail(char)


class HermesParser(ToolParser):
    """See the module."""

    name: ClassVar[str] = "hermes"
    stream_type: ClassVar[type[ToolStream]] = HermesStream

    def forced(self, functions: list[tuple[str, Format]], *, parallel: bool) -> Format:
        """See ToolParser."""
        tags = [json_call(OPEN + "\n", name, "arguments", schema, "\n" + CLOSE) for name, schema in functions]
        return some_of(tags, "\n", parallel=parallel)
