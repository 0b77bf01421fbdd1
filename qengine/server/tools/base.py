"""What all forms of tool calls share: content and calls, character by character."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from qengine.server.tools.call_reader import CallReader
from qengine.server.tools.parts import CallArguments, CallStart, Content, ParsedTools, Part, call_id, merged

Format = dict[str, Any]
"""A format of xgrammar's structural tags."""


class ToolStream:
    """Takes a text in pieces and gives its parts; where it is cut does not matter.

    Each state is a method that takes a character. White space between content and calls is dropped. What begins like a
    call and is none is content, as it stands; so is one that the text's end cuts off. With `eager` the arguments of a
    call are handed on as they come, so these stay where the call turns out to be malformed later, or is cut off.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    needs_arguments: ClassVar[bool] = False

    def __init__(self, *, eager: bool) -> None:
        self._eager = eager
        self._state: Callable[[str], None] = self._in_text
        self._parts: list[Part] = []
        self._count = 0
        self._held = ""
        self._space = ""
        self._after_call = False
        self._raw = ""
        self._reader: CallReader | None = None
        self._markers = self.markers

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain after this much text."""
        for char in text:
            self._state(char)
        return self._take()

    def finish(self) -> list[Part]:
        """The parts left when the text is over."""
        if self._reader is None or not self._reader.started:
            raw, self._raw = self._raw, ""
            self._say(raw)
        held, self._held = self._held, ""
        self._say(held)
        if self._space and not self._after_call:
            self._parts.append(Content(self._space))
        self._space = ""
        return self._take()

    # What the forms add

    def make_id(self) -> str:
        """A new call's id."""
        return call_id()

    def _begin(self, marker: str) -> None:
        """A marker was met in the text."""
        raise NotImplementedError

    def _called(self) -> None:
        """A call is complete: go to the state that follows."""
        raise NotImplementedError

    # States

    def _in_text(self, char: str) -> None:
        self._held += char
        while self._held:
            if self._held in self._markers:
                marker, self._held = self._held, ""
                self._begin(marker)
                return
            if any(marker.startswith(self._held) for marker in self._markers):
                return
            self._say(self._held[0])
            self._held = self._held[1:]

    def _in_call(self, char: str) -> None:
        assert self._reader is not None, "a call is read"
        parts = self._reader.feed(char)
        if parts is None:
            self._fail(char)
            return
        self._raw += char
        self._add(parts)
        if self._reader.done:
            self._close()

    # Moves between them

    def _open(self, char: str) -> None:
        """Begin a call with its first character."""
        self._reader = CallReader(self._count, self.make_id, eager=self._eager, needs_arguments=self.needs_arguments)
        self._state = self._in_call
        self._in_call(char)

    def _close(self) -> None:
        self._count += 1
        self._raw, self._reader = "", None
        self._called()

    def _fail(self, char: str) -> None:
        """This is no call, or no more than its beginning: what was read is content, and `char` comes after it."""
        if self._reader is not None and self._reader.started:
            self._count += 1
        else:
            self._say(self._raw)
        self._raw, self._reader = "", None
        self._state, self._markers = self._in_text, self.markers
        self._state(char)

    def _add(self, parts: list[Part]) -> None:
        for part in parts:
            if isinstance(part, CallStart):
                self._space, self._after_call = "", True
            self._parts.append(part)

    def _say(self, text: str) -> None:
        """Content; white space at its end waits for what comes next."""
        body = text.rstrip()
        if not body:
            self._space += text
            return
        body = body.lstrip() if self._after_call else self._space + body
        self._after_call = False
        self._space = text[len(text.rstrip()) :]
        self._parts.append(Content(body))

    def _take(self) -> list[Part]:
        """What has come since the last time, neighbours of a kind as one."""
        taken: list[Part] = []
        for part in self._parts:
            last = taken[-1] if taken else None
            if isinstance(part, Content) and isinstance(last, Content):
                taken[-1] = Content(last.text + part.text)
            elif isinstance(part, CallArguments) and isinstance(last, CallArguments) and part.index == last.index:
                taken[-1] = CallArguments(part.index, last.text + part.text)
            else:
                taken.append(part)
        self._parts = []
        return taken


class ToolParser:
    """One form of tool calls.

    name: as in tool_call_parser. keeps_special_tokens: the markers are special tokens, so the text must be decoded with
    skip_special_tokens=False.
    """

    name: ClassVar[str]
    keeps_special_tokens: ClassVar[bool] = False
    stream_type: ClassVar[type[ToolStream]]

    def parse(self, text: str) -> ParsedTools:
        """Content and calls of a whole text; a call that is malformed or not complete is content."""
        stream = self.stream(eager=False)
        return merged([*stream.feed(text), *stream.finish()])

    def stream(self, *, eager: bool = True) -> ToolStream:
        """For a text that comes in pieces. eager: see ToolStream."""
        return self.stream_type(eager=eager)

    def forced(self, functions: list[tuple[str, Format]], *, parallel: bool) -> Format:
        """The format of a text that is calls and nothing else, at least one. functions: (name, JSON schema format)."""
        raise NotImplementedError
