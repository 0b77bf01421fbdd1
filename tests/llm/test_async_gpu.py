"""On a GPU, pauses are used to capture graphs, and requests do not wait for all of them."""

import asyncio

import pytest
import torch

from qengine import SamplingParams
from qengine.async_llm import AsyncLLM

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SETTINGS = {
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "dtype": "float16",
    "max_model_len": 2048,
    "max_num_batched_tokens": 1024,
    "max_num_seqs": 64,
    "swap_space": 0,
}


async def count_tokens(llm, length, tokens):
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    outputs = [output async for output in llm.generate({"prompt_token_ids": list(range(length))}, params)]
    return len(outputs[-1].outputs[0].token_ids)


async def until(condition):
    for _ in range(6_000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came true")


def test_pauses_capture_what_later_steps_need():
    async def scenario():
        async with AsyncLLM("random:llama-3.2-1b", **SETTINGS) as llm:
            runner = llm.llm.engine._runner
            usual = len(runner._decode_shapes.all()) + len(runner._mixed_shapes.usual())

            def captured():
                return len(runner.graph_bytes())

            await until(lambda: captured() >= 2)  # nobody has asked for anything
            assert await count_tokens(llm, 100, 5) == 5
            assert captured() < usual, "the request did not wait for all of them"
            await until(lambda: llm._worker._warm)
            assert captured() == usual
            tasks = []
            for index in range(48):
                tasks.append(asyncio.create_task(count_tokens(llm, 20 + 13 * index, 30)))
                await asyncio.sleep(0.004 * (index % 4))
            assert set(await asyncio.gather(*tasks)) == {30}
            assert captured() == usual, "arrivals of all kinds find their graphs"

    asyncio.run(scenario())
