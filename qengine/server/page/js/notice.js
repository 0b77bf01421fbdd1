// A failure under the conversation, with buttons for what can be done, and a countdown where waiting helps.

import { el, textButton } from "./dom.js";
import { explain } from "./errors.js";

const LABELS = {
  retry: "Try again",
  key: "Enter the API key",
  new: "New conversation",
  settings: "Open settings",
};
const MOST_RETRIES = 5;

/**
 * The notice of a failure. `handlers` has a function for each action; `retries` is how often it was tried by itself.
 * `stop()` ends the countdown.
 */
export class Notice {
  constructor(error, settings, handlers, retries = 0) {
    const { title, text, actions, field, wait } = explain(error, settings);
    this.countdown = el("p", { class: "countdown", hidden: true });
    this.buttons = el("div", { class: "notice-actions" });
    actions.forEach((action, index) => {
      const run = () => {
        this.stop();
        handlers[action](field);
      };
      this.buttons.append(textButton(LABELS[action], run, { kind: index === 0 ? "primary" : "plain" }));
    });
    this.element = el(
      "div",
      { class: "notice", role: "alert" },
      el("strong", {}, title),
      el("p", {}, text),
      this.countdown,
      this.buttons,
    );
    if (wait !== undefined && retries < MOST_RETRIES) this.#wait(Math.max(1, wait), handlers.again);
  }

  #wait(seconds, again) {
    const until = Date.now() + seconds * 1000;
    const cancel = textButton("Do not try again", () => this.stop());
    this.buttons.append(cancel);
    this.countdown.hidden = false;
    // The numbers change each second: not for the alert that a screen reader reads.
    this.countdown.setAttribute("aria-live", "off");
    const show = () => {
      const left = Math.ceil((until - Date.now()) / 1000);
      this.countdown.textContent = `Trying again in ${Math.max(0, left)} s.`;
      if (left > 0) return;
      this.stop();
      again();
    };
    this.cancel = cancel;
    this.timer = setInterval(show, 250);
    show();
  }

  /** End the countdown; the notice and its buttons stay. */
  stop() {
    clearInterval(this.timer);
    this.countdown.hidden = true;
    this.cancel?.remove();
  }
}
