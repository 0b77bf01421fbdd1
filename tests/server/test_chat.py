"""/v1/chat/completions through the official client: what comes is what `LLM.chat` gives."""

import httpx
import openai
import pytest
from http_server import running, tiny_model
from tiny_llm import tiny_folder

from qengine import SamplingParams
from qengine.async_llm import LONG_TEXT
from qengine.server import chat_prompt
from qengine.server.token_text import TokenTexts

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0, "max_tokens": 12}


def expected(llm, messages=MESSAGES, template=None, **params):
    options = {} if template is None else template
    return llm.chat(messages, SamplingParams(**{**GREEDY, **params}), use_tqdm=False, **options)[0]


def create(client, messages=MESSAGES, **request):
    return client.chat.completions.create(model="tiny", messages=messages, **{**GREEDY, **request})


def collect(chunks):
    """(contents by choice, roles by choice, finish reasons by choice, chunks)."""
    contents, roles, reasons, seen = {}, {}, {}, []
    for chunk in chunks:
        seen.append(chunk)
        for choice in chunk.choices:
            contents[choice.index] = contents.get(choice.index, "") + (choice.delta.content or "")
            if choice.delta.role:
                assert choice.index not in roles
                roles[choice.index] = choice.delta.role
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    return contents, roles, reasons, seen


def test_an_answer(client, llm):
    answer = create(client)
    wanted = expected(llm)
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", wanted.outputs[0].text)
    assert choice.finish_reason == wanted.outputs[0].finish_reason
    assert answer.usage.prompt_tokens == len(wanted.prompt_token_ids)


def test_a_stream(client, llm):
    contents, roles, reasons, chunks = collect(create(client, stream=True))
    assert contents == {0: expected(llm).outputs[0].text}
    assert roles == {0: "assistant"}
    assert reasons == {0: "length"}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)


def test_the_sdks_stream_helper(client, llm):
    text = expected(llm).outputs[0].text
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, stop=text[4:7], **GREEDY) as stream:
        stream.until_done()
        assert stream.get_final_completion().choices[0].message.content == text[: text.index(text[4:7])]


def test_n_in_a_stream(client, llm):
    params = {"temperature": 1.3, "seed": 9, "n": 3}
    contents, roles, reasons, _ = collect(create(client, stream=True, **params))
    assert contents == {o.index: o.text for o in expected(llm, **params).outputs}
    assert roles == dict.fromkeys(range(3), "assistant")
    assert sorted(reasons) == [0, 1, 2]


def test_usage_in_a_stream(client):
    _, _, _, chunks = collect(create(client, stream=True, stream_options={"include_usage": True}))
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks[:-1])
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 12)


def test_max_completion_tokens(client):
    assert create(client, max_completion_tokens=3).usage.completion_tokens == 3


@pytest.mark.parametrize("fields", [{}, {"max_tokens": None}])
def test_without_max_tokens_an_answer_goes_to_the_contexts_end(client, server, fields):
    body = {"messages": MESSAGES, "temperature": 0, "ignore_eos": True, **fields}
    answer = httpx.post(f"{client.base_url}chat/completions", json=body).json()
    assert answer["usage"]["total_tokens"] == server.state.max_model_len


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [None, 0, 3])
def test_logprobs(client, llm, server, asked, stream):
    wanted = expected(llm, logprobs=asked or 0).outputs[0]
    request = {"logprobs": True, **({} if asked is None else {"top_logprobs": asked})}
    if stream:
        _, _, _, chunks = collect(create(client, stream=True, **request))
        parts = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
        items = [item for part in parts for item in part.content]
    else:
        items = create(client, **request).choices[0].logprobs.content
    texts = TokenTexts(server.llm.tokenizer)
    assert len(items) == len(wanted.token_ids)
    for item, token, entry in zip(items, wanted.token_ids, wanted.logprobs, strict=True):
        assert item.token == entry[token].decoded_token
        assert item.logprob == pytest.approx(entry[token].logprob, abs=1e-4)
        assert item.bytes == texts.bytes(token)
        assert len(item.top_logprobs) == (asked or 0)
        ranks = [entry[t].rank for t in entry if entry[t].rank <= (asked or 0)]
        assert len(ranks) == (asked or 0)
        assert sorted((i.logprob for i in item.top_logprobs), reverse=True) == [i.logprob for i in item.top_logprobs]


def test_text_parts_are_joined(client, llm):
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "world"}]
    answer = create(client, [{"role": "user", "content": parts}])
    assert (
        answer.choices[0].message.content
        == expected(llm, [{"role": "user", "content": "Hello\nworld"}]).outputs[0].text
    )


def test_developer_is_system(client, llm):
    answer = create(client, [{"role": "developer", "content": "Be brief."}, MESSAGES[1]])
    assert answer.choices[0].message.content == expected(llm).outputs[0].text


