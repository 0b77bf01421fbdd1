"""response_format, structured_outputs and the older guided_* fields through the official client."""

import concurrent.futures
import json
import re

import httpx
import jsonschema
import openai
import pytest
from http_server import running
from pydantic import BaseModel

pytest.importorskip("xgrammar")
MESSAGES = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["a", "bč"]}},
    "required": ["id", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}


def ask(client, **more):
    more = {"temperature": 1.0, "max_tokens": 120, **more}
    return client.chat.completions.create(model="tiny", messages=MESSAGES, **more)


def test_json_schema_of_chat_whole_streamed_and_n(client):
    answer = ask(client, response_format=FORMAT, n=3)
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        assert choice.finish_reason == "stop"
    chunks = list(ask(client, response_format=FORMAT, stream=True, seed=3))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    jsonschema.validate(json.loads(text), SCHEMA)
    assert ask(client, response_format=FORMAT, seed=3).choices[0].message.content == text


def test_the_clients_own_parsing(client):
    class Thing(BaseModel):
        id: int
        kinds: list[bool]

    for _ in range(20):  # a random model may go on for long
        try:
            answer = client.chat.completions.parse(
                model="tiny", messages=MESSAGES, response_format=Thing, max_tokens=300, temperature=1.0
            )
        except openai.LengthFinishReasonError:
            continue
        assert isinstance(answer.choices[0].message.parsed, Thing)
        return
    pytest.fail("no answer came to an end")


@pytest.mark.parametrize(
    ("extra", "right"),
    [
        ({"structured_outputs": {"regex": "[ab]{3}x?"}}, lambda text: re.fullmatch("[ab]{3}x?", text)),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
        ({"structured_outputs": {"grammar": 'root ::= "<" [xy] ">"'}}, lambda text: re.fullmatch("<[xy]>", text)),
        ({"structured_outputs": {"json": SCHEMA}}, lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None),
        ({"guided_regex": "[ab]{3}x?"}, lambda text: re.fullmatch("[ab]{3}x?", text)),
        ({"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
    ],
)
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completions"])
def test_the_other_kinds(client, extra, right, chat):
    if chat:
        text = ask(client, extra_body=extra).choices[0].message.content
    else:
        text = (
            client.completions.create(model="tiny", prompt="Hello", max_tokens=120, temperature=1.0, extra_body=extra)
            .choices[0]
            .text
        )
    assert right(text), text


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"structured_outputs": {"regex": "(a"}}, 400, "regex cannot be compiled"),
        ({"structured_outputs": {"json_object": False}}, 400, "json_object=False is not allowed"),
        ({"structured_outputs": {"grammar": "root ::= other"}}, 400, "grammar cannot be compiled"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, 400, "one of"),
        ({"structured_outputs": {}}, 400, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, 400, "regexp"),
        ({"structured_outputs": {"regex": "a" * 70_000}}, 400, "at most 65536 are allowed"),
        ({"structured_outputs": {"choice": []}}, 400, "leaves nothing"),
        ({"structured_outputs": {"json_object": True, "whitespace_pattern": " "}}, 400, "whitespace_pattern"),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format has no schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}}}, 400,
         "Unsupported type"),
        ({"response_format": {"type": "yaml"}}, 400, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, 400, "one of"),
        ({"guided_json": "{"}, 400, "json is not JSON"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_refused_and_the_engine_lives(server, fields, status, text, stream):
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "stream": stream, **fields}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert text in error["message"]
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_json_object_and_many_at_once_beside_free_ones(client):
    def one(i):
        if i % 3 == 0:
            return ask(client, max_tokens=8, seed=i).choices[0].message.content is not None
        if i % 3 == 1:
            answer = ask(client, response_format={"type": "json_object"}, seed=i).choices[0]
            return answer.finish_reason == "length" or isinstance(json.loads(answer.message.content), dict)
        text = ask(client, extra_body={"structured_outputs": {"regex": f"n{i}[ab]{{4}}"}}).choices[0].message.content
        return re.fullmatch(f"n{i}[ab]{{4}}", text)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(18)))


def test_a_demand_after_the_reasoning():
    with running(reasoning_parser="deepseek_r1") as server, server.client() as client:
        extra = {"structured_outputs": {"choice": ["yes", "no"]}}
        ended = 0
        for seed in range(12):
            answer = ask(client, extra_body=extra, seed=seed, max_tokens=300, logit_bias={30: 20, 32: 10}).choices[0]
            if answer.finish_reason == "stop":
                ended += 1
                assert answer.message.content in ("yes", "no")
            else:
                assert answer.message.content in (None, "")
        assert ended >= 0
