"""Tool calls over HTTP through the official client: auto, required and named, whole and streamed, in each form."""

import json

import httpx
import pytest
from http_server import running

pytest.importorskip("xgrammar")
MESSAGES = [{"role": "user", "content": "Hello"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Brno", "Plzeň"]}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
NOW = {"type": "function", "function": {"name": "now", "parameters": NOTHING}}
ARGUMENTS = '{"city": "Plzeň", "days": 3}'
TEXTS = {
    "hermes": f'Well.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    "llama3_json": f'Well.\n{{"name": "get_weather", "parameters": {ARGUMENTS}}};'
    ' {"name": "now", "parameters": {}}',
    "mistral": f'Well.[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}},'
    ' {"name": "now", "arguments": {}}]',
}


@pytest.fixture(scope="module", params=sorted(TEXTS))
def tools(request):
    """(name of the parser, server, client)."""
    with running(enable_auto_tool_choice=True, tool_call_parser=request.param) as server, server.client() as client:
        yield request.param, server, client


def ask(client, said=None, **more):
    """said: what the model will write, whatever its weights."""
    if said is not None:
        more["extra_body"] = {"structured_outputs": {"choice": [said]}}
    more = {"tools": [WEATHER, NOW], "temperature": 1.0, "max_tokens": 400, **more}
    return client.chat.completions.create(model="tiny", messages=MESSAGES, **more)


def collected(chunks):
    """(content, calls as (id, name, arguments), finish_reason, number of pieces of arguments) of a stream."""
    content, calls, reason, pieces = "", [], None, 0
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                if call.id:
                    assert call.index == len(calls), "a call begins once, in order"
                    assert call.type == "function"
                    calls.append([call.id, call.function.name, ""])
                if call.function.arguments:
                    calls[call.index][2] += call.function.arguments
                    pieces += 1
            reason = choice.finish_reason or reason
    return content, calls, reason, pieces


def check_ids(name, ids):
    assert len(set(ids)) == len(ids)
    for one in ids:
        assert (len(one) == 9 and one.isalnum()) if name == "mistral" else one.startswith("call_")


def test_the_model_decides_whole_and_streamed(tools):
    name, _, client = tools
    [choice] = ask(client, TEXTS[name]).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Well."
    found = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert found == [("get_weather", ARGUMENTS), ("now", "{}")]
    check_ids(name, [call.id for call in choice.message.tool_calls])
    content, calls, reason, pieces = collected(ask(client, TEXTS[name], stream=True))
    assert (content, reason) == ("Well.", "tool_calls")
    assert [tuple(call[1:]) for call in calls] == found
    check_ids(name, [call[0] for call in calls])
    assert pieces > 5, "arguments come as they are written"


def test_text_alone_and_malformed_calls_are_content(tools):
    name, _, client = tools
    broken = TEXTS[name].replace('"now"', "now").replace('"get_weather"', "get_weather")
    for text in ("Just text, {no} call [at] <all>.", broken):
        [choice] = ask(client, text).choices
        assert (choice.message.content, choice.finish_reason) == (text, "stop")
        assert not choice.message.tool_calls
        content, calls, reason, _ = collected(ask(client, text, stream=True))
        assert (content, calls, reason) == (text, [], "stop")


def test_a_call_is_required(tools):
    name, _, client = tools
    for seed in range(3):
        [choice] = ask(client, tool_choice="required", parallel_tool_calls=False, seed=seed).choices
        [call] = choice.message.tool_calls
        assert choice.message.content is None
        assert choice.finish_reason == "tool_calls"
        arguments = json.loads(call.function.arguments)
        if call.function.name == "get_weather":
            assert set(arguments) == {"city", "days"}
        else:
            assert call.function.name == "now"
        content, calls, _, _ = collected(
            ask(client, tool_choice="required", parallel_tool_calls=False, seed=seed, stream=True)
        )
        assert (content, [tuple(one[1:]) for one in calls]) == ("", [(call.function.name, call.function.arguments)])
        check_ids(name, [call.id])


def test_a_function_is_named(tools):
    _, _, client = tools
    choose = {"type": "function", "function": {"name": "get_weather"}}
    for stream in (False, True):
        answer = ask(client, tool_choice=choose, stream=stream)
        if stream:
            content, calls, reason, _ = collected(answer)
            [[_, called, arguments]] = calls
        else:
            [choice] = answer.choices
            [call] = choice.message.tool_calls
            content, called, arguments = choice.message.content, call.function.name, call.function.arguments
            reason = choice.finish_reason
        assert (content or None, called, reason) == (None, "get_weather", "stop")
        assert json.loads(arguments)["city"] in ("Brno", "Plzeň")


def test_none_may_be_called(tools):
    name, _, client = tools
    [choice] = ask(client, TEXTS[name], tool_choice="none").choices
    assert (choice.message.content, choice.finish_reason) == (TEXTS[name], "stop")


def test_a_conversation_with_results(tools):
    name, _, client = tools
    [choice] = ask(client, TEXTS[name]).choices
    more = [
        *MESSAGES,
        choice.message,
        *({"role": "tool", "tool_call_id": call.id, "content": "12 °C"} for call in choice.message.tool_calls),
    ]
    answer = client.chat.completions.create(model="tiny", messages=more, tools=[WEATHER], max_tokens=5)
    assert answer.choices[0].message.role == "assistant"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "not among the tools"),
        ({"tool_choice": "required", "tools": []}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "foo"}}}],
          "tool_choice": "required"}, "cannot be compiled"),
        ({"tools": [{"type": "function"}]}, "function"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused(tools, fields, text):
    _, server, _ = tools
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "tools": [WEATHER], **fields}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    assert text in answer.json()["error"]["message"]


def test_without_a_parser_only_what_is_forced(client):
    [choice] = ask(client, tool_choice="required", parallel_tool_calls=False).choices
    assert len(choice.message.tool_calls) == 1
    with pytest.raises(Exception, match="enable-auto-tool-choice"):
        ask(client)
