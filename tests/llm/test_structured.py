"""Structured output from the Python API, on a tiny random model: whatever it would say, the text is of the language."""

import asyncio
import json
import re

import jsonschema
import pytest
from tiny_llm import copy_of, tiny_folder

from qengine import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from qengine.errors import RequestError

pytest.importorskip("xgrammar")
SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["a", "bč"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["id", "kind", "tags"],
}
PHONE = r"[0-9]{3}-[0-9]{2}(x[ab]+)?"


@pytest.fixture(scope="module")
def folder():
    return tiny_folder()[1]


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, block_size=4) as llm:
        yield llm
        llm.engine.check_integrity()
        assert llm.engine.blocks.num_free == llm.engine.blocks.num_blocks, "a test left blocks behind"


def params(**more):
    wanted = {name: more.pop(name) for name in list(more) if name in ("json", "regex", "choice", "grammar")}
    more = {"temperature": 1.0, "max_tokens": 90, **more}
    return SamplingParams(structured_outputs=StructuredOutputs(**wanted, disable_any_whitespace=True), **more)


def fits(text):
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


def test_each_kind_in_one_batch_with_free_rows(llm):
    cases = [
        (params(json=SCHEMA, n=4), fits),
        (params(regex=PHONE, n=4), lambda text: re.fullmatch(PHONE, text)),
        (params(choice=["yes", "no", "nobody"], n=4), lambda text: text in ("yes", "no", "nobody")),
        (params(grammar='root ::= "(" [xy]+ ")"', n=4), lambda text: re.fullmatch(r"\([xy]+\)", text)),
        (SamplingParams(temperature=1.0, max_tokens=20, n=2, seed=5), lambda text: True),
    ]
    results = llm.generate(["Hello"] * len(cases), [one for one, _ in cases])
    for result, (one, right) in zip(results, cases, strict=True):
        assert len(result.outputs) == one.n
        for output in result.outputs:
            assert right(output.text), output.text
            if one.structured_outputs is not None:
                assert output.finish_reason == "stop"
    alone = llm.generate("Hello", cases[-1][0])[0]
    assert [o.token_ids for o in alone.outputs] == [o.token_ids for o in results[-1].outputs]


def test_chat_stream_logprobs_and_seed(llm):
    messages = [{"role": "user", "content": "Who?"}]
    one = params(json=SCHEMA, seed=4, logprobs=2)
    [result] = llm.chat(messages, one)
    output = result.outputs[0]
    assert fits(output.text)
    assert len(output.logprobs) == len(output.token_ids)
    deltas = list(llm.stream_chat(messages, one))
    assert "".join(delta.text for delta in deltas) == output.text
    assert deltas[-1].finish_reason == "stop"


def test_stop_strings_max_tokens_and_the_end_before_min_tokens(llm):
    assert llm.generate("a", params(regex="x{5}y{5}", stop="xy"))[0].outputs[0].text == "x" * 4
    cut = llm.generate("a", params(regex="x{50}", max_tokens=7))[0].outputs[0]
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 7)
    for more in ({"min_tokens": 30}, {"ignore_eos": True}):
        output = llm.generate("a", params(choice=["ab"], **more))[0].outputs[0]
        assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", None)
    long = llm.generate("a", params(regex="[ab]*", min_tokens=30))[0].outputs[0]
    assert len(long.token_ids) >= 30


def test_every_end_token_of_the_model_may_end_a_text(folder):
    with LLM(copy_of(folder, generation_config={"eos_token_id": [2, 40]})) as llm:
        ends = {o.token_ids[-1] for r in llm.generate(["a"] * 20, params(regex="[ab]", n=3)) for o in r.outputs}
    assert ends == {2, 40}


def test_through_preemption_by_swap_and_recomputation(folder):
    one = params(regex="([a-c][0-9]){12}", n=4, seed=3)
    texts = []
    for space in (0, 0.01):
        with LLM(folder, block_size=4, num_gpu_blocks_override=34, swap_space=space, swap_threshold=0) as small:
            results = small.generate(["Hello", "world", "Hello world"], one)
            stats = small.engine.stats()
            assert (stats.preemptions_swapped if space else stats.preemptions_recomputed) > 0
        texts.append([output.text for result in results for output in result.outputs])
    assert texts[0] == texts[1]
    assert all(re.fullmatch("([a-c][0-9]){12}", text) for text in texts[0])


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"regex": "(a"}, "regex cannot be compiled"),
        ({"grammar": "root ::= other"}, "grammar cannot be compiled"),
        ({"json": {"type": "foo"}}, "json cannot be compiled: Unsupported type"),
    ],
)
def test_one_that_is_invalid_is_named_and_the_engine_lives_on(llm, wanted, text):
    before = llm.generate("fine", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].token_ids
    with pytest.raises(RequestError, match=f"prompt 1: .*{text}"):
        llm.generate(["fine", "bad"], [SamplingParams(max_tokens=4), params(**wanted)])
    with pytest.raises(RequestError, match=f"^structured_outputs.{text}"):
        llm.generate("bad", params(**wanted))
    with pytest.raises(RequestError, match=text):
        list(llm.stream("bad", params(**wanted)))
    assert not llm.engine.has_unfinished()
    assert llm.generate("fine", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].token_ids == before


def test_fields_that_are_not_allowed(llm):
    with pytest.raises(RequestError, match="structured_outputs='json' is not allowed; give StructuredOutputs"):
        SamplingParams(structured_outputs="json")
    changed = params(regex="a")
    changed.structured_outputs.choice = ["b"]
    with pytest.raises(RequestError, match="regex and choice together"):
        llm.generate("a", changed)
    with pytest.raises(RequestError, match="at most 65536 are allowed"):
        llm.generate("a", params(regex="a" * 70_000))
    with pytest.raises(RequestError, match="no token is allowed by both structured_outputs and allowed_token_ids"):
        llm.generate("a", params(regex="[ab]{9}", allowed_token_ids=[0]))
    assert not llm.engine.has_unfinished()


def test_without_a_tokenizer(folder):
    with LLM(folder, skip_tokenizer_init=True) as llm, pytest.raises(RequestError, match="needs a tokenizer"):
        llm.generate([[5]], params(regex="a"))


def test_async_requests_and_errors(folder):
    async def read(llm, one):
        return [output async for output in llm.generate("Hello", one)][-1].outputs[0]

    async def scenario():
        async with AsyncLLM(folder) as llm:
            good = [params(json=SCHEMA, seed=i) for i in range(4)] + [SamplingParams(max_tokens=5)]
            bad = params(regex="(a")
            jobs = [asyncio.create_task(read(llm, one)) for one in (*good, bad)]
            done = await asyncio.gather(*jobs, return_exceptions=True)
            assert isinstance(done[-1], RequestError)
            assert all(fits(output.text) for output in done[:4])
            assert len(done[4].token_ids) <= 5
            await llm.check_health()
            last = asyncio.create_task(read(llm, params(regex="[ab]{4}z")))
            await asyncio.sleep(0)
            assert re.fullmatch("[ab]{4}z", (await last).text)

    asyncio.run(scenario())


def test_draining_waits_for_a_grammar(folder):
    async def scenario():
        llm = AsyncLLM(folder)
        await llm.start()
        stream = llm.generate("Hello", params(regex="[ab]{9}q"))
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(llm.close(drain=True))
        last = await first
        async for output in stream:
            last = output
        await closing
        assert re.fullmatch("[ab]{9}q", last.outputs[0].text)

    asyncio.run(scenario())
