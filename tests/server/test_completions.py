"""/v1/completions through the official client: what comes is what the engine gives without HTTP."""

import itertools
import json
import math

import httpx
import openai
import pytest

from qengine import SamplingParams

GREEDY = {"temperature": 0, "max_tokens": 12}


def expected(llm, prompt, **params):
    params = {"temperature": 0, "max_tokens": 12} | params
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0]


def streamed(client, **request):
    """(texts by choice, finish reasons by choice, chunks)."""
    texts, reasons, chunks = {}, {}, []
    for chunk in client.completions.create(model="tiny", stream=True, **request):
        chunks.append(chunk)
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                assert choice.index not in reasons
                reasons[choice.index] = choice.finish_reason
    return texts, reasons, chunks


def test_a_prompt(client, llm):
    answer = client.completions.create(model="tiny", prompt="Hello", **GREEDY)
    wanted = expected(llm, "Hello")
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    assert answer.id.startswith("cmpl-")
    [choice] = answer.choices
    assert (choice.index, choice.text) == (0, wanted.outputs[0].text)
    assert choice.finish_reason == wanted.outputs[0].finish_reason
    assert choice.logprobs is None
    assert answer.usage.prompt_tokens == len(wanted.prompt_token_ids)
    assert answer.usage.completion_tokens == len(wanted.outputs[0].token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize(
    "prompt", ["Hello", [5, 6, 7], ["Hello", "a b c"], [[5, 6, 7], [8, 9]]], ids=["text", "ids", "texts", "lists"]
)
@pytest.mark.parametrize("stream", [False, True])
def test_prompt_forms(client, llm, prompt, stream):
    several = not isinstance(prompt, str) and not isinstance(prompt[0], int)
    wanted = [expected(llm, one).outputs[0].text for one in (prompt if several else [prompt])]
    request = {"prompt": prompt, **GREEDY}
    if stream:
        texts, reasons, _ = streamed(client, **request)
        assert texts == dict(enumerate(wanted))
        assert set(reasons) == set(texts)
    else:
        answer = client.completions.create(model="tiny", **request)
        assert [choice.text for choice in answer.choices] == wanted
        assert [choice.index for choice in answer.choices] == list(range(len(wanted)))


@pytest.mark.parametrize("stream", [False, True])
def test_n_of_several_prompts(client, llm, stream):
    params = {"temperature": 1.2, "seed": 7, "max_tokens": 8, "n": 3}
    wanted = [o.text for prompt in ("Hello", "xyz") for o in expected(llm, prompt, **params).outputs]
    request = {"prompt": ["Hello", "xyz"], **params}
    if stream:
        texts, reasons, _ = streamed(client, **request)
        assert [texts[index] for index in range(6)] == wanted
        assert sorted(reasons) == list(range(6))
    else:
        answer = client.completions.create(model="tiny", **request)
        assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(wanted))


def test_usage_in_a_stream(client):
    _, _, chunks = streamed(client, prompt="Hello", stream_options={"include_usage": True}, **GREEDY)
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert len({chunk.id for chunk in chunks}) == 1


def test_usage_is_absent_unless_asked_for(client):
    _, _, chunks = streamed(client, prompt="Hello", **GREEDY)
    assert all("usage" not in chunk.model_fields_set and chunk.choices for chunk in chunks)


def test_continuous_usage(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, _, chunks = streamed(client, prompt="Hello", stream_options=options, **GREEDY)
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-1] == 12
    assert all(chunk.usage.prompt_tokens == chunks[0].usage.prompt_tokens for chunk in chunks)


