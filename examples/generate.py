"""Generate from a checkpoint: `python examples/generate.py MODEL`."""

import sys

from qengine import LLM, SamplingParams

prompts = ["The capital of France is", "Once upon a time, a lighthouse keeper"]
params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=48, seed=1)

with LLM(sys.argv[1], max_model_len=2048) as llm:
    for output in llm.generate(prompts, params):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r} ({output.outputs[0].finish_reason})")
