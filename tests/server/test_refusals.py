"""What is refused, with which status, and that the engine lives on."""

import json

import httpx
import openai
import pytest
from http_server import running, tiny_model
from pydantic import ValidationError
from tiny_llm import copy_of

from qengine.server.protocol_completions import CompletionRequest

CHAT = [{"role": "user", "content": "Hello"}]


def post(server, path="/v1/completions", **body):
    return httpx.post(f"{server.url}{path}", json=body)


def error(answer, status=400):
    """The error, in OpenAI's shape."""
    assert answer.status_code == status, answer.text
    found = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    return found


@pytest.fixture(autouse=True)
def alive(server):
    yield
    assert post(server, prompt="Hello", max_tokens=1).status_code == 200
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"temperature": -1}, "temperature", "[0, inf)"),
        ({"top_p": 1.5}, "top_p", "[0, 1]"),
        ({"top_k": -2}, "top_k", "at least 1, or 0 or -1"),
        ({"n": 0}, "n", "1 to 16384"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "lower one or raise the other"),
        ({"logprobs": 321}, "logprobs", "max_logprobs=320"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "outside the vocabulary"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"5": "x"}}, "logit_bias", "number"),
        ({"stop_token_ids": [999999]}, "stop_token_ids", "outside the vocabulary"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "leaves nothing"),
        ({"stop": [""]}, "stop", "not empty"),
        ({"seed": 2**70}, "seed", "2**64"),
        ({"best_of": 3}, "best_of", "n=3"),
        ({"suffix": "x"}, "suffix", "left to right"),
        ({"priority": "x"}, "priority", "integer"),
        ({"response_format": {"type": "xml"}}, "response_format", "'json_object'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "no schema"),
        ({"structured_outputs": {"json_object": False}}, "json_object", "give True"),
        ({"structured_outputs": {}}, "structured_outputs", "asks for nothing"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "response_format", "constrained 2 times"),
        ({"n": 2000}, "n", "--max-choices"),
        ({"stop": ["a"] * 1025}, "stop", "--max-words"),
        ({"bad_words": ["a"] * 1025}, "bad_words", "--max-words"),
        ({"bad_words": ["a" * 65537]}, "bad_words", "65536 are allowed"),
        ({"allowed_token_ids": [5] * 1000}, "allowed_token_ids", "more than the vocabulary"),
    ],
)
def test_values(server, body, param, says, stream):
    found = error(post(server, prompt="Hello", stream=stream, **body))
    assert says in found["message"]
    assert found["type"] == "invalid_request_error"
    assert found["param"] == param


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (None, "forms"),
        ([], "holds no prompt"),
        (5, "forms"),
        ([True], "forms"),
        ([["a"]], "forms"),
        ([999999], "outside the vocabulary"),
        ([-1], "outside the vocabulary"),
        (list(range(3, 300)) * 4, "max_model_len=512"),
        ("\ud800", "lone surrogates"),
    ],
)
def test_prompts(server, prompt, says):
    answer = httpx.post(
        f"{server.url}/v1/completions",
        content=json.dumps({"prompt": prompt}),
        headers={"Content-Type": "application/json"},
    )
    assert says in error(answer)["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "value"), [("cache_salt", "\ud800"), ("bad_words", ["\ud800"])])
def test_texts_that_are_no_text(server, name, value, stream):
    content = json.dumps({"prompt": "a", "stream": stream, name: value})
    answer = httpx.post(f"{server.url}/v1/completions", content=content, headers={"Content-Type": "application/json"})
    found = error(answer)
    assert found["param"] == name
    assert "lone surrogates" in found["message"]


def test_a_wrong_list_is_told_once(server):
    """Each form of a prompt would else report each of its entries: seconds in which nobody else is served."""
    with pytest.raises(ValidationError) as caught:
        CompletionRequest(prompt=[1.5] * 1000)
    assert len(caught.value.errors()) == 4


def test_a_prompt_that_is_too_long_has_its_code(server):
    assert error(post(server, prompt=[5] * 600))["code"] == "context_length_exceeded"


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"prompt": NaN}'])
def test_bodies(server, content):
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/generate"):
        answer = httpx.post(f"{server.url}{path}", content=content, headers={"Content-Type": "application/json"})
        error(answer)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"prompt": "a\xff"}', "not UTF-8 at byte 13"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "digits"),
    ],
)
def test_bodies_that_no_parser_takes(server, content, says):
    answer = httpx.post(f"{server.url}/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert says in error(answer)["message"]


def test_a_body_that_is_no_json_by_its_type(server):
    """A form of another site's page cannot send application/json without that site being asked first."""
    answer = httpx.post(
        f"{server.url}/v1/completions", content=b'{"prompt":"a"}', headers={"Content-Type": "text/plain"}
    )
    error(answer)


def test_paths_and_methods(server):
    assert "/docs" in error(httpx.get(f"{server.url}/nowhere"), 404)["message"]
    assert error(httpx.get(f"{server.url}/v1/completions"), 405)["message"].endswith("send POST")


def test_model_names(server, client):
    assert [model.id for model in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    assert client.completions.create(model="alias", prompt="a", max_tokens=1).model == "alias"
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": CHAT})):
        found = error(post(server, path, model="gpt-4", **body), 404)
        assert found["code"] == "model_not_found"
        assert "tiny, alias" in found["message"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_top_logprobs_need_logprobs(server):
    assert error(post(server, "/v1/chat/completions", messages=CHAT, top_logprobs=2))["param"] == "top_logprobs"


def test_stream_options_need_a_stream(server):
    assert error(post(server, prompt="a", stream_options={"include_usage": True}))["param"] == "stream_options"


def test_prompt_logprobs_are_for_whole_answers(server):
    assert error(post(server, prompt="a", prompt_logprobs=1, stream=True))["param"] == "stream"


def test_an_empty_prompt_needs_a_bos_token(server):
    assert post(server, prompt="", max_tokens=1, echo=True).json()["choices"][0]["text"].startswith("")
    no_bos = {"config": {"bos_token_id": None}, "generation_config": {"bos_token_id": None}}
    folder = copy_of(tiny_model(), **no_bos, tokenizer_config={"bos_token": None})
    with running(str(folder)) as other:
        for prompt in ("", [], [[]], ["a", ""]):
            for stream in (False, True):
                found = error(post(other, prompt=prompt, stream=stream))
                assert "BOS" in found["message"] or "holds no prompt" in found["message"]
        assert post(other, prompt="a", max_tokens=1).status_code == 200


def test_too_many_prompts(server):
    assert "--max-choices" in error(post(server, prompt=["a"] * 1025))["message"]


def test_one_wrong_prompt_of_several_ends_all(server):
    assert "outside the vocabulary" in error(post(server, prompt=[[5], [6], [999999]], max_tokens=400))["message"]
    server.wait_idle()
    assert "outside the vocabulary" in error(post(server, prompt=[[5], [999999]], stream=True))["message"]
    server.wait_idle()


def test_priority_needs_its_policy():
    with running() as other:
        assert "scheduling_policy" in error(post(other, prompt="a", priority=1))["message"]


def test_tokenize_and_detokenize(server):
    answer = post(server, "/tokenize", prompt="Hello wor", return_token_strs=True).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 512
    assert post(server, "/detokenize", tokens=answer["tokens"]).json() == {"prompt": "Hello wor"}
    chat = post(server, "/tokenize", messages=CHAT).json()
    assert post(server, "/detokenize", tokens=chat["tokens"]).json()["prompt"] == "<user>Hello\n<assistant>"
    error(post(server, "/tokenize"))
    error(post(server, "/tokenize", prompt="a", messages=CHAT))
    error(post(server, "/tokenize", messages=[]))
    error(post(server, "/detokenize", tokens=[999999]))
    error(post(server, "/detokenize", tokens=[-1]))


def test_generate(server, llm):
    from qengine import SamplingParams

    wanted = llm.generate("Hello", SamplingParams(temperature=1, seed=3, n=2, max_tokens=9), use_tqdm=False)[0]
    body = {"prompt": "Hello", "max_tokens": 9, "temperature": 1, "seed": 3, "n": 2}
    answer = post(server, "/generate", **body).json()
    assert answer["text"] == [output.text for output in wanted.outputs]
    assert answer["finish_reasons"] == [output.finish_reason for output in wanted.outputs]
    lines = post(server, "/generate", stream=True, **body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    texts = {0: "", 1: ""}
    for line in lines[:-2]:
        piece = json.loads(line.removeprefix("data: "))
        texts[piece["index"]] += piece["text"]
    assert list(texts.values()) == answer["text"]


def test_version_metrics_stats_and_docs(server):
    import qengine

    assert httpx.get(f"{server.url}/version").json() == {"version": qengine.__version__}
    assert "qengine:" in httpx.get(f"{server.url}/metrics").text
    assert httpx.get(f"{server.url}/stats").json()["healthy"] is True
    assert httpx.get(f"{server.url}/docs").status_code == 200
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/generate", "/health"} <= set(paths)