def test_cached_tokens_are_told(client):
    prompt = list(range(3, 67))
    client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
    again = client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
    assert again.usage.prompt_tokens_details.cached_tokens == 48


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [0, 3])
def test_logprobs(client, llm, asked, stream):
    wanted = expected(llm, "Hello", logprobs=asked).outputs[0]
    request = {"prompt": "Hello", "logprobs": asked, **GREEDY}
    if stream:
        _, _, chunks = streamed(client, **request)
        parts = [choice.logprobs for chunk in chunks for choice in chunk.choices]
        got = {
            name: [item for part in parts for item in getattr(part, name)]
            for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
    else:
        answer = client.completions.create(model="tiny", **request)
        got = answer.choices[0].logprobs.model_dump()
    entries = [entry[token] for token, entry in zip(wanted.token_ids, wanted.logprobs, strict=True)]
    assert got["tokens"] == [entry.decoded_token for entry in entries]
    assert got["token_logprobs"] == pytest.approx([entry.logprob for entry in entries], abs=1e-4)
    offsets = [0]
    for text in got["tokens"][:-1]:
        offsets.append(offsets[-1] + len(text))
    assert got["text_offset"] == offsets
    for token, top in zip(got["tokens"], got["top_logprobs"], strict=True):
        assert token in top
        assert 1 <= len(top) <= max(asked, 1)


def test_echo(client):
    answer = client.completions.create(model="tiny", prompt="Hello wor", echo=True, **GREEDY)
    plain = client.completions.create(model="tiny", prompt="Hello wor", **GREEDY)
    assert answer.choices[0].text == "Hello wor" + plain.choices[0].text
    texts, _, _ = streamed(client, prompt=["Hello wor", "b"], echo=True, **GREEDY)
    assert texts[0] == answer.choices[0].text
    assert texts[1].startswith("b")


def test_echo_of_token_ids(client, server):
    ids = server.llm.tokenizer("Hello world")["input_ids"]
    answer = client.completions.create(model="tiny", prompt=ids, echo=True, max_tokens=1)
    assert answer.choices[0].text.startswith("Hello world")


def test_echo_alone_scores_the_prompt(client, llm):
    """As evaluation harnesses ask for it."""
    answer = client.completions.create(model="tiny", prompt="Hello world", echo=True, max_tokens=0, logprobs=2)
    wanted = expected(llm, "Hello world", prompt_logprobs=2, max_tokens=1)
    got = answer.choices[0].logprobs
    assert answer.choices[0].text == "Hello world"
    assert answer.usage.completion_tokens == 0
    assert got.token_logprobs[0] is None
    assert got.top_logprobs[0] is None
    assert len(got.tokens) == len(wanted.prompt_token_ids)
    for value, token, entry in zip(
        got.token_logprobs[1:], wanted.prompt_token_ids[1:], wanted.prompt_logprobs[1:], strict=True
    ):
        assert value == pytest.approx(entry[token].logprob, abs=1e-4)
    assert got.text_offset[0] == 0
    assert "".join(got.tokens) == "Hello world"


def test_echo_with_logprobs_streamed(client):
    request = {"prompt": ["Hello", "b c"], "echo": True, "max_tokens": 6, "logprobs": 1, "temperature": 0}
    whole = client.completions.create(model="tiny", **request)
    texts, _, chunks = streamed(client, **request)
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        parts = [c.logprobs for chunk in chunks for c in chunk.choices if c.index == choice.index]
        for name in ("tokens", "text_offset"):
            assert [item for part in parts for item in getattr(part, name)] == getattr(choice.logprobs, name)


def test_echo_with_logprobs_has_prompt_and_output(client):
    answer = client.completions.create(model="tiny", prompt="Hello", echo=True, max_tokens=3, logprobs=1)
    got = answer.choices[0].logprobs
    assert len(got.tokens) == answer.usage.prompt_tokens + 3
    assert got.token_logprobs[0] is None
    assert all(value is not None for value in got.token_logprobs[1:])


@pytest.mark.parametrize(
    ("extra", "params"),
    [
        ({"top_k": 1}, {"top_k": 1}),
        ({"top_k": 9999999}, {"top_k": 9999999}),
        ({"min_p": 0.9}, {"min_p": 0.9}),
        ({"repetition_penalty": 1.8}, {"repetition_penalty": 1.8}),
        ({"min_tokens": 5, "stop_token_ids": [40, 41]}, {"min_tokens": 5, "stop_token_ids": [40, 41]}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
        ({"bad_words": ["e"]}, {"bad_words": ["e"]}),
        ({"allowed_token_ids": [40, 41, 42]}, {"allowed_token_ids": [40, 41, 42]}),
        ({"truncate_prompt_tokens": 1}, {"truncate_prompt_tokens": 1}),
    ],
)
def test_extensions(client, llm, extra, params):
    base = {"temperature": 1.5, "seed": 3, "max_tokens": 16}
    answer = client.completions.create(model="tiny", prompt="Hello world", extra_body=extra, **base)
    wanted = expected(llm, "Hello world", **base, **params).outputs[0]
    assert answer.choices[0].text == wanted.text
    assert answer.choices[0].finish_reason == wanted.finish_reason


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0001},
        {"top_p": 0.0001},
        {"top_p": 0},
        {"presence_penalty": 1.9, "temperature": 1.0, "seed": 1},
        {"frequency_penalty": -2, "temperature": 1.0, "seed": 1},
        {"logit_bias": {"40": 100}, "temperature": 1.0, "seed": 1},
        {"seed": 123456789012345678, "temperature": 2.0},
    ],
)
def test_sampling_fields(client, llm, params):
    answer = client.completions.create(model="tiny", prompt="Hello", **{"seed": 5, "max_tokens": 10, **params})
    wanted = expected(llm, "Hello", **{"temperature": 1.0, "seed": 5, "max_tokens": 10, **params})
    assert answer.choices[0].text == wanted.outputs[0].text


def test_a_seeded_request_repeats_beside_an_unseeded_one(client, llm):
    alone = expected(llm, "Hello", temperature=1.0, seed=11, max_tokens=20).outputs[0].text
    with openai.OpenAI(base_url=client.base_url, api_key="none") as other:
        noise = other.completions.create(model="tiny", prompt="noise", max_tokens=60, temperature=1.0, stream=True)
        answer = client.completions.create(model="tiny", prompt="Hello", temperature=1.0, seed=11, max_tokens=20)
        noise.close()
    assert answer.choices[0].text == alone


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(client, llm, include, stream):
    text = expected(llm, "Hello", max_tokens=40, ignore_eos=True, temperature=1.0, seed=2).outputs[0].text
    stop = text[8:12]
    wanted = text[: text.index(stop) + (len(stop) if include else 0)]
    extra = {"include_stop_str_in_output": include, "ignore_eos": True}
    request = {"prompt": "Hello", "max_tokens": 40, "temperature": 1.0, "seed": 2, "stop": [stop, "never there"]}
    if stream:
        texts, reasons, chunks = streamed(client, extra_body=extra, **request)
        assert (texts[0], reasons[0]) == (wanted, "stop")
        assert chunks[-1].choices[0].stop_reason == stop
    else:
        choice = client.completions.create(model="tiny", extra_body=extra, **request).choices[0]
        assert (choice.text, choice.finish_reason, choice.stop_reason) == (wanted, "stop", stop)


