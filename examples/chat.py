"""One conversation, streamed as it comes: `python examples/chat.py MODEL`."""

import sys

from qengine import LLM, SamplingParams

messages = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "What is a lighthouse for?"},
]

with LLM(sys.argv[1], max_model_len=2048) as llm:
    answer = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=64))[0].outputs[0]
    print(answer.text)
