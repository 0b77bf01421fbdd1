"""Small parts: bytes of tokens, logprobs' forms, paths under a proxy, what ends a request."""

import asyncio

import httpx
import pytest
from http_server import running
from toy_tokenizers import byte_level, metaspace

from qengine.outputs import Logprob
from qengine.server.logprobs import chat_logprobs, completion_logprobs
from qengine.server.token_text import TokenTexts
from qengine.server.watch import Ended, Watch


@pytest.mark.parametrize("tokenizer", [byte_level(), metaspace()], ids=["byte-level", "byte fallback"])
def test_bytes_of_tokens_make_up_the_text(tokenizer):
    """Also where a token is part of a character: "ď" and "漢" have tokens of their own bytes."""
    texts = TokenTexts(tokenizer)
    for text in ("ď漢😀", "Hello world", "a\nb"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        found = bytes(byte for token in ids for byte in texts.bytes(token))
        assert found.decode().replace(" ", "") == text.replace(" ", "")


def test_without_a_tokenizer_tokens_are_named():
    texts = TokenTexts(None)
    assert texts.text(7) == "token_id:7"
    assert bytes(texts.bytes(7)) == b"token_id:7"


def entry(**ranked):
    return {int(name[1:]): Logprob(value, rank) for name, (value, rank) in ranked.items()}


def test_completion_logprobs():
    texts = TokenTexts(None)
    entries = [None, entry(t5=(-3.0, 9), t6=(-0.1, 1), t7=(-1.0, 2)), entry(t6=(float("-inf"), 1), t9=(-2.0, 2))]
    found = completion_logprobs(texts, [4, 5, 6], entries, 1)
    assert found["token_logprobs"] == [None, -3.0, -9999.0]
    assert found["top_logprobs"] == [None, {"token_id:6": -0.1, "token_id:5": -3.0}, {"token_id:6": -9999.0}]
    assert found["text_offset"] == [0, 10, 20]


def test_chat_logprobs():
    [found] = chat_logprobs(TokenTexts(None), [5], [entry(t5=(-3.0, 9), t6=(-0.1, 1), t7=(-1.0, 2))], 2)["content"]
    assert (found["token"], found["logprob"]) == ("token_id:5", -3.0)
    assert [item["token"] for item in found["top_logprobs"]] == ["token_id:6", "token_id:7"]


async def gone():
    return {"type": "http.disconnect"}


async def stays():
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("receive", "timeout", "reason"), [(gone, None, Ended.DISCONNECT), (stays, 0.01, Ended.TIMEOUT)]
)
def test_a_watch_ends_its_block_once(receive, timeout, reason):
    async def run():
        cleaned = []
        watch = Watch(receive, timeout)
        async with watch:
            try:
                await asyncio.sleep(60)
            finally:
                cleaned.append(1)
        watch.end(Ended.SHUTDOWN)  # too late
        await asyncio.sleep(0.02)  # nothing cancels what follows
        return watch.reason, cleaned

    assert asyncio.run(run()) == (reason, [1])


def test_a_watch_leaves_other_cancellations_alone():
    async def run():
        async def block():
            async with Watch(stays, None):
                await asyncio.sleep(60)

        task = asyncio.create_task(block())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_under_a_proxys_path():
    """The key guards, and requests are counted, whether the proxy strips its path or not."""
    with running(root_path="/ai", api_key="k", max_concurrent_requests=1) as server:
        for prefix in ("", "/ai"):
            assert httpx.get(f"{server.url}{prefix}/health").status_code == 200
            url = f"{server.url}{prefix}/v1/completions"
            assert httpx.post(url, json={"prompt": "a"}).status_code == 401
            headers = {"Authorization": "Bearer k"}
            server.state.active = 1
            assert httpx.post(url, json={"prompt": "a"}, headers=headers).status_code == 429
            server.state.active = 0
            assert httpx.post(url, json={"prompt": "a", "max_tokens": 1}, headers=headers).status_code == 200
        assert httpx.get(f"{server.url}/openapi.json").json()["servers"] == [{"url": "/ai"}]
