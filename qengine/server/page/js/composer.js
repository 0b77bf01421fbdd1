// The box in which messages are written.

import { byId } from "./dom.js";
import { forget, load, save } from "./storage.js";

const DRAFT = "draft";
const TALLEST = 220;

/** `actions`: send(text), stop(), editLast(). */
export class Composer {
  constructor(actions) {
    this.actions = actions;
    this.area = byId("message");
    this.sendButton = byId("send");
    this.stopButton = byId("stop");
    this.running = false;
    this.area.value = load(DRAFT, "", "sessionStorage");
    this.area.addEventListener("input", () => this.#changed());
    this.area.addEventListener("keydown", (event) => this.#key(event));
    this.stopButton.addEventListener("click", () => actions.stop());
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.#changed();
  }

  #key(event) {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      this.#send();
    } else if (event.key === "ArrowUp" && this.area.value === "") {
      event.preventDefault();
      this.actions.editLast();
    }
  }

  #send() {
    const text = this.area.value.trim();
    if (!text || this.running || !this.actions.send(text)) return;
    this.area.value = "";
    this.#changed();
  }

  #changed() {
    if (this.area.value) save(DRAFT, this.area.value, "sessionStorage");
    else forget(DRAFT, "sessionStorage");
    this.area.style.height = "auto";
    this.area.style.height = `${Math.min(TALLEST, this.area.scrollHeight)}px`;
    this.sendButton.disabled = !this.area.value.trim();
  }

  /** Offer to stop while an answer is under way, else to send. */
  setRunning(running) {
    const focused = document.activeElement === this.sendButton || document.activeElement === this.stopButton;
    this.running = running;
    this.sendButton.hidden = running;
    this.stopButton.hidden = !running;
    if (focused) (running ? this.stopButton : this.area).focus();
  }

  /** Move the focus to the box; on a touch screen, where that opens a keyboard, to the messages. */
  focus() {
    const touch = matchMedia("(pointer: coarse)").matches;
    if (document.activeElement !== this.area) (touch ? byId("thread") : this.area).focus();
  }
}
