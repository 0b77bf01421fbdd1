// Markdown of a model to elements. Three things keep hostile text harmless: markdown-it escapes raw HTML, DOMPurify
// drops every tag and attribute that is not listed here, and the page's Content-Security-Policy runs no inline script.

import { copyText, el, icon } from "./dom.js";

const LINKS = /^(?:https?:|mailto:)/i;

const markdown = window.markdownit({ html: false, linkify: true });
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
markdown.validateLink = (url) => LINKS.test(url.trim());

const escape = (text) => markdown.utils.escapeHtml(text);
const LINK_ATTRIBUTES = 'target="_blank" rel="noopener noreferrer nofollow"';

// An image would be fetched from another host, and tell it who reads: it becomes a link.
markdown.renderer.rules.image = (tokens, index) => {
  const token = tokens[index];
  return `<a href="${escape(token.attrGet("src"))}" ${LINK_ATTRIBUTES}>${escape(token.content || "image")}</a>`;
};
markdown.renderer.rules.link_open = (tokens, index) =>
  `<a href="${escape(tokens[index].attrGet("href"))}" ${LINK_ATTRIBUTES}>`;
markdown.renderer.rules.fence = (tokens, index) => {
  const language = tokens[index].info.trim().split(/\s+/)[0];
  return `<pre data-language="${escape(language)}"><code>${escape(tokens[index].content)}</code></pre>\n`;
};

// The page's own headings end at the third level; alignment is an attribute, since inline styles are not allowed.
markdown.core.ruler.push("fit-page", (state) => {
  for (const token of state.tokens) {
    if (token.type.startsWith("heading_")) token.tag = `h${Math.min(6, Number(token.tag[1]) + 3)}`;
    const style = token.attrGet("style");
    if (style) {
      token.attrs = token.attrs.filter(([name]) => name !== "style");
      token.attrSet("align", style.replace("text-align:", ""));
    }
  }
});

const ALLOWED = {
  ALLOWED_TAGS: "a p br hr strong em s del code pre blockquote ul ol li h4 h5 h6 table thead tbody tr th td".split(" "),
  ALLOWED_ATTR: ["href", "target", "rel", "align", "start", "data-language"],
  ADD_URI_SAFE_ATTR: ["target", "rel", "align", "start", "data-language"],
  ALLOWED_URI_REGEXP: LINKS,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** One HTML text a top-level block, so that a growing text changes its last blocks alone. */
function blocks(text) {
  const environment = {};
  const tokens = markdown.parse(text, environment);
  const found = [];
  let start = 0;
  let depth = 0;
  tokens.forEach((token, index) => {
    depth += token.nesting;
    if (depth > 0) return;
    found.push(markdown.renderer.render(tokens.slice(start, index + 1), markdown.options, environment));
    start = index + 1;
  });
  return found;
}

function copyButton(code) {
  const label = el("span", {}, "Copy");
  const button = el("button", { type: "button", class: "copy-code", "aria-label": "Copy code" }, icon("copy"), label);
  button.addEventListener("click", async () => {
    label.textContent = (await copyText(code.textContent)) ? "Copied" : "Not copied";
    setTimeout(() => (label.textContent = "Copy"), 2000);
  });
  return button;
}

/** Code gets a bar with its language and a copy button, a table a frame that scrolls. */
function decorate(fragment) {
  for (const pre of fragment.querySelectorAll("pre")) {
    const language = pre.dataset.language ?? "";
    const code = pre.querySelector("code") ?? pre;
    pre.tabIndex = 0;
    pre.setAttribute("role", "region");
    pre.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
    const frame = el("div", { class: "code", "data-language": language });
    pre.replaceWith(frame);
    frame.append(el("div", { class: "code-bar" }, el("span", {}, language || "text"), copyButton(code)), pre);
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = el("div", { class: "table", tabIndex: 0, role: "region", "aria-label": "Table" });
    table.replaceWith(frame);
    frame.append(table);
  }
  return fragment;
}

/** Whether two blocks are the same code at different lengths: then its text is changed and focus and scrolling stay. */
function growCode(before, after) {
  const same = before?.className === "code" && after?.className === "code";
  if (!same || before.dataset.language !== after.dataset.language) return false;
  before.querySelector("code").textContent = after.querySelector("code").textContent;
  return true;
}

const shown = new WeakMap();

/** Show a Markdown text in an element, changing only the blocks that differ from those it shows. */
export function showMarkdown(container, text) {
  const before = shown.get(container) ?? [];
  const after = blocks(text);
  let same = 0;
  while (same < before.length && same < after.length && before[same].html === after[same]) same += 1;
  const kept = before.slice(0, same);
  const changed = before.slice(same);
  for (const html of after.slice(same)) {
    const nodes = [...decorate(window.DOMPurify.sanitize(html, ALLOWED)).children];
    if (!nodes.length) continue; // a link's definition, say
    const old = changed.shift();
    if (old && growCode(old.nodes[0], nodes[0])) {
      kept.push({ html, nodes: old.nodes });
      continue;
    }
    const anchor = kept.at(-1)?.nodes.at(-1);
    if (anchor) anchor.after(...nodes);
    else container.prepend(...nodes);
    old?.nodes.forEach((node) => node.remove());
    kept.push({ html, nodes });
  }
  changed.forEach((old) => old.nodes.forEach((node) => node.remove()));
  shown.set(container, kept);
}
