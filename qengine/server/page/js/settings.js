// The settings of a request: their fields, checks, and what of them goes into the request's body. An empty field is not
// sent, so that the server's own default holds.

import { el } from "./dom.js";
import { load, save } from "./storage.js";

const NAME = "settings";

/** low and high are the limits the server has for the number; `whole` numbers have no fraction. */
const NUMBERS = [
  {
    name: "temperature",
    label: "Temperature",
    low: 0,
    high: 100,
    step: 0.1,
    hint: "0 always takes the likeliest token",
  },
  { name: "max_tokens", label: "Max tokens", low: 1, whole: true, hint: "Most tokens of an answer" },
  { name: "top_p", label: "Top p", low: 0, high: 1, step: 0.05, hint: "Likeliest tokens that add up to this" },
  { name: "top_k", label: "Top k", low: -1, whole: true, hint: "This many likeliest tokens; 0 is all" },
  { name: "min_p", label: "Min p", low: 0, high: 1, step: 0.01, hint: "At least this share of the likeliest" },
  { name: "seed", label: "Seed", whole: true, hint: "The same seed, the same answer" },
  {
    name: "presence_penalty",
    label: "Presence penalty",
    low: -2,
    high: 2,
    step: 0.1,
    hint: "Once for each token used",
  },
  {
    name: "frequency_penalty",
    label: "Frequency penalty",
    low: -2,
    high: 2,
    step: 0.1,
    hint: "For each time it was used",
  },
  {
    name: "repetition_penalty",
    label: "Repetition penalty",
    low: 0.01,
    step: 0.05,
    hint: "1 is none; above, fewer repeats",
  },
];

const TEXTS = {
  system: { label: "System prompt", rows: 4, hint: "Begins every conversation" },
  stop: { label: "Stop at", rows: 2, hint: "One a line: a text that ends the answer" },
};

const NAMES = [...NUMBERS.map((field) => field.name), "system", "stop", "thinking"];

/** What is wrong with a number's text, or "". */
function objection(field, text) {
  if (text === "") return "";
  const value = Number(text);
  if (!Number.isFinite(value)) return "Give a number.";
  if (field.whole && !Number.isInteger(value)) return "Give a whole number.";
  if (field.low !== undefined && value < field.low) return `Give ${field.low} or more.`;
  if (field.high !== undefined && value > field.high) return `Give ${field.high} or less.`;
  return "";
}

/** The settings' form inside `container`. */
export class Settings {
  constructor(container) {
    this.values = { ...load(NAME, {}) };
    this.inputs = new Map();
    container.append(
      this.#text("system"),
      el("div", { class: "fields" }, ...NUMBERS.map((field) => this.#number(field))),
      this.#text("stop"),
      this.#thinking(),
      el(
        "button",
        { type: "button", class: "button plain", onclick: () => this.reset() },
        "Back to the server's defaults",
      ),
    );
  }

  #field(name, label, hint, input) {
    const id = `setting-${name}`;
    Object.assign(input, { id, name, value: this.values[name] ?? "" });
    const note = el("p", { class: "hint", id: `${id}-hint` }, hint);
    input.setAttribute("aria-describedby", note.id);
    this.inputs.set(name, input);
    return el("div", { class: "field" }, el("label", { for: id }, label), input, note);
  }

  #keep(name, value) {
    if (value === "") delete this.values[name];
    else this.values[name] = value;
    save(NAME, this.values);
  }

  #number(field) {
    const input = el("input", {
      type: "text",
      inputMode: field.whole ? "numeric" : "decimal",
      autocomplete: "off",
      placeholder: "default",
    });
    const box = this.#field(field.name, field.label, field.hint, input);
    const note = box.querySelector(".hint");
    const show = () => {
      const wrong = objection(field, input.value.trim());
      input.setAttribute("aria-invalid", String(wrong !== ""));
      note.classList.toggle("wrong", wrong !== "");
      note.textContent = wrong || field.hint;
    };
    input.addEventListener("input", () => {
      this.#keep(field.name, input.value.trim());
      show();
    });
    input.addEventListener("keydown", (event) => this.#step(event, field, input));
    show();
    return box;
  }

  /** The arrow keys change a number by one step, within its limits. */
  #step(event, field, input) {
    const sign = { ArrowUp: 1, ArrowDown: -1 }[event.key];
    if (!sign || input.value.trim() === "" || !Number.isFinite(Number(input.value))) return;
    event.preventDefault();
    const next = Number((Number(input.value) + sign * (field.step ?? 1)).toFixed(4));
    input.value = String(Math.min(field.high ?? Infinity, Math.max(field.low ?? -Infinity, next)));
    input.dispatchEvent(new Event("input"));
  }

  #text(name) {
    const { label, rows, hint } = TEXTS[name];
    const input = el("textarea", { rows, spellcheck: name === "system" });
    input.addEventListener("input", () => this.#keep(name, input.value));
    return this.#field(name, label, hint, input);
  }

  #thinking() {
    const options = [
      ["", "As the model does"],
      ["on", "On"],
      ["off", "Off"],
    ];
    const input = el("select", {}, ...options.map(([value, label]) => el("option", { value }, label)));
    input.addEventListener("change", () => this.#keep("thinking", input.value));
    return this.#field("thinking", "Reasoning", "For models that can reason before they answer", input);
  }

  /** Empty every field. */
  reset() {
    for (const name of NAMES) {
      this.inputs.get(name).value = "";
      this.#keep(name, "");
      this.inputs.get(name).dispatchEvent(new Event("input"));
    }
  }

  /** Whether there is a field of this name. */
  has(name) {
    return this.inputs.has(name);
  }

  /** Move the focus to a field. */
  focus(name) {
    this.inputs.get(name).focus();
  }

  /** The name of the first field whose value is not allowed, or null. */
  invalid() {
    return NUMBERS.find((field) => objection(field, this.values[field.name] ?? "") !== "")?.name ?? null;
  }

  /** The system prompt as a list of no or one message. */
  systemMessages() {
    const content = (this.values.system ?? "").trim();
    return content ? [{ role: "system", content }] : [];
  }

  /** The settings as fields of a chat completion's body. */
  body() {
    const body = {};
    for (const { name } of NUMBERS) if (this.values[name] !== undefined) body[name] = Number(this.values[name]);
    const stop = (this.values.stop ?? "").split("\n").filter((line) => line !== "");
    if (stop.length) body.stop = stop;
    if (this.values.thinking) body.chat_template_kwargs = { enable_thinking: this.values.thinking === "on" };
    return body;
  }
}
