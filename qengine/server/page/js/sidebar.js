// The list of conversations.

import { byId, el, iconButton } from "./dom.js";
import { title } from "./conversations.js";

/** Show the conversations; `actions`: open(conversation), remove(conversation). */
export function showList(conversations, current, actions) {
  const items = conversations.map((conversation) => {
    const name = title(conversation);
    const shown = conversation.id === current.id;
    const open = el("button", { type: "button", class: "open", onclick: () => actions.open(conversation) }, name);
    if (shown) open.setAttribute("aria-current", "true");
    const remove = iconButton(`Delete: ${name}`, "delete", () => actions.remove(conversation));
    return el("li", { class: shown ? "current" : "" }, open, remove);
  });
  byId("conversations").replaceChildren(...items);
  byId("no-conversations").hidden = items.length > 0;
}
