"""Each kind of language, compiled by xgrammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from qengine.structured.vocabulary import import_xgrammar

SHORT, LONG = 256, 16384
"""Bytes up to which a source with patterns, or another one, is compiled within seconds, whatever it is."""


def is_risky(kind: str, source: str) -> bool:
    """True if compiling may take minutes and gigabytes: then it should be done where it can be stopped."""
    patterns = kind in ("regex", "grammar") or (
        kind in ("json", "structural_tag") and _PATTERN.search(source) is not None
    )
    return len(source) > (SHORT if patterns else LONG)


def _json(compiler: Any, source: str, any_whitespace: bool) -> Any:
    return _compiled(compiler, import_xgrammar().Grammar.from_json_schema(source, any_whitespace=any_whitespace))


def _choice(compiler: Any, source: str, any_whitespace: bool) -> Any:
    words = [{"type": "const_string", "value": word} for word in json.loads(source)]
    return _structural_tag(compiler, json.dumps({"format": {"type": "or", "elements": words}}), any_whitespace)


def _structural_tag(compiler: Any, source: str, any_whitespace: bool) -> Any:
    tag = json.dumps({"type": "structural_tag", **json.loads(source)})
    return _compiled(compiler, import_xgrammar().Grammar.from_structural_tag(tag))


def _compiled(compiler: Any, grammar: Any) -> Any:
    """A grammar with JSON in it; strings of limited length then have no control characters, which JSON forbids."""
    text = str(grammar)
    if LOOSE in text:
        grammar = import_xgrammar().Grammar.from_ebnf(text.replace(LOOSE, STRICT))
    return compiler.compile_grammar(grammar)


LOOSE, STRICT = r"[^\"\\\r\n]", r"[^\"\\\0-\x1f]"
"""What xgrammar 0.2.9 takes for the characters of a JSON string of limited length, and what they are."""
COMPILE: dict[str, Callable[[Any, str, bool], Any]] = {
    "json": _json,
    "json_object": lambda compiler, source, free: _json(compiler, '{"type": "object"}', free),
    "regex": lambda compiler, source, free: compiler.compile_regex(source),
    "grammar": lambda compiler, source, free: compiler.compile_grammar(source),
    "choice": _choice,
    "structural_tag": _structural_tag,
}
"""Kind -> (compiler, text, any whitespace in JSON) -> CompiledGrammar."""


def reason_of(error: Exception) -> str:
    """xgrammar's message without the place in its own source."""
    text = " ".join(str(error).split())
    text = re.sub(r"^\[[\d:]+\] \S+?:\d+: ", "", text)
    return re.sub(r"^Check failed: \(.*?\) is false: ", "", text)


_PATTERN = re.compile(r'"(pattern|patternProperties|grammar)"')
