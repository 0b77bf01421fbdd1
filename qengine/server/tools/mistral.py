"""Mistral's forms: [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], and the newer [TOOL_CALLS]name[ARGS]{...}.

A list without the marker is read too where the text begins with it: a model that must call a tool writes it so, as
the marker is a special token, which no grammar over text can ask for.
"""

from __future__ import annotations

import json
import string
from typing import ClassVar

from qengine.server.tools.base import Format, ToolParser, ToolStream
from qengine.server.tools.forms import json_call, some_of
from qengine.server.tools.json_scanner import SPACE
from qengine.server.tools.parts import short_call_id

MARKER, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
NAME_CHARACTERS = string.ascii_letters + string.digits + "_-.:/"


class MistralStream(ToolStream):
    """See the module."""

    markers: ClassVar[tuple[str, ...]] = (MARKER,)

    def __init__(self, *, eager: bool) -> None:
        super().__init__(eager=eager)
        self._state = self._at_start
        self._in_list = False
        self._name = ""
        self._tag = ""

    def make_id(self) -> str:
        """See ToolStream."""
        return short_call_id()

    def _begin(self, marker: str) -> None:
        self._raw, self._state, self._name, self._tag = marker, self._at_call, "", ""

    def _called(self) -> None:
        self._state = self._after_item if self._in_list else self._in_text

    def _fail(self, char: str) -> None:
        self._in_list = False
        super()._fail(char)

    def _at_start(self, char: str) -> None:
        """Before anything but white space."""
        if char in SPACE:
            self._say(char)
        elif char == "[":
            self._raw, self._state = "[", self._at_bare_list
        else:
            self._state = self._in_text
            self._in_text(char)

    def _at_bare_list(self, char: str) -> None:
        if char == "{" or char in SPACE:
            self._in_list = True
            self._at_item(char)
            return
        self._raw, self._state = "", self._in_text  # a marker, perhaps
        self._in_text("[")
        self._in_text(char)

    def _at_call(self, char: str) -> None:
        """After the marker."""
        if char in SPACE:
            self._raw += char
        elif char == "[":
            self._raw, self._in_list, self._state = self._raw + char, True, self._at_item
        elif char == "{":
            self._in_list = False
            self._open(char)
        else:
            self._in_list, self._state = False, self._at_name
            self._at_name(char)

    def _at_item(self, char: str) -> None:
        """Where a list's next call begins."""
        if char in SPACE:
            self._raw += char
            self._state = self._at_item
        elif char == "{":
            self._open(char)
        else:
            self._fail(char)

    def _after_item(self, char: str) -> None:
        if char == ",":
            self._state = self._at_item
        elif char == "]":
            self._in_list, self._state = False, self._in_text
        elif char not in SPACE:
            self._fail(char)

    def _at_name(self, char: str) -> None:
        """A function's name, up to its arguments."""
        if char == "{" and self._name and self._tag in ("", ARGS):
            self._open_named()
            self._state(char)
        elif char == "[" and self._name and not self._tag:
            self._raw, self._tag = self._raw + char, char
        elif (self._tag and self._tag != ARGS and self._tag_goes_on(char)) or (
            char in SPACE and self._name and self._tag in ("", ARGS)
        ):
            self._raw += char
        elif char in NAME_CHARACTERS and not self._tag and self._raw[-1:] not in SPACE:
            self._raw, self._name = self._raw + char, self._name + char
        else:
            self._fail(char)

    def _tag_goes_on(self, char: str) -> bool:
        """Whether a character continues [ARGS], or [CALL_ID], an id and [ARGS]."""
        tag = self._tag + char
        if ARGS.startswith(tag) or CALL_ID.startswith(tag):
            self._tag = tag
            return True
        if not self._tag.startswith(CALL_ID):
            return False
        self._tag = "[" if char == "[" else self._tag
        return char == "[" or char.isalnum()

    def _open_named(self) -> None:
        """Begin a call whose name stands before its arguments."""
        raw = self._raw
        self._open("{")
        for char in f'"name": {json.dumps(self._name)}, "arguments": ':
            self._in_call(char)
        self._raw, self._state = raw, self._in_arguments

    def _in_arguments(self, char: str) -> None:
        reader = self._reader
        self._in_call(char)
        if self._reader is reader and reader is not None and reader.depth == 1:
            self._in_call("}")


class MistralParser(ToolParser):
    """See the module."""

    name: ClassVar[str] = "mistral"
    keeps_special_tokens: ClassVar[bool] = True
    stream_type: ClassVar[type[ToolStream]] = MistralStream

    def forced(self, functions: list[tuple[str, Format]], *, parallel: bool) -> Format:
        """See ToolParser."""
        tags = [json_call("", name, "arguments", schema, "") for name, schema in functions]
        items = [
            {"type": "const_string", "value": "["},
            some_of(tags, ", ", parallel=parallel),
            {"type": "const_string", "value": "]"},
        ]
        return {"type": "sequence", "elements": items}
