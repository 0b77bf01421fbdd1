"""Many callers of one model, each served as it comes: `python examples/async_generate.py MODEL`.

MODEL may be random:tiny, which needs no download; it has no tokenizer, so token ids go in and come out.
"""

import asyncio
import sys
from contextlib import aclosing

from qengine import AsyncLLM, RequestOutputKind, SamplingParams

model = sys.argv[1]
no_text = model.startswith("random:")
texts: list[str | list[int]] = ["The capital of France is", "A lighthouse keeper"]
prompts = [[1, 2, 3], [4, 5, 6, 7]] if no_text else texts
params = SamplingParams(temperature=0.8, max_tokens=24, seed=1)


async def stream(llm: AsyncLLM, name: str, prompt: str | list[int]) -> None:
    """Print what each output adds to the last."""
    async for output in llm.generate(prompt, params, name, output_kind=RequestOutputKind.DELTA):
        new = output.outputs[0]
        print(f"{name}: {list(new.token_ids) if no_text else new.text!r} {new.finish_reason or ''}")


async def leave_early(llm: AsyncLLM, prompt: str | list[int]) -> None:
    """Read until some tokens are there: closing the generator ends the request and frees its cache."""
    async with aclosing(llm.generate(prompt, SamplingParams(max_tokens=1000, ignore_eos=True))) as outputs:
        async for output in outputs:
            if len(output.outputs[0].token_ids) >= 8:
                print(f"left after {len(output.outputs[0].token_ids)} tokens")
                break


async def main() -> None:
    """Three callers at once."""
    async with AsyncLLM(model, max_model_len=2048, skip_tokenizer_init=no_text) as llm:
        callers = [stream(llm, f"caller {index}", prompt) for index, prompt in enumerate(prompts)]
        await asyncio.gather(*callers, leave_early(llm, prompts[0]))


asyncio.run(main())
