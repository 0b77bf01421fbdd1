// The openai package for Node against a running server: node smoke.mjs BASE_URL
import assert from "node:assert";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Hello" }];

const models = await client.models.list();
const model = models.data[0].id;

const completion = await client.completions.create({ model, prompt: "Hello", max_tokens: 8, temperature: 0, logprobs: 2 });
assert.equal(completion.usage.completion_tokens, 8);
assert.equal(completion.choices[0].logprobs.tokens.length, 8);

const chat = await client.chat.completions.create({ model, messages, max_tokens: 8, temperature: 0 });
assert.equal(chat.choices[0].message.role, "assistant");

let text = "";
let usage = null;
const stream = await client.chat.completions.create({
  model, messages, max_tokens: 8, temperature: 0, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, chat.choices[0].message.content);
assert.deepEqual(usage.completion_tokens, 8);

const json = await client.chat.completions.create({
  model, messages, max_tokens: 200, seed: 1,
  response_format: {
    type: "json_schema",
    json_schema: { name: "answer", schema: { type: "object", properties: { n: { enum: [1, 2] } }, required: ["n"] } },
  },
});
assert.ok([1, 2].includes(JSON.parse(json.choices[0].message.content).n));

const tools = [{ type: "function", function: { name: "weather", parameters: { type: "object", properties: {} } } }];
const call = await client.chat.completions.create({
  model, messages, tools, tool_choice: "required", parallel_tool_calls: false, max_tokens: 200, seed: 1,
});
assert.equal(call.choices[0].message.tool_calls[0].function.name, "weather");

const controller = new AbortController();
await assert.rejects(async () => {
  const cut = await client.completions.create(
    { model, prompt: "Hello", max_tokens: 400, stream: true }, { signal: controller.signal },
  );
  for await (const _ of cut) controller.abort();
  throw new Error("not aborted");
}, /abort/i);

await assert.rejects(client.completions.create({ model, prompt: "Hello", temperature: -1 }), (error) => {
  assert.equal(error.status, 400);
  assert.equal(error.param, "temperature");
  return true;
});
await assert.rejects(client.completions.create({ model: "gpt-4", prompt: "Hello" }), { status: 404 });
console.log("ok");
