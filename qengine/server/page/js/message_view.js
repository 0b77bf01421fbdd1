// One message on the page: its text, its reasoning folded, what can be done with it, and how it ended.

import { announce } from "./announce.js";
import { copyText, el, iconButton, textButton } from "./dom.js";
import { showMarkdown } from "./markdown.js";

const ENDS = {
  length: "Cut off: max tokens or the context's end was reached.",
  stopped: "Stopped.",
  lost: "Interrupted before its end.",
  abort: "Ended by the server.",
};
const CONTINUABLE = new Set(["length", "stopped", "lost", "abort"]);

/** Answers that took less time (seconds) after their first token say nothing of speed. */
const SHORTEST_MEASURE = 0.1;

/** Renders at most this often (milliseconds), and no more often than a quarter of the time goes into it. */
const SHORTEST_PAUSE = 60;

function figures(node) {
  const parts = [];
  const count = node.usage?.completion_tokens;
  if (count) parts.push(`${count} ${count === 1 ? "token" : "tokens"}`);
  const decoding = node.seconds - node.firstToken;
  if (count > 1 && decoding > SHORTEST_MEASURE) parts.push(`${((count - 1) / decoding).toFixed(1)} tokens/s`);
  if (node.firstToken !== undefined) parts.push(`first after ${node.firstToken.toFixed(2)} s`);
  return parts.join(" · ");
}

/**
 * The view of a node. `actions` has edit(node, text), which is false where it cannot be sent, regenerate(node),
 * resume(node) and show(node). `versions` is all versions of the node.
 */
export class MessageView {
  constructor(node, actions) {
    this.node = node;
    this.versions = [node];
    this.actions = actions;
    this.user = node.role === "user";
    this.body = el("div", { class: this.user ? "text" : "text markdown" });
    this.foot = el("div", { class: "message-foot" });
    this.item = el("li", { class: `message ${node.role}` });
    this.item.append(el("h3", { class: "visually-hidden" }, this.user ? "You" : "Answer"));
    if (!this.user) this.#addReasoning();
    this.item.append(this.body, this.foot);
    this.lastRender = 0;
    this.pause = SHORTEST_PAUSE;
    this.render();
  }

  #addReasoning() {
    this.reasoning = el("div", { class: "markdown" });
    this.reasoningTitle = el("span", {}, "Reasoning");
    this.fold = el(
      "details",
      { class: "reasoning", hidden: true },
      el("summary", {}, this.reasoningTitle),
      this.reasoning,
    );
    this.fold.addEventListener("toggle", () => this.fold.open && showMarkdown(this.reasoning, this.node.reasoning));
    this.item.append(this.fold);
  }

  get running() {
    return !this.user && this.node.end === null;
  }

  /** Show more of a running answer soon; many calls make one rendering. */
  update() {
    if (this.timer) return;
    const wait = Math.max(0, this.lastRender + this.pause - performance.now());
    this.timer = setTimeout(() => this.render(), wait);
  }

  /** Show the node as it is now. */
  render() {
    clearTimeout(this.timer);
    this.timer = null;
    const begun = performance.now();
    if (!this.user) this.#renderAnswer();
    else if (!this.editing) this.body.textContent = this.node.content;
    this.lastRender = performance.now();
    this.pause = Math.max(SHORTEST_PAUSE, 3 * (this.lastRender - begun));
    this.onrender?.();
  }

  #renderAnswer() {
    const { content, reasoning } = this.node;
    showMarkdown(this.body, content);
    this.fold.hidden = !reasoning;
    this.reasoningTitle.textContent = this.running && !content ? "Reasoning…" : "Reasoning";
    if (this.fold.open) showMarkdown(this.reasoning, reasoning);
    this.item.classList.toggle("running", this.running);
    this.item.classList.toggle("waiting", this.running && !content && !reasoning);
    if (this.running) this.foot.replaceChildren();
    else this.#renderFoot();
  }

  /** Show what can be done with the message; `last`: it is the last one of the conversation. */
  finish(last) {
    this.last = last;
    this.item.classList.toggle("last", last);
    this.render();
    if (this.user && !this.editing) this.#renderFoot();
  }

  #renderFoot() {
    const { node, actions } = this;
    const copy = iconButton(this.user ? "Copy message" : "Copy answer", "copy", async () => {
      announce((await copyText(node.content)) ? "Copied" : "The browser did not allow copying");
      copy.classList.add("done");
      setTimeout(() => copy.classList.remove("done"), 1500);
    });
    const buttons = [this.#versionSwitch(), copy];
    if (this.user)
      buttons.push(iconButton("Edit and send again", "edit", () => this.#edit(), { class: "icon-button edit" }));
    else buttons.push(iconButton("Answer again", "again", () => actions.regenerate(node)));
    const note = this.user ? "" : [ENDS[node.end], figures(node)].filter(Boolean).join(" ");
    this.foot.replaceChildren(el("div", { class: "message-actions" }, ...buttons));
    if (!this.user && this.last && CONTINUABLE.has(node.end) && node.content) {
      this.foot.append(textButton("Continue", () => actions.resume(node), { kind: "small" }));
    }
    if (note) this.foot.append(el("span", { class: "message-note" }, note));
  }

  #versionSwitch() {
    if (this.versions.length < 2) return null;
    const at = this.versions.indexOf(this.node);
    const go = (step) => this.actions.show(this.versions[at + step]);
    const before = iconButton("Version before", "left", () => go(-1), { disabled: at === 0 });
    const after = iconButton("Version after", "right", () => go(1), { disabled: at === this.versions.length - 1 });
    const count = el(
      "span",
      { class: "version" },
      el("span", { class: "visually-hidden" }, "Version "),
      `${at + 1}/${this.versions.length}`,
    );
    return el("span", { class: "versions" }, before, count, after);
  }

  /** Turn the message into a field. Enter sends, Escape leaves it as it was. */
  #edit() {
    const area = el("textarea", { value: this.node.content, rows: 1, "aria-label": "Edit the message" });
    const end = () => {
      this.editing = false;
      this.item.classList.remove("editing");
      this.finish(this.last);
    };
    const leave = () => {
      end();
      this.foot.querySelector(".edit")?.focus();
    };
    const send = () => area.value.trim() && this.actions.edit(this.node, area.value.trim()) && end();
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      } else if (event.key === "Escape") {
        event.stopPropagation();
        leave();
      }
    });
    this.editing = true;
    this.item.classList.add("editing");
    this.body.replaceChildren(area);
    this.foot.replaceChildren(
      textButton("Send", send, { kind: "primary small" }),
      textButton("Cancel", leave, { kind: "small" }),
    );
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }

  /** Begin editing from outside (arrow up in the empty message box). */
  edit() {
    if (this.user && !this.editing) this.#edit();
  }
}
