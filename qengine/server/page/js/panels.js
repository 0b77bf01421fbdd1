// The conversations at the left and the panel at the right: open, shut, and over the chat where the window is narrow.

import { byId } from "./dom.js";
import { load, save } from "./storage.js";

const SIDES = {
  sidebar: { button: "toggle-sidebar", narrow: matchMedia("(max-width: 47.99rem)") },
  panel: { button: "toggle-panel", narrow: matchMedia("(max-width: 71.99rem)") },
};

/** Opens and shuts the two sides. Over the chat (narrow), the rest of the page is inert until a side is shut. */
export class Panels {
  constructor() {
    for (const [name, side] of Object.entries(SIDES)) {
      side.element = byId(name);
      side.open = !side.narrow.matches && load(`open.${name}`, true);
      byId(side.button).addEventListener("click", () => this.toggle(name));
      side.element.querySelector(".shut").addEventListener("click", () => this.shut());
      side.narrow.addEventListener("change", () => {
        side.open = !side.narrow.matches && load(`open.${name}`, true);
        this.#show();
      });
    }
    byId("backdrop").addEventListener("click", () => this.shut());
    this.#tabs();
    this.#show();
  }

  /** The name of the side that lies over the chat, or undefined. */
  get over() {
    return Object.keys(SIDES).find((name) => SIDES[name].open && SIDES[name].narrow.matches);
  }

  /** Open a side that is shut, and the other way round. */
  toggle(name) {
    const side = SIDES[name];
    side.open = !side.open;
    if (!side.narrow.matches) save(`open.${name}`, side.open);
    this.#show();
    if (side.open && side.narrow.matches) side.element.querySelector(".shut").focus();
  }

  /** Shut the side that lies over the chat; true if one did. */
  shut() {
    const name = this.over;
    if (!name) return false;
    SIDES[name].open = false;
    this.#show();
    byId(SIDES[name].button).focus();
    return true;
  }

  /** Open the panel at one of its tabs, "live" or "settings". */
  openTab(tab) {
    if (!SIDES.panel.open) this.toggle("panel");
    this.#choose(tab);
  }

  #show() {
    const over = this.over;
    for (const [name, side] of Object.entries(SIDES)) {
      document.body.classList.toggle(`with-${name}`, side.open);
      side.element.inert = !side.open || (over !== undefined && over !== name);
      byId(side.button).setAttribute("aria-expanded", String(side.open));
    }
    byId("chat").inert = over !== undefined;
    byId("top").inert = over !== undefined;
    byId("backdrop").hidden = over === undefined;
  }

  #tabs() {
    this.tabs = [...document.querySelectorAll("[role=tab]")];
    for (const tab of this.tabs) {
      tab.addEventListener("click", () => this.#choose(tab.dataset.tab));
      tab.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!step) return;
        const next = this.tabs.at((this.tabs.indexOf(tab) + step) % this.tabs.length);
        this.#choose(next.dataset.tab);
        next.focus();
      });
    }
    this.#choose(load("tab", "live"));
  }

  #choose(name) {
    for (const tab of this.tabs) {
      const chosen = tab.dataset.tab === name;
      tab.setAttribute("aria-selected", String(chosen));
      tab.tabIndex = chosen ? 0 : -1;
      byId(tab.getAttribute("aria-controls")).hidden = !chosen;
    }
    save("tab", name);
  }
}