def test_an_image_is_refused(client):
    parts = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
    with pytest.raises(openai.BadRequestError, match="reads text only"):
        create(client, [{"role": "user", "content": parts}])


def test_the_final_message_is_continued(client, llm):
    messages = [*MESSAGES, {"role": "assistant", "content": "Well, He"}]
    template = {"add_generation_prompt": False, "continue_final_message": True}
    wanted = expected(llm, messages, template).outputs[0].text
    answer = create(client, messages, extra_body=template)
    assert answer.choices[0].message.content == wanted
    implied = create(client, messages, extra_body={"continue_final_message": True})
    assert implied.choices[0].message.content == wanted
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        create(client, messages, extra_body={"continue_final_message": True, "add_generation_prompt": True})


@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_final_message_before_the_answer(client, stream):
    messages = [*MESSAGES, {"role": "assistant", "content": "Well, He"}]
    extra = {"continue_final_message": True, "echo": True}
    plain = create(client, messages, extra_body={"continue_final_message": True}).choices[0].message.content
    answer = create(client, messages, stream=stream, extra_body=extra)
    got = collect(answer)[0][0] if stream else answer.choices[0].message.content
    assert got == "Well, He" + plain


def test_token_ids(client, llm):
    wanted = expected(llm)
    answer = create(client, extra_body={"return_token_ids": True})
    assert answer.prompt_token_ids == wanted.prompt_token_ids
    assert answer.choices[0].token_ids == wanted.outputs[0].token_ids
    _, _, _, chunks = collect(create(client, stream=True, extra_body={"return_token_ids": True}))
    assert chunks[0].prompt_token_ids == wanted.prompt_token_ids
    tokens = [t for chunk in chunks for c in chunk.choices for t in getattr(c, "token_ids", None) or []]
    assert tokens == wanted.outputs[0].token_ids


def test_a_tool_result_goes_to_the_template():
    """Arguments come as JSON in a string and reach the template as an object, as transformers' templates expect."""
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments.city }}]{% endfor %}"
        "{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %};{% endfor %}"
        "{% if tools %}{{ tools[0].function.name }}{% endif %}{{ thinking }}"
    )
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    with running(chat_template=template) as server:
        body = {"messages": messages, "chat_template_kwargs": {"thinking": "T"}}
        tokens = httpx.post(f"{server.url}/tokenize", json=body).json()["tokens"]
        text = httpx.post(f"{server.url}/detokenize", json={"tokens": tokens}).json()["prompt"]
        assert text == "user:?;assistant:[weather Oslo];tool:rain(c1);T"
        bad = {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": "{"}}]}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": [messages[0], bad]})
        assert answer.status_code == 400
        assert "arguments are not JSON" in answer.json()["error"]["message"]


def test_a_model_without_a_template():
    folder = str(tiny_folder(template=False, max_position_embeddings=128)[1])
    with running(folder) as server, server.client() as client:
        with pytest.raises(openai.BadRequestError, match="no chat template; pass chat_template"):
            create(client)
        assert client.completions.create(model="tiny", prompt="Hello", max_tokens=2).choices[0].text is not None


def test_templates_of_requests_are_refused_unless_trusted(client):
    with pytest.raises(openai.BadRequestError, match="--trust-request-chat-template"):
        create(client, extra_body={"chat_template": "x"})
    for name in ("chat_template", "tokenize", "tools", "continue_final_message"):
        with pytest.raises(openai.BadRequestError, match=f"chat_template_kwargs has '{name}'"):
            create(client, extra_body={"chat_template_kwargs": {name: "x"}})


def test_a_trusted_template_is_sandboxed():
    with running(tiny_model(), trust_request_chat_template=True) as server, server.client() as client:
        answer = create(client, extra_body={"chat_template": "{{ messages[0].content }}"})
        assert answer.usage.prompt_tokens == len(server.llm.tokenizer("Be brief.")["input_ids"])
        for attack in (
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ cycler.__init__.__globals__.os.system('x') }}",
        ):
            with pytest.raises(openai.BadRequestError, match="chat template refused"):
                create(client, extra_body={"chat_template": attack})


def test_requests_cannot_hurt_by_messages(client):
    for messages in (
        [],
        [{"content": "x"}],
        "x",
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{}]}],
    ):
        answer = httpx.post(f"{client.base_url}chat/completions", json={"messages": messages})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages"


def test_many_short_messages_are_rendered_off_the_event_loop(server, monkeypatch):
    sizes = []

    async def off_loop(size, work):
        sizes.append(size)
        return work()

    monkeypatch.setattr(chat_prompt, "off_loop", off_loop)
    messages = [{"role": "user", "content": ""}] * 1000
    httpx.post(f"{server.url}/v1/chat/completions", json={"messages": messages})
    assert sizes[0] > LONG_TEXT
