// Conversations and how they are kept. A conversation is a tree: an edited message or a new answer is a sibling of the
// old one, so nothing is lost, and `chosen` says which child of a node is shown.
//
// node: {id, parent, role: "user" | "assistant", content, reasoning, end, usage, firstToken, seconds}
// end of an answer: null while it runs; "stop", "length", ... as the server said; "stopped" by the user; "lost".

import { randomId } from "./dom.js";
import { forget, load, names, save } from "./storage.js";

const KEY = "conversation.";
const TITLE_LENGTH = 60;
const ROOT = "root";

/** An empty conversation. It is kept once it has a message. */
export function newConversation() {
  return { id: randomId(), updated: Date.now(), nodes: [], chosen: {} };
}

/** Add a node below `parent` (null: at the start) and show it. */
export function addNode(conversation, parent, role, content) {
  const node = { id: randomId(), parent: parent?.id ?? null, role, content, reasoning: "", end: null };
  conversation.nodes.push(node);
  choose(conversation, node);
  return node;
}

/** Take a node without children out again, showing the sibling before it, if any. */
export function dropNode(conversation, node) {
  conversation.nodes = conversation.nodes.filter((other) => other !== node);
  const left = conversation.nodes.filter((other) => other.parent === node.parent);
  if (left.length) choose(conversation, left.at(-1));
  else delete conversation.chosen[node.parent ?? ROOT];
}

/** Show a node rather than its siblings. */
export function choose(conversation, node) {
  conversation.chosen[node.parent ?? ROOT] = node.id;
}

/** All versions of a node, itself included, oldest first. */
export function versions(conversation, node) {
  return conversation.nodes.filter((other) => other.parent === node.parent);
}

/** The nodes that are shown, from the first message to the last. */
export function shownPath(conversation) {
  const path = [];
  for (let parent = null; ; parent = path.at(-1).id) {
    const children = conversation.nodes.filter((node) => node.parent === parent);
    if (!children.length) return path;
    const chosen = conversation.chosen[parent ?? ROOT];
    path.push(children.find((node) => node.id === chosen) ?? children.at(-1));
  }
}

/** The nodes from the start to a node, itself included. */
export function pathTo(conversation, node) {
  const byId = new Map(conversation.nodes.map((other) => [other.id, other]));
  const path = [];
  for (let at = node; at; at = byId.get(at.parent)) path.unshift(at);
  return path;
}

/** What the list calls a conversation: the beginning of its first message. */
export function title(conversation) {
  const first = shownPath(conversation)[0]?.content.trim().replace(/\s+/g, " ") ?? "";
  if (!first) return "New conversation";
  return first.length > TITLE_LENGTH ? `${first.slice(0, TITLE_LENGTH - 1)}…` : first;
}

/** Whether what the browser kept is a conversation: another version of the page may have written something else. */
function isConversation(item) {
  const texts = (node) => [node.id, node.content, node.reasoning, node.role].every((text) => typeof text === "string");
  return typeof item?.id === "string" && typeof item.chosen === "object" && item.nodes?.every?.(texts);
}

/** Every kept conversation, newest first. One that was still running when its page was left counts as lost. */
export function loadConversations() {
  const all = names(KEY)
    .map((name) => load(name))
    .filter(isConversation);
  for (const node of all.flatMap((item) => item.nodes)) {
    if (node.role === "assistant" && node.end === null) node.end = "lost";
  }
  return all.sort((a, b) => b.updated - a.updated);
}

/** Keep a conversation; false where the browser has no room for it. An empty one is not kept. */
export function keepConversation(conversation) {
  return conversation.nodes.length === 0 || save(KEY + conversation.id, conversation);
}

/** Forget a conversation. */
export function forgetConversation(conversation) {
  forget(KEY + conversation.id);
}

/** Whether a name of the browser's storage is a conversation's. */
export function isConversationName(name) {
  return name.startsWith(KEY);
}
