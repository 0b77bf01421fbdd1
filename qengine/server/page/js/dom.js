// Small helpers to build elements. Text always goes in as text; nothing here takes HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element. Properties that begin with "on" are listeners, "class" and names with a dash are attributes. */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class" || name === "role" || name === "for" || name.includes("-"))
      node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** An SVG element with attributes. */
export function svg(tag, attributes = {}) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

/** One of the icons that index.html holds; decoration, so hidden from screen readers. */
export function icon(name) {
  const image = svg("svg", { class: "icon", "aria-hidden": "true", focusable: "false" });
  image.append(svg("use", { href: `#icon-${name}` }));
  return image;
}

/** A button that is an icon with a label for screen readers and a tooltip. */
export function iconButton(label, iconName, onclick, extra = {}) {
  return el(
    "button",
    { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...extra },
    icon(iconName),
  );
}

/** A button with a text, and an icon before it if one is named. */
export function textButton(label, onclick, { iconName, kind = "plain", ...extra } = {}) {
  return el(
    "button",
    { type: "button", class: `button ${kind}`, onclick, ...extra },
    iconName ? icon(iconName) : null,
    label,
  );
}

/** The element with an id; it is in index.html, so its absence is a mistake of ours. */
export function byId(id) {
  const node = document.getElementById(id);
  if (!node) throw new Error(`index.html has no element #${id}`);
  return node;
}

/** Put a text on the clipboard; true if that worked. Plain http has no clipboard API, so the old command is used there. */
export async function copyText(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      return false;
    }
  }
  const before = document.activeElement;
  const area = el("textarea", { value: text, class: "visually-hidden", "aria-hidden": "true" });
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  before?.focus();
  return copied;
}

/** A random id of 16 hexadecimal digits (crypto.randomUUID is missing on plain http). */
export function randomId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
