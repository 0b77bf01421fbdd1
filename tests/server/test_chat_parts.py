"""Tool calls, reasoning and structured output over HTTP; the random model is made to say what the test needs."""

import dataclasses
import json
import re

import jsonschema
import openai
import pytest
from http_server import running

from qengine.server import chat_choice

MESSAGES = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "?", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'


@pytest.fixture(scope="module")
def tools_server():
    with running(tool_call_parser="hermes", enable_auto_tool_choice=True) as server:
        yield server


@pytest.fixture(scope="module")
def tools_client(tools_server):
    with tools_server.client() as client:
        yield client


def ask(client, **request):
    request.setdefault("max_tokens", 200)
    return client.chat.completions.create(model="tiny", messages=MESSAGES, **request)


def said(text):
    """Nothing but this text."""
    return {"structured_outputs": {"choice": [text]}}


def collect(stream):
    """(reasoning, content, calls as (id, name, arguments), finish reason) of a stream."""
    reasoning, content, calls, reason = "", "", {}, None
    for chunk in stream:
        [choice] = chunk.choices
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            entry = calls.setdefault(call.index, ["", "", ""])
            if call.id:
                assert call.type == "function"
                entry[:2] = call.id, call.function.name
            entry[2] += call.function.arguments or ""
        reason = choice.finish_reason or reason
    return reasoning, content, [tuple(calls[index]) for index in sorted(calls)], reason


def whole(answer):
    """The same of a whole answer."""
    [choice] = answer.choices
    calls = [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    reasoning = getattr(choice.message, "reasoning_content", None) or ""
    return reasoning, choice.message.content or "", calls, choice.finish_reason


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def parts(request, tools_client):
    def get(**fields):
        answer = ask(tools_client, stream=request.param, **fields)
        return collect(answer) if request.param else whole(answer)

    return get


def test_a_call_that_the_model_decides_on(parts):
    _, content, calls, reason = parts(tools=TOOLS, extra_body=said("Let me see. " + CALL))
    assert content == "Let me see."
    [(call_id, name, arguments)] = calls
    assert call_id.startswith("call_")
    assert (name, json.loads(arguments)) == ("weather", {"city": "Oslo", "days": 3})
    assert reason == "tool_calls"


def test_an_answer_without_a_call(parts):
    assert parts(tools=TOOLS, extra_body=said("No need."))[1:] == ("No need.", [], "stop")


def test_parallel_calls(parts):
    both = CALL + "\n" + CALL.replace("Oslo", "Rome")
    calls = parts(tools=TOOLS, extra_body=said(both))[2]
    assert [json.loads(arguments)["city"] for _, _, arguments in calls] == ["Oslo", "Rome"]
    assert len({call_id for call_id, _, _ in calls}) == 2
    calls = parts(tools=TOOLS, parallel_tool_calls=False, extra_body=said(both))[2]
    assert [json.loads(arguments)["city"] for _, _, arguments in calls] == ["Oslo"]


def test_a_call_that_must_be_made(parts):
    _, content, calls, reason = parts(
        tools=TOOLS[:1], tool_choice="required", parallel_tool_calls=False, seed=3, max_tokens=400
    )
    assert (content, reason) == ("", "tool_calls")
    [(_, name, arguments)] = calls
    assert name == "weather"
    jsonschema.validate(json.loads(arguments), SCHEMA)


def test_a_named_call(parts):
    choice = {"type": "function", "function": {"name": "weather"}}
    _, content, [(_, name, arguments)], reason = parts(tools=TOOLS, tool_choice=choice, seed=4, max_tokens=400)
    assert (content, name, reason) == ("", "weather", "stop")
    jsonschema.validate(json.loads(arguments), SCHEMA)


def test_tools_that_may_not_be_called_are_text(parts):
    assert parts(tools=TOOLS, tool_choice="none", extra_body=said(CALL))[1:] == (CALL, [], "stop")


def test_tool_choices_that_are_refused(tools_client, client):
    with pytest.raises(openai.BadRequestError, match="names 'nope'"):
        ask(tools_client, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "nope"}})
    with pytest.raises(openai.BadRequestError, match="there are no tools"):
        ask(tools_client, tool_choice="required")
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        ask(tools_client, tools=TOOLS, tool_choice="maybe")
    with pytest.raises(openai.BadRequestError, match="--enable-auto-tool-choice"):
        ask(client, tools=TOOLS)


def test_reasoning(parts, tools_server, monkeypatch):
    """What the test makes it say includes the reasoning, so it is not asked for after it."""
    settings = dataclasses.replace(tools_server.settings, reasoning_parser="qwen3")
    monkeypatch.setattr(tools_server.state, "settings", settings)
    monkeypatch.setattr(chat_choice, "after_reasoning", lambda wanted, *_, **__: wanted)
    text = "<think>\nWhy not?\n</think>\n\nYes."
    assert parts(extra_body=said(text)) == ("Why not?", "Yes.", [], "stop")
    assert parts(extra_body=said(text) | {"include_reasoning": False}) == ("", "Yes.", [], "stop")
    thought = "<think>\nWhy not?\n</think>\n\n" + CALL
    reasoning, content, [(_, name, _)], reason = parts(tools=TOOLS, extra_body=said(thought))
    assert (reasoning, content, name, reason) == ("Why not?", "", "weather", "tool_calls")


@pytest.mark.parametrize(
    ("form", "check"),
    [
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None,
        ),
        (
            {"extra_body": {"structured_outputs": {"regex": "[ab]{3}-[0-9]{2}"}}},
            re.compile("[ab]{3}-[0-9]{2}").fullmatch,
        ),
        ({"extra_body": {"guided_regex": "[ab]{3}"}}, re.compile("[ab]{3}").fullmatch),
        ({"extra_body": {"guided_choice": ["yes", "no"]}}, ("yes", "no").__contains__),
        ({"extra_body": {"guided_json": SCHEMA}}, lambda text: json.loads(text)["city"] in ("Oslo", "Rome")),
        ({"extra_body": {"guided_grammar": 'root ::= "x" | "y" root'}}, re.compile("y*x").fullmatch),
    ],
)
def test_structured_output(client, form, check):
    if form.get("response_format") == {"type": "json_object"}:
        form = {**form, "logit_bias": {str(token): 60 for token in brackets(client)}}
    for seed in (1, 2):
        answer = ask(client, seed=seed, max_tokens=300, **form)
        assert check(answer.choices[0].message.content), answer.choices[0].message.content


def brackets(client):
    """The random model would never close its objects."""
    answer = client.post("../tokenize", body={"prompt": "}"}, cast_to=dict)
    return answer["tokens"]


@pytest.mark.parametrize(
    "form",
    [
        {"structured_outputs": {"regex": "("}},
        {"structured_outputs": {"grammar": "nothing"}},
        {"structured_outputs": {"json": {"type": "nonsense"}}},
        {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"regex": "a" * 100_000}},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_structured_output_that_is_wrong(client, form, stream):
    with pytest.raises(openai.BadRequestError):
        ask(client, stream=stream, extra_body=form)
    assert ask(client, max_tokens=1).choices
