"""What the text of a request must look like: JSON of a schema, any JSON, a regex, a grammar or one of some strings."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from qengine.errors import RequestError

KINDS = ("json", "json_object", "regex", "grammar", "choice", "structural_tag")
MAX_NESTING = 64
"""Deepest nesting of a JSON schema's objects and lists."""


@dataclass(kw_only=True)
class StructuredOutputs:
    """Limits a request's text to a language; names and meaning as in vLLM's StructuredOutputsParams.

    Exactly one of: json, a JSON schema as a dict or as JSON text, whose properties come in its order and, unless
    additionalProperties says otherwise, no others; json_object=True, any JSON object; regex, which the whole text
    matches; grammar, EBNF in the GBNF dialect with a rule called root; choice, the strings of which the text is one;
    structural_tag, xgrammar's JSON description of texts with tagged parts.

    disable_any_whitespace: JSON on one line, with one space after each comma and colon, instead of whitespace at
    will. disable_additional_properties: without effect, as xgrammar never adds properties that the schema does not
    speak of. whitespace_pattern: not supported by xgrammar; None only.

    The limits of sizes are settings of the engine (config.StructuredConfig). Raises RequestError for values that are
    not allowed; whether a schema, regex or grammar is a valid one is known when it has been compiled.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        self.verify()

    def verify(self) -> None:
        """Check all values and bring them into one form."""
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            got = f"{' and '.join(given)} together" if given else "none"
            raise RequestError(f"structured_outputs needs exactly one of {', '.join(KINDS)}, got {got}")
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={getattr(self, name)!r} is not allowed; give True or False")
        if self.whitespace_pattern is not None:
            raise RequestError(
                "whitespace_pattern is not supported by xgrammar; leave it out, or set disable_any_whitespace=True"
            )
        getattr(self, f"_verify_{given[0]}")()

    @property
    def kind(self) -> str:
        """Which of KINDS is given."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def source(self) -> str:
        """What is given, as one text: equal texts of equal kinds and flags are the same language."""
        value = getattr(self, self.kind)
        if isinstance(value, str):
            return value
        return json.dumps(value, ensure_ascii=False)

    @property
    def key(self) -> tuple[str, str, bool]:
        """By which a compiled form is found again."""
        return self.kind, self.source, self.disable_any_whitespace

    def _verify_json(self) -> None:
        schema = _read_json("json", self.json)
        if not isinstance(schema, (dict, bool)):
            raise RequestError(f"json={schema!r} is not a JSON schema; give an object such as {{'type': 'object'}}")
        _check_nesting("json", schema)
        for target in _references(schema):
            if not isinstance(target, str) or not target.startswith("#"):
                raise RequestError(
                    f"json has the $ref {target!r}; only those within the schema are followed, such as '#/$defs/name'"
                )

    def _verify_structural_tag(self) -> None:
        tag = _read_json("structural_tag", self.structural_tag)
        if not isinstance(tag, dict):
            raise RequestError(f"structural_tag={tag!r} is not allowed; give an object with a 'format'")
        _check_nesting("structural_tag", tag)

    def _verify_json_object(self) -> None:
        if self.json_object is not True:
            raise RequestError(f"json_object={self.json_object!r} is not allowed; give True, or leave it out")

    def _verify_regex(self) -> None:
        _text("regex", self.regex)

    def _verify_grammar(self) -> None:
        _text("grammar", self.grammar)

    def _verify_choice(self) -> None:
        if isinstance(self.choice, (str, bytes, dict)) or not isinstance(self.choice, Iterable):
            raise RequestError(f"choice={self.choice!r} is not allowed; give a list of strings")
        self.choice = list(self.choice)
        for item in self.choice:
            _text("an entry of choice", item)
        if not self.choice:
            raise RequestError("choice=[] leaves nothing to answer; give at least one string")


StructuredOutputsParams = StructuredOutputs
"""vLLM's name."""


def _text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name}={value!r} is not allowed; give a string that is not empty")
    _check_encodable(name, value)


def _check_encodable(name: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not valid text: {error}; give text without lone surrogates") from error


def _read_json(name: str, value: Any) -> Any:
    """The JSON value of a text, or of an object that can be written as JSON."""
    try:
        if isinstance(value, str):
            _check_encodable(name, value)
            return json.loads(value)
        _check_encodable(name, json.dumps(value, ensure_ascii=False, allow_nan=False))
    except RequestError:
        raise
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name} is not JSON: {error}; give an object, or its JSON text") from error
    return value


def _check_nesting(name: str, value: Any) -> None:
    level = [value]
    for _ in range(MAX_NESTING):
        level = [item for parent in level for item in _children(parent)]
        if not level:
            return
    raise RequestError(f"{name} is nested more than {MAX_NESTING} deep; give a flatter one, or use $defs and $ref")


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()


def _references(schema: Any) -> Iterable[Any]:
    """Values of $ref anywhere but in literal values (enum, const, default, examples)."""
    todo = [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            todo += [v for k, v in value.items() if k not in ("enum", "const", "default", "examples")]
        elif isinstance(value, (list, tuple)):
            todo += value