@pytest.mark.parametrize("text", ["ďábelské ódy", "日本の首都", "a😀b"])
def test_a_stream_never_shows_half_a_character(client, text):
    """The model is made to say it, in tokens of single bytes."""
    extra = {"structured_outputs": {"choice": [text]}}
    texts, _, chunks = streamed(client, prompt="x", max_tokens=60, extra_body=extra)
    pieces = [choice.text for chunk in chunks for choice in chunk.choices]
    assert texts[0] == text
    assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids(client, llm, stream):
    wanted = expected(llm, "Hello")
    extra = {"return_token_ids": True}
    if stream:
        _, _, chunks = streamed(client, prompt="Hello", extra_body=extra, **GREEDY)
        choices = [choice for chunk in chunks for choice in chunk.choices]
        assert choices[0].prompt_token_ids == wanted.prompt_token_ids
        assert [token for choice in choices for token in choice.token_ids] == wanted.outputs[0].token_ids
    else:
        choice = client.completions.create(model="tiny", prompt="Hello", extra_body=extra, **GREEDY).choices[0]
        assert choice.prompt_token_ids == wanted.prompt_token_ids
        assert choice.token_ids == wanted.outputs[0].token_ids


def test_prompt_logprobs(client, llm):
    answer = client.completions.create(model="tiny", prompt="Hello world", extra_body={"prompt_logprobs": 2}, **GREEDY)
    wanted = expected(llm, "Hello world", prompt_logprobs=2).prompt_logprobs
    got = answer.choices[0].prompt_logprobs
    assert got[0] is None
    for mine, theirs in zip(got[1:], wanted[1:], strict=True):
        assert {int(token): item["rank"] for token, item in mine.items()} == {t: e.rank for t, e in theirs.items()}


def test_tokens_as_ids(client, llm):
    wanted = expected(llm, "Hello", logprobs=1).outputs[0].token_ids
    extra = {"return_tokens_as_token_ids": True}
    answer = client.completions.create(model="tiny", prompt="Hello", logprobs=1, extra_body=extra, **GREEDY)
    assert answer.choices[0].logprobs.tokens == [f"token_id:{token}" for token in wanted]


def test_null_is_the_default(client):
    """max_tokens null is 16, as a missing one; so with every other field."""
    nulls = dict.fromkeys(
        ("max_tokens", "temperature", "top_p", "n", "stop", "seed", "logit_bias", "logprobs", "stream", "echo", "user",
         "top_k", "min_p", "presence_penalty", "stream_options", "priority", "response_format", "best_of", "suffix")
    )  # fmt: skip
    answer = httpx.post(
        f"{client.base_url}completions", json={"model": "tiny", "prompt": "Hello", "ignore_eos": True, **nulls}
    )
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 16


def test_two_requests_of_one_id_at_once(client, llm):
    wanted = [expected(llm, prompt, max_tokens=60, ignore_eos=True).outputs[0].text for prompt in ("Hello", "other")]
    extra = {"request_id": "same", "ignore_eos": True}
    streams = [
        client.completions.create(
            model="tiny", prompt=prompt, temperature=0, max_tokens=60, stream=True, extra_body=extra
        )
        for prompt in ("Hello", "other")
    ]
    texts = ["", ""]
    for chunks in itertools.zip_longest(*streams):
        for index, chunk in enumerate(chunks):
            if chunk is not None:
                assert chunk.id == "cmpl-same"
                texts[index] += chunk.choices[0].text
    assert texts == wanted


def test_unknown_fields_are_ignored(client):
    answer = client.completions.create(model="tiny", prompt="Hello", extra_body={"no_such_field": {"a": 1}}, **GREEDY)
    assert answer.choices[0].text


def test_max_tokens_beyond_the_context_ends_there(client, server):
    answer = client.completions.create(
        model="tiny", prompt="Hello", max_tokens=100_000, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == server.state.max_model_len


def test_logprobs_are_json(client):
    """A banned token's logprob would be minus infinity, which JSON cannot say."""
    answer = httpx.post(
        f"{client.base_url}completions",
        json={"prompt": "Hello", "logprobs": 300, "max_tokens": 2, "logit_bias": {"40": -100}},
    )
    assert "Infinity" not in answer.text
    values = [v for top in json.loads(answer.text)["choices"][0]["logprobs"]["top_logprobs"] for v in top.values()]
    assert all(math.isfinite(value) for value in values)
