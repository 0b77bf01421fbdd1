// Sends messages and receives answers. It knows conversations and the API; what the user sees of it is the thread's.

import { Reading, announce } from "./announce.js";
import { ApiError, streamChat } from "./api.js";
import * as tree from "./conversations.js";
import { splitThinking } from "./thinking.js";

const SAVE_EVERY = 1000;

/** Messages as the server gets them: without reasoning, and without answers that never came. */
function messagesOf(settings, nodes) {
  const said = nodes.filter((node) => node.role === "user" || node.content);
  return [...settings.systemMessages(), ...said.map(({ role, content }) => ({ role, content }))];
}

/**
 * Answers under way, at most one a conversation.
 * `thread` shows: begin(conversation), change(conversation, node), end(conversation, node, failure).
 * `keep(conversation)` stores.
 */
export class Chat {
  constructor({ settings, model, thread, keep }) {
    Object.assign(this, { settings, model, thread, keep });
    this.runs = new Map();
  }

  /** Whether an answer of the conversation is under way. */
  running(conversation) {
    return this.runs.has(conversation.id);
  }

  /** Add a message at the end of what is shown, and have it answered. */
  send(conversation, text) {
    const last = tree.shownPath(conversation).at(-1) ?? null;
    return this.answer(conversation, tree.addNode(conversation, last, "user", text));
  }

  /** Put another message in a message's place, and have it answered. */
  edit(conversation, node, text) {
    const parent = conversation.nodes.find((other) => other.id === node.parent) ?? null;
    return this.answer(conversation, tree.addNode(conversation, parent, "user", text));
  }

  /** Answer a message once more. */
  regenerate(conversation, node) {
    const message = conversation.nodes.find((other) => other.id === node.parent);
    return this.answer(conversation, message);
  }

  /** Answer a user's message. */
  answer(conversation, message) {
    const node = tree.addNode(conversation, message, "assistant", "");
    const messages = messagesOf(this.settings, tree.pathTo(conversation, message));
    return this.#run(conversation, node, { messages });
  }

  /** Go on with an answer that was cut off. */
  resume(conversation, node) {
    const messages = messagesOf(this.settings, tree.pathTo(conversation, node));
    node.end = null;
    const body = { messages, continue_final_message: true, add_generation_prompt: false };
    return this.#run(conversation, node, body);
  }

  /** End the conversation's answer; what has come is kept. Resolves once it has ended. */
  stop(conversation) {
    const run = this.runs.get(conversation.id);
    run?.controller.abort();
    return run?.ended;
  }

  #run(conversation, node, fields) {
    const run = { controller: new AbortController() };
    this.runs.set(conversation.id, run);
    run.ended = this.#answer(conversation, node, fields, run.controller.signal);
    return run.ended;
  }

  async #answer(conversation, node, fields, signal) {
    conversation.updated = Date.now();
    this.keep(conversation);
    this.thread.begin(conversation);
    const options = { stream: true, stream_options: { include_usage: true }, ...this.settings.body() };
    const body = { model: this.model() || undefined, ...fields, ...options };
    let failure = null;
    try {
      await this.#receive(conversation, node, streamChat(body, signal));
    } catch (error) {
      node.end = signal.aborted ? "stopped" : "lost";
      if (!signal.aborted) failure = error instanceof ApiError ? error : new ApiError("failed", String(error));
      if (failure && failure !== error) console.error(error);
    }
    this.runs.delete(conversation.id);
    this.#end(conversation, node, failure);
  }

  async #receive(conversation, node, chunks) {
    const begun = performance.now();
    const reading = new Reading();
    reading.at = node.content.length;
    let saved = begun;
    let text = node.content;
    let thoughts = node.reasoning;
    let ended = null;
    delete node.firstToken;
    for await (const chunk of chunks) {
      if (chunk.usage) node.usage = chunk.usage;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      const { content = "", reasoning_content: older, reasoning = older } = choice.delta ?? {};
      if ((content || reasoning) && node.firstToken === undefined) node.firstToken = (performance.now() - begun) / 1000;
      text += content ?? "";
      thoughts += reasoning ?? "";
      const split = splitThinking(text);
      node.content = split.content;
      node.reasoning = thoughts + split.reasoning;
      if (content || reasoning) node.seconds = (performance.now() - begun) / 1000;
      reading.feed(node.content);
      ended = choice.finish_reason ?? ended;
      this.thread.change(conversation, node);
      if (performance.now() - saved > SAVE_EVERY) {
        saved = performance.now();
        this.keep(conversation);
      }
    }
    node.end = ended ?? "lost";
    reading.finish(node.content);
  }

  #end(conversation, node, failure) {
    if (!node.content && !node.reasoning && (failure || node.end === "stopped")) tree.dropNode(conversation, node);
    this.keep(conversation);
    this.thread.end(conversation, node, failure);
    if (!failure) announce(node.end === "stopped" ? "Stopped." : "The answer is complete.");
  }
}
