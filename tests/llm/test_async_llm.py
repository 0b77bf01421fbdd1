"""AsyncLLM on a tiny model: what many callers get is what LLM gives each of them alone."""

import asyncio
import random

import pytest
from tiny_llm import tiny_folder

from qengine import LLM, SamplingParams
from qengine.async_llm import AsyncLLM, RequestOutputKind
from qengine.errors import CheckpointError, RequestError

SETTINGS = {"device": "cpu", "dtype": "float32", "max_model_len": 96, "swap_space": 0}


@pytest.fixture(scope="module")
def folder():
    return str(tiny_folder()[1])


def requests(count, seed):
    """Prompts as text and ids with all kinds of parameters; every one is deterministic alone."""
    rng = random.Random(seed)
    made = []
    for index in range(count):
        prompt = rng.choice(["Hello", "a b c", "stop and go", [5, 6, 7, 8], [rng.randrange(200) for _ in range(20)]])
        params = {"max_tokens": rng.randrange(1, 20), "ignore_eos": True}
        if index % 2:
            params |= {"temperature": 1.3, "seed": index, "top_p": 0.9}
        else:
            params |= {"temperature": 0.0}
        if index % 3 == 0:
            params |= {"logprobs": 2}
        if index % 5 == 0:
            params |= {"n": 2}
        if index % 7 == 3:
            params |= {"stop": ["e", "\u00e9"]}
        if index % 7 == 5:
            params |= {"prompt_logprobs": 1}
        made.append((prompt, SamplingParams(**params)))
    return made


def same(a, b):
    assert a.prompt == b.prompt
    assert a.prompt_token_ids == b.prompt_token_ids
    assert a.finished
    assert b.finished
    assert (a.prompt_logprobs is None) == (b.prompt_logprobs is None)
    for x, y in zip(a.prompt_logprobs or [], b.prompt_logprobs or [], strict=True):
        assert (x is None) == (y is None)
        assert x is None or list(x) == list(y)
    for x, y in zip(a.outputs, b.outputs, strict=True):
        assert (x.index, x.text, x.token_ids) == (y.index, y.text, y.token_ids)
        assert (x.finish_reason, x.stop_reason) == (y.finish_reason, y.stop_reason)
        assert (x.logprobs is None) == (y.logprobs is None)
        if x.logprobs is not None:
            assert [list(entry) for entry in x.logprobs] == [list(entry) for entry in y.logprobs]
            assert x.cumulative_logprob == pytest.approx(y.cumulative_logprob, abs=1e-3)


@pytest.mark.parametrize("blocks", [None, 14])
def test_interleaved_requests_equal_the_synchronous_results(folder, blocks):
    """Also with a pool so small that sequences are preempted."""
    work = requests(12, seed=blocks or 0)
    with LLM(folder, **SETTINGS) as llm:
        alone = [llm.generate(prompt, params, use_tqdm=False)[0] for prompt, params in work]

    async def main():
        rng = random.Random(3)
        async with AsyncLLM(folder, **SETTINGS, num_gpu_blocks_override=blocks, max_num_seqs=8) as llm:

            async def one(prompt, params):
                await asyncio.sleep(rng.random() * 0.1)
                outputs = []
                async for output in llm.generate(prompt, params):
                    outputs.append(output)
                    if rng.random() < 0.1:
                        await asyncio.sleep(0.01)
                return outputs[-1]

            async def leave(prompt, params):
                generator = llm.generate(prompt, params, output_kind=RequestOutputKind.DELTA)
                async for _ in generator:
                    break
                await generator.aclose()

            jobs = [one(p, q) for p, q in work] + [leave(p, q) for p, q in work[::3]]
            done = (await asyncio.gather(*jobs))[: len(work)]
            await llm.call(lambda engine: engine.check_integrity())
            free = await llm.call(lambda engine: engine.blocks.num_free == engine.blocks.num_blocks)
            assert free, "blocks are in use although every request has ended"
            return done

    for got, wanted in zip(asyncio.run(main()), alone, strict=True):
        same(got, wanted)


def test_deltas_join_to_the_whole(folder):
    params = SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True, logprobs=1, stop=["zzz"])
    with LLM(folder, **SETTINGS) as llm:
        [whole] = llm.generate("Hello", params, use_tqdm=False)

    async def main():
        async with AsyncLLM(folder, **SETTINGS) as llm:
            return [o async for o in llm.generate("Hello", params, output_kind=RequestOutputKind.DELTA)]

    deltas = [output.outputs[0] for output in asyncio.run(main())]
    assert "".join(d.text for d in deltas) == whole.outputs[0].text
    assert [token for d in deltas for token in d.token_ids] == whole.outputs[0].token_ids
    assert [list(e) for d in deltas for e in d.logprobs] == [list(e) for e in whole.outputs[0].logprobs]
    assert deltas[-1].cumulative_logprob == pytest.approx(whole.outputs[0].cumulative_logprob)


def test_chat_tokenizer_and_long_text(folder):
    messages = [{"role": "user", "content": "Hi"}]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(folder, **SETTINGS) as llm:
        [wanted] = llm.chat(messages, params, use_tqdm=False)

    async def main():
        async with AsyncLLM(folder, **SETTINGS) as llm:
            got = [o async for o in llm.chat(messages, params)][-1]
            same(got, wanted)
            assert (await llm.get_tokenizer()).chat_template
            assert llm.get_default_sampling_params() == SamplingParams()
            cut = SamplingParams(temperature=0.0, max_tokens=2, truncate_prompt_tokens=10)
            long = [o async for o in llm.generate("long text " * 4000, cut)][-1]
            assert len(long.prompt_token_ids) == 10
            with pytest.raises(RequestError, match="one conversation, got 2"):
                _ = [o async for o in llm.chat([messages, messages], params)]
            with pytest.raises(RequestError, match="max_model_len"):
                _ = [o async for o in llm.generate("long text " * 400, params)]

    asyncio.run(main())


def test_a_folder_without_a_model_is_said_at_the_start(tmp_path):
    async def main():
        with pytest.raises(CheckpointError, match=r"no config\.json"):
            async with AsyncLLM(str(tmp_path)):
                pass

    asyncio.run(main())
