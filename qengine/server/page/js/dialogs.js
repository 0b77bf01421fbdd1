// The two dialogs: the API key, and a question before something is deleted.

import { apiKey, getJson, setApiKey } from "./api.js";
import { byId } from "./dom.js";

/** Ask whether to go on; true if so. */
export function confirmDelete(title) {
  const dialog = byId("delete-dialog");
  byId("delete-name").textContent = `“${title}”`;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "delete"), { once: true });
  });
}

/** Ask for the API key until the server takes one or the user gives up. Resolves to true if there is a key now. */
export function askForKey() {
  const dialog = byId("key-dialog");
  const form = dialog.querySelector("form");
  const input = byId("key");
  const wrong = byId("key-wrong");
  input.value = apiKey();
  wrong.textContent = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    const submit = async (event) => {
      event.preventDefault();
      if (event.submitter?.value === "cancel") return dialog.close("cancel");
      setApiKey(input.value.trim(), byId("key-keep").checked);
      try {
        await getJson("v1/models");
        dialog.close("ok");
      } catch (error) {
        wrong.textContent = error.status === 401 ? "The server does not know this key." : error.message;
        input.setAttribute("aria-invalid", "true");
        input.focus();
      }
    };
    form.addEventListener("submit", submit);
    dialog.addEventListener(
      "close",
      () => {
        form.removeEventListener("submit", submit);
        input.removeAttribute("aria-invalid");
        input.value = "";
        resolve(dialog.returnValue === "ok");
      },
      { once: true },
    );
  });
}
