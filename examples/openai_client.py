"""Ask a running server, `qengine serve MODEL`, with the openai package: a streamed answer, then JSON of a schema."""

import json

from openai import OpenAI

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "country": {"type": "string"}},
    "required": ["city", "country"],
}

client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id
question = [{"role": "user", "content": "Which city has the Eiffel Tower?"}]

for chunk in client.chat.completions.create(model=model, messages=question, max_tokens=64, stream=True):
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()

form = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
answer = client.chat.completions.create(
    model=model, messages=question, max_tokens=64, temperature=0, response_format=form
)
print(json.loads(answer.choices[0].message.content or "{}"))
