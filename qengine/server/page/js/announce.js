// What a screen reader hears: whole sentences of an answer as they are complete, not every token.

import { byId, el } from "./dom.js";

const KEPT = 4;
const SHORTEST = 80;
const SENTENCE_END = /[.!?:;。！？](?=\s)|\n/g;

/** Have a text read out when the reader is free. */
export function announce(text) {
  const region = byId("announcer");
  region.append(el("p", {}, text));
  while (region.children.length > KEPT) region.firstChild.remove();
}

/** Reads a growing text out, in pieces of whole sentences. */
export class Reading {
  constructor() {
    this.at = 0;
  }

  /** The text so far; announces what is complete and long enough to be worth an interruption. */
  feed(text) {
    const open = text.slice(this.at);
    const ends = [...open.matchAll(SENTENCE_END)];
    const length = ends.length ? ends.at(-1).index + ends.at(-1)[0].length : 0;
    if (length >= SHORTEST) this.#say(open.slice(0, length));
  }

  /** The text is complete: announce the rest. */
  finish(text) {
    this.#say(text.slice(this.at));
  }

  #say(piece) {
    this.at += piece.length;
    const plain = piece
      .replace(/[*_`#>|]+/g, " ")
      .replace(/\s+/g, " ")
      .trim();
    if (plain) announce(plain);
  }
}
