// The live view: what GET /stats says, once a second while the page is seen.

import { getJson } from "./api.js";
import { Chart } from "./chart.js";
import { byId, el } from "./dom.js";

const EVERY = 1000;
const SLOWEST = 15_000;
const REQUESTS = 8;
const GIB = 2 ** 30;
const MIB = 2 ** 20;

const STATES = {
  running: "running",
  stop: "done",
  length: "cut off",
  tool_calls: "tool call",
  abort: "aborted",
  error: "failed",
};

const known = (value) => typeof value === "number" && Number.isFinite(value);
const dash = (value, format) => (known(value) ? format(value) : "–");

/** Bytes in the unit that keeps the number short. */
function bytes(value) {
  if (value === 0) return "0";
  if (value >= 1000 * MIB) return `${(value / GIB).toFixed(value >= 100 * GIB ? 0 : 1)} GiB`;
  if (value >= MIB) return `${Math.round(value / MIB)} MiB`;
  return `${Math.round(value / 2 ** 10)} KiB`;
}

function rate(value) {
  return value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}

/** A bar with its name and figures; `share` from 0 to 1, or null where there is nothing to measure it by. */
class Bar {
  constructor(container, name) {
    this.text = el("span", { class: "figure" }, "–");
    this.fill = el("div", { class: "fill" });
    this.track = el(
      "div",
      { class: "track", role: "meter", "aria-label": name, "aria-valuemin": "0", "aria-valuemax": "100" },
      this.fill,
    );
    container.append(el("div", { class: "bar" }, el("span", {}, name), this.text, this.track));
  }

  show(text, share) {
    this.text.textContent = text;
    const percent = Math.round(100 * Math.min(1, Math.max(0, share ?? 0)));
    this.fill.style.width = `${percent}%`;
    this.track.classList.toggle("full", percent >= 95);
    this.track.setAttribute("aria-valuenow", String(percent));
    this.track.setAttribute("aria-valuetext", text);
  }
}

/** `onstate(state, stats)` hears "ready", "unhealthy", "key" or "gone" after each poll. */
export class Live {
  constructor(onstate) {
    this.onstate = onstate;
    this.wait = EVERY;
    const describe = (now, highest) =>
      `Generated tokens a second over the last two minutes: now ${rate(now)}, highest ${rate(highest)}`;
    this.chart = new Chart(byId("chart"), describe);
    const memory = byId("memory");
    this.bars = { weights: new Bar(memory, "Weights"), cache: new Bar(memory, "Cache"), swap: new Bar(memory, "Swap") };
    this.device = new Bar(memory, "Card");
    this.device.track.parentElement.hidden = true;
    document.addEventListener("visibilitychange", () => !document.hidden && this.poll());
    this.poll();
  }

  /** Ask now, and from then on each second; more rarely while the server does not answer. */
  async poll() {
    clearTimeout(this.timer);
    if (this.polling || document.hidden) return;
    this.polling = true;
    try {
      const stats = await getJson("stats");
      this.wait = EVERY;
      this.#show(stats);
      this.onstate(stats.healthy === false ? "unhealthy" : "ready", stats);
    } catch (error) {
      this.wait = Math.min(SLOWEST, this.wait * 1.5);
      this.#unknown(error);
    }
    this.polling = false;
    this.timer = setTimeout(() => this.poll(), this.wait);
  }

  #unknown(error) {
    this.chart.add(null);
    byId("live").classList.add("stale");
    byId("live-note").textContent = error.status === 401 ? "The figures need the API key." : error.message;
    this.onstate(error.status === 401 ? "key" : error.kind === "unreachable" ? "gone" : "unhealthy", null);
  }

  #show(stats) {
    byId("live").classList.remove("stale");
    byId("live-note").textContent = "";
    const { generation, prompt } = stats.tokens_per_s ?? {};
    this.chart.add(known(generation) ? generation : null);
    byId("rate").textContent = dash(generation, rate);
    byId("prompt-rate").textContent = dash(prompt, rate);
    byId("highest").textContent = rate(this.chart.highest);
    for (const name of ["running", "waiting", "swapped"]) byId(name).textContent = dash(stats[name], String);
    byId("hits").textContent = dash(stats.prefix_hit_rate, (value) => `${Math.round(100 * value)} %`);
    this.#showMemory(stats.memory ?? {}, stats.gpu);
    const rows = (stats.requests ?? []).slice(0, REQUESTS).map(requestRow);
    byId("requests").replaceChildren(...rows);
    byId("no-requests").hidden = rows.length > 0;
  }

  #showMemory(memory, gpu) {
    const { weights, cache, swap, cache_used: cacheUsed, swap_used: swapUsed } = memory;
    const all = gpu?.total ?? (known(weights) && known(cache) ? weights + cache : null);
    this.bars.weights.show(dash(weights, bytes), all ? weights / all : 0);
    const part = (total, used) => dash(total, () => `${bytes(total * used)} of ${bytes(total)}`);
    this.bars.cache.show(part(cache, cacheUsed ?? 0), cacheUsed);
    this.bars.swap.show(swap === 0 ? "none" : part(swap, swapUsed ?? 0), swapUsed);
    this.device.track.parentElement.hidden = !gpu;
    if (gpu) this.device.show(`${bytes(gpu.used)} of ${bytes(gpu.total)}`, gpu.used / gpu.total);
  }
}

function requestRow(request) {
  const { state, seconds, first_token_s: first, prompt_tokens: read, generation_tokens: made } = request;
  const began = new Date(request.started * 1000);
  const decoding = seconds - (first ?? seconds);
  const cell = (text, properties = {}) => el("td", properties, text);
  return el(
    "tr",
    { class: `state-${state}`, title: `${request.endpoint} ${request.id}` },
    el(
      "th",
      { scope: "row" },
      began.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false }),
    ),
    cell(`${read || "–"} → ${made || "–"}`),
    cell(dash(first, (value) => `${value.toFixed(2)} s`)),
    cell(made > 1 && decoding > 0 ? rate((made - 1) / decoding) : "–"),
    cell(STATES[state] ?? state, { class: "state" }),
  );
}
