"""Calls that must be made: whatever a model says under their grammar, the parser reads calls of the tools."""

import json
import random

import jsonschema
import pytest

from qengine.errors import RequestError
from qengine.server.tools import TOOL_PARSERS, forced_calls, tool_parser

pytest.importorskip("xgrammar")
from grammar_walk import fits, store, walk

WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Brno", 'Pl"zeň']}, "days": {"$ref": "#/$defs/days"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
    },
}
NOW = {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
BARE = {"name": "anything"}


@pytest.fixture(scope="module")
def made():
    grammars = store()
    yield grammars
    grammars.close()


def calls_of(name, text):
    whole = tool_parser(name).parse(text)
    stream = tool_parser(name).stream()
    parts = [part for char in text for part in stream.feed(char)] + stream.finish()
    assert whole.content is None, text
    assert not any(hasattr(part, "text") and not hasattr(part, "index") for part in parts), "content in a stream"
    return [(call.name, json.loads(call.arguments)) for call in whole.calls]


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_every_random_text_is_calls_of_the_tools(made, name):
    wanted, rng, counts = forced_calls(tool_parser(name), [WEATHER, NOW]), random.Random(3), set()
    for _ in range(12):
        text = walk(made, wanted, rng, limit=1500)
        if text is None:  # many calls
            continue
        calls = calls_of(name, text)
        counts.add(len(calls))
        for called, arguments in calls:
            tool = {"get_weather": WEATHER, "now": NOW}[called]
            jsonschema.validate(arguments, tool["parameters"])
    assert counts
    assert min(counts) >= 1
    assert max(counts) > 1


@pytest.mark.parametrize("name", sorted(TOOL_PARSERS))
def test_one_call_where_only_one_is_wanted(made, name):
    rng = random.Random(4)
    for wanted, known in (
        (forced_calls(tool_parser(name), [WEATHER, NOW], "now"), {"now"}),
        (forced_calls(tool_parser(name), [WEATHER, NOW], parallel=False), {"now", "get_weather"}),
    ):
        for _ in range(5):
            [(called, _)] = calls_of(name, walk(made, wanted, rng, limit=1500))
            assert called in known


def test_a_tool_without_parameters_takes_any_object(made):
    wanted = forced_calls(tool_parser("hermes"), [BARE])
    assert fits(made, wanted, '<tool_call>\n{"name": "anything", "arguments": {"x": [1]}}\n</tool_call>')
    assert not fits(made, wanted, '<tool_call>\n{"name": "anything", "arguments": 5}\n</tool_call>')


def test_what_is_not_allowed(made):
    parser = tool_parser("hermes")
    with pytest.raises(RequestError, match="names 'other', which is not among the tools: get_weather, now"):
        forced_calls(parser, [WEATHER, NOW], "other")
    with pytest.raises(RequestError, match="there are no tools"):
        forced_calls(parser, [])
    with pytest.raises(RequestError, match="give a JSON schema"):
        forced_calls(parser, [{"name": "f", "parameters": [1]}])
    with pytest.raises(RequestError, match="cannot be compiled"):
        made.request(forced_calls(parser, [{"name": "f", "parameters": {"type": "nothing"}}])).result(60)
