"""What a text with tool calls consists of."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Content:
    """Text for the user."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins. index: from 0, in order."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments: a piece of JSON text."""

    index: int
    text: str


Part = Content | CallStart | CallArguments


@dataclass
class ToolCall:
    """A whole call. arguments: JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class ParsedTools:
    """content: the text beside the calls; None if there is none."""

    content: str | None
    calls: list[ToolCall] = field(default_factory=list)


def call_id() -> str:
    """A new id in OpenAI's form."""
    return f"call_{uuid.uuid4().hex}"


def short_call_id() -> str:
    """A new id as Mistral's chat templates demand: 9 letters and digits."""
    return uuid.uuid4().hex[:9]


def merged(parts: Iterable[Part]) -> ParsedTools:
    """The whole that the parts make up."""
    whole, content = ParsedTools(None), ""
    for part in parts:
        if isinstance(part, Content):
            content += part.text
        elif isinstance(part, CallStart):
            whole.calls.append(ToolCall(part.id, part.name))
        else:
            whole.calls[part.index].arguments += part.text
    whole.content = content or None
    return whole
