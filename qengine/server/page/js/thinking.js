// Models that reason before they answer write it between <think> and </think>. A server with a reasoning parser splits
// it off; for one without, it is done here.

const OPEN = "<think>";
const CLOSE = "</think>";

/** The reasoning and the answer in a text that may still grow. A text that does not begin with <think> has none. */
export function splitThinking(text) {
  const start = text.trimStart();
  if (!start.startsWith(OPEN)) return { reasoning: "", content: OPEN.startsWith(start) ? "" : text };
  const end = start.indexOf(CLOSE);
  if (end < 0) return { reasoning: start.slice(OPEN.length).trimStart(), content: "" };
  return { reasoning: start.slice(OPEN.length, end).trim(), content: start.slice(end + CLOSE.length).trimStart() };
}
