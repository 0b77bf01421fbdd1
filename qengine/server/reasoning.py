"""Reasoning split off an answer: what stands between <think> and </think>, whole or as it comes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from qengine.errors import ConfigError
from qengine.structured_outputs import StructuredOutputs

START, END = "<think>", "</think>"


@dataclass(frozen=True)
class ReasoningForm:
    """How a family of models writes it. always: the answer begins with reasoning, its opening tag in the prompt or not
    written at all; else only where the tag comes first."""

    always: bool
    start: str = START
    end: str = END


REASONING_PARSERS = {"deepseek_r1": ReasoningForm(always=True), "qwen3": ReasoningForm(always=False)}


def reasoning_form(name: str) -> ReasoningForm:
    """The form of this name. Raises ConfigError."""
    if name not in REASONING_PARSERS:
        raise ConfigError(f"reasoning_parser={name!r} is not known; give one of {', '.join(REASONING_PARSERS)}")
    return REASONING_PARSERS[name]


class ReasoningSplitter:
    """Takes an answer in pieces and gives (reasoning, content); where it is cut does not matter.

    inside: the answer begins within the reasoning, as the prompt ends with the opening tag; None: as the form says. The
    white space around the tags is dropped. Without a closing tag all is reasoning.
    """

    def __init__(self, form: ReasoningForm = REASONING_PARSERS["qwen3"], *, inside: bool | None = None) -> None:
        self._form = form
        self._inside = form.always if inside is None else inside
        self._state = self._at_start
        self._held = ""
        self._space = ""
        self._said = ""
        self._reasons = ""

    def feed(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that are certain after this much text."""
        for char in text:
            self._state(char)
        return self._take()

    def finish(self) -> tuple[str, str]:
        """What is left when the text is over."""
        held, self._held = self._held, ""
        if self._state == self._at_start and not self._inside:
            self._said += held
        elif self._state != self._in_content:
            self._reason(held)
        return self._take()

    def _take(self) -> tuple[str, str]:
        taken = self._reasons, self._said
        self._reasons = self._said = ""
        return taken

    def _at_start(self, char: str) -> None:
        """Before anything but white space, which is part of the answer if no reasoning follows."""
        self._held += char
        mark = self._held.lstrip()
        if mark == self._form.start:
            self._held, self._state = "", self._in_reasoning
        elif self._form.start.startswith(mark):
            return
        elif self._inside:
            held, self._held, self._state = self._held.lstrip(), "", self._in_reasoning
            for one in held:
                self._state(one)
        else:
            self._said, self._held, self._state = self._held, "", self._in_content

    def _in_reasoning(self, char: str) -> None:
        self._held += char
        while self._held:
            if self._held == self._form.end:
                self._held, self._space, self._state = "", "", self._before_content
                return
            if self._form.end.startswith(self._held):
                return
            self._reason(self._held[0])
            self._held = self._held[1:]

    def _before_content(self, char: str) -> None:
        if not char.isspace():
            self._state = self._in_content
            self._in_content(char)

    def _in_content(self, char: str) -> None:
        self._said += char

    def _reason(self, text: str) -> None:
        """Reasoning without white space at its beginning; that at its end waits for what comes next."""
        for char in text:
            if char.isspace():
                self._space += char if self._began else ""
            else:
                self._reasons += self._space + char
                self._space, self._began = "", True

    _began = False


def split_reasoning(text: str, form: ReasoningForm, *, inside: bool | None = None) -> tuple[str | None, str | None]:
    """(reasoning, content) of a whole answer; None for what there is none of."""
    splitter = ReasoningSplitter(form, inside=inside)
    first, last = splitter.feed(text), splitter.finish()
    return first[0] + last[0] or None, first[1] + last[1] or None


def after_reasoning(wanted: StructuredOutputs, form: ReasoningForm, *, inside: bool | None = None) -> StructuredOutputs:
    """The same demand on what comes after the reasoning, which is free."""
    begins_inside = form.always if inside is None else inside
    thought: dict[str, Any] = {
        "type": "tag",
        "begin": "" if begins_inside else form.start,
        "content": {"type": "any_text"},
        "end": form.end,
    }
    if not begins_inside:
        thought = {"type": "optional", "content": thought}
    gap = {"type": "regex", "pattern": r"\n{0,2}"}
    return StructuredOutputs(
        structural_tag={
            "type": "structural_tag",
            "format": {"type": "sequence", "elements": [thought, gap, as_format(wanted)]},
        }
    )


def as_format(wanted: StructuredOutputs) -> dict[str, Any]:
    """A demand as a format of xgrammar's structural tags."""
    kind, value = wanted.kind, getattr(wanted, wanted.kind)
    if kind == "json":
        return {"type": "json_schema", "json_schema": json.loads(value) if isinstance(value, str) else value}
    if kind == "json_object":
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if kind == "regex":
        return {"type": "regex", "pattern": value}
    if kind == "grammar":
        return {"type": "grammar", "grammar": value}
    if kind == "choice":
        return {"type": "or", "elements": [{"type": "const_string", "value": word} for word in value]}
    tag = json.loads(value) if isinstance(value, str) else value
    return dict(tag["format"])
