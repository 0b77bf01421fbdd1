// The conversation that is shown: its messages, scrolling, notices under it.

import { byId, el, textButton } from "./dom.js";
import * as tree from "./conversations.js";
import { MessageView } from "./message_view.js";
import { Notice } from "./notice.js";

/** Distance from the end, in pixels, within which a growing answer is followed. */
const NEAR_END = 80;

const SUGGESTIONS = [
  "Explain how a paged key-value cache works.",
  "Write a Python function that merges two sorted lists.",
  "Compare tea and coffee in a table.",
];

/**
 * `actions`: those of MessageView, and send(text), answer(node), key(then), fresh(), settings(field), and state(), which
 * hears that an answer began or ended.
 */
export class Thread {
  constructor(settings, actions) {
    this.settings = settings;
    this.actions = actions;
    this.views = new Map();
    this.scroller = byId("thread");
    this.list = byId("messages");
    this.notices = byId("notices");
    this.jump = byId("jump");
    this.retries = 0;
    this.scroller.addEventListener("scroll", () => this.#noteScroll(), { passive: true });
    this.jump.addEventListener("click", () => this.toEnd());
    for (const text of SUGGESTIONS) {
      const button = textButton(text, () => actions.send(text), { kind: "suggestion" });
      byId("suggestions").append(el("li", {}, button));
    }
  }

  /** Show a conversation from its beginning to its end. */
  show(conversation) {
    if (conversation !== this.conversation) this.views.clear();
    this.conversation = conversation;
    this.#clearNotices();
    const path = tree.shownPath(conversation);
    const views = path.map((node) => this.#view(node));
    views.forEach((view, index) => {
      const there = this.list.children[index] ?? null;
      if (there !== view.item) this.list.insertBefore(view.item, there);
    });
    while (this.list.children.length > views.length) this.list.lastChild.remove();
    views.forEach((view, index) => view.finish(index === views.length - 1));
    byId("welcome").hidden = path.length > 0;
    const last = path.at(-1);
    if (last?.role === "user") this.#offerAnswer(last);
    this.toEnd();
  }

  /** Show what goes with another version of a message, without moving. */
  showVersion(node) {
    const top = this.scroller.scrollTop;
    this.show(this.conversation);
    this.views.get(node.id)?.item.querySelector(".versions button:enabled")?.focus({ preventScroll: true });
    this.scroller.scrollTop = top;
  }

  /** The view of a node: the one it has, which may be in use (an edit, a fold), or a new one. */
  #view(node) {
    const view = this.views.get(node.id) ?? new MessageView(node, this.actions);
    view.versions = tree.versions(this.conversation, node);
    view.onrender = () => this.following && this.toEnd();
    this.views.set(node.id, view);
    return view;
  }

  #offerAnswer(node) {
    const button = textButton("Answer it", () => this.actions.answer(node), { kind: "primary" });
    this.notices.append(el("div", { class: "notice quiet" }, el("p", {}, "This message has no answer."), button));
  }

  #clearNotices() {
    this.notice?.stop();
    this.notice = null;
    this.notices.replaceChildren();
  }

  /** An answer begins. */
  begin(conversation) {
    if (conversation !== this.conversation) return;
    this.show(conversation);
    this.actions.state();
  }

  /** An answer has grown. */
  change(conversation, node) {
    if (conversation === this.conversation) this.views.get(node.id)?.update();
  }

  /** An answer has ended; `failure` is an ApiError where it ended so. */
  end(conversation, node, failure) {
    this.actions.state();
    if (conversation !== this.conversation) return;
    const followed = this.following;
    const top = this.scroller.scrollTop;
    const view = this.views.get(node.id);
    if (failure || !tree.shownPath(conversation).includes(node)) this.show(conversation);
    else view?.finish(true);
    if (!followed) this.scroller.scrollTop = top;
    if (failure) this.#fail(conversation, node, failure);
    else this.retries = 0;
  }

  #fail(conversation, node, failure) {
    this.#clearNotices();
    const message = conversation.nodes.find((other) => other.id === node.parent);
    const answer = () => this.actions.answer(message);
    const handlers = {
      retry: () => {
        this.retries = 0;
        answer();
      },
      again: () => {
        this.retries += 1;
        answer();
      },
      key: () => this.actions.key(answer),
      new: () => this.actions.fresh(),
      settings: (field) => this.actions.settings(field),
    };
    this.notice = new Notice(failure, this.settings, handlers, this.retries);
    this.notices.append(this.notice.element);
    this.toEnd();
  }

  /** End the countdown to another try, if one is running; true if one was. */
  stopWaiting() {
    const waiting = this.notice !== null && this.notice !== undefined && !this.notice.countdown.hidden;
    this.notice?.stop();
    return waiting;
  }

  /** Edit the last message of the user. */
  editLast() {
    const path = tree.shownPath(this.conversation).filter((node) => node.role === "user");
    this.views.get(path.at(-1)?.id)?.edit();
  }

  /** Scroll to the end, and follow it. */
  toEnd() {
    this.following = true;
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.jump.hidden = true;
  }

  #noteScroll() {
    const left = this.scroller.scrollHeight - this.scroller.scrollTop - this.scroller.clientHeight;
    this.following = left < NEAR_END;
    this.jump.hidden = this.following;
  }
}
