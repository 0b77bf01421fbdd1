// A small chart of the last two minutes, one value a second: an area under a line, scaled to its highest value.

import { svg } from "./dom.js";

const SECONDS = 120;
const WIDTH = 240;
const HEIGHT = 56;

/** A chart inside `container`, with a text for screen readers that `describe(now, highest)` gives. */
export class Chart {
  constructor(container, describe) {
    this.values = [];
    this.describe = describe;
    this.image = svg("svg", {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      role: "img",
      class: "chart",
    });
    this.area = svg("path", { class: "chart-area" });
    this.line = svg("path", { class: "chart-line" });
    this.image.append(this.area, this.line);
    container.append(this.image);
    this.#draw();
  }

  get highest() {
    return Math.max(0, ...this.values.map((value) => value ?? 0));
  }

  /** Add the value of this second; null where it is not known. */
  add(value) {
    this.values.push(value);
    if (this.values.length > SECONDS) this.values.shift();
    this.#draw();
  }

  #draw() {
    const highest = this.highest || 1;
    const step = WIDTH / (SECONDS - 1);
    const first = SECONDS - this.values.length;
    const points = this.values.map((value, index) => {
      const x = ((first + index) * step).toFixed(1);
      const y = (HEIGHT - 2 - ((value ?? 0) / highest) * (HEIGHT - 6)).toFixed(1);
      return `${x},${y}`;
    });
    const line = points.length > 1 ? `M${points.join("L")}` : "";
    this.line.setAttribute("d", line);
    this.area.setAttribute("d", line && `${line}L${WIDTH},${HEIGHT}L${(first * step).toFixed(1)},${HEIGHT}Z`);
    this.image.setAttribute("aria-label", this.describe(this.values.at(-1) ?? 0, this.highest));
  }
}
