"""A real model over HTTP: SmolLM2 in INT4 answers as it does without the server, and in the form that is asked for."""

import asyncio
import json

import jsonschema
import openai
import pytest
from http_server import running

from qengine import SamplingParams
from qengine.cli.demo import ensure_demo_checkpoints

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "capital": {"type": "boolean"}},
    "required": ["city", "capital"],
}


@pytest.fixture(scope="module")
def server():
    with running(str(ensure_demo_checkpoints()["awq"]), engine={"max_model_len": 512}) as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    with server.client() as made:
        yield made


def without_http(server, messages, **params):
    async def run():
        async for output in server.llm.chat(messages, SamplingParams(**params)):
            last = output
        return last.outputs[0]

    return asyncio.run_coroutine_threadsafe(run(), server.server.loop).result(120)


def test_an_answer_whole_and_streamed(server, client):
    params = {"temperature": 0, "max_tokens": 24}
    wanted = without_http(server, MESSAGES, **params)
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, **params)
    assert answer.choices[0].message.content == wanted.text
    assert "Paris" in wanted.text
    assert answer.choices[0].finish_reason == wanted.finish_reason
    stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **params)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == wanted.text
    assert len(pieces) > 3


def test_streams_side_by_side_are_those_alone(server, client):
    """Greedy answers to different questions, asked at once."""
    questions = ["Name a color.", "Say hello in French.", "Count to five.", "Was ist ein Leuchtturm?", "日本の首都は?"]

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as asking:

            async def ask(question):
                text = ""
                stream = await asking.chat.completions.create(
                    model="tiny",
                    messages=[{"role": "user", "content": question}],
                    temperature=0,
                    max_tokens=24,
                    stream=True,
                )
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                return text

            return await asyncio.gather(*(ask(question) for question in questions))

    together = asyncio.run(ask_all())
    for question, text in zip(questions, together, strict=True):
        message = [{"role": "user", "content": question}]
        assert text == without_http(server, message, temperature=0, max_tokens=24).text
        assert "\ufffd" not in text


def test_json_of_a_schema(client):
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_tokens=100, response_format=form
    )
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)


def test_a_forced_call(client):
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}]
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=tools, tool_choice="required", parallel_tool_calls=False, temperature=0,
        max_tokens=150,
    )  # fmt: skip
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "look_up"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
