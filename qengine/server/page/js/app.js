// Puts the page together: which conversation is shown, which model answers, and what the buttons do.

import { announce } from "./announce.js";
import { apiKey, getJson, setApiKey } from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import * as tree from "./conversations.js";
import { askForKey, confirmDelete } from "./dialogs.js";
import { byId, el } from "./dom.js";
import { Live } from "./live.js";
import { Panels } from "./panels.js";
import { Settings } from "./settings.js";
import { showList } from "./sidebar.js";
import { load, onChange, save } from "./storage.js";
import { Thread } from "./thread.js";

const CURRENT = "current";
const STATES = { ready: "Ready", unhealthy: "Not healthy", key: "API key needed", gone: "No answer" };
const THEMES = { auto: "as the system", light: "light", dark: "dark" };

class App {
  constructor() {
    this.conversations = tree.loadConversations();
    this.current = this.conversations.find((item) => item.id === load(CURRENT)) ?? tree.newConversation();
    this.panels = new Panels();
    this.settings = new Settings(byId("settings-fields"));
    this.thread = new Thread(this.settings, this.#threadActions());
    const keep = (conversation) => this.#keep(conversation);
    this.chat = new Chat({ settings: this.settings, model: () => byId("model").value, thread: this.thread, keep });
    this.composer = new Composer({
      send: (text) => this.send(text),
      stop: () => this.chat.stop(this.current),
      editLast: () => this.thread.editLast(),
    });
    this.#wire();
    this.open(this.current);
    this.live = new Live((state, stats) => this.#serverState(state, stats));
    this.#loadModels();
  }

  #threadActions() {
    // What is to run takes the place of an answer that is under way.
    const run = (start) => {
      if (!this.#allowed()) return false;
      const { current } = this;
      const begin = () => {
        start(current);
        this.composer.focus();
      };
      if (this.chat.running(current)) this.chat.stop(current).then(begin);
      else begin();
      return true;
    };
    return {
      send: (text) => this.send(text),
      answer: (node) => run((conversation) => this.chat.answer(conversation, node)),
      edit: (node, text) => run((conversation) => this.chat.edit(conversation, node, text)),
      regenerate: (node) => run((conversation) => this.chat.regenerate(conversation, node)),
      resume: (node) => run((conversation) => this.chat.resume(conversation, node)),
      show: (node) => {
        tree.choose(this.current, node);
        this.#keep(this.current);
        this.thread.showVersion(node);
      },
      key: async (then) => (await this.#key()) && then(),
      fresh: () => this.fresh(),
      settings: (field) => {
        this.panels.openTab("settings");
        this.settings.focus(field ?? "max_tokens");
      },
      state: () => this.composer.setRunning(this.chat.running(this.current)),
    };
  }

  #wire() {
    byId("new").addEventListener("click", () => this.fresh());
    byId("change-key").addEventListener("click", () => this.#key());
    byId("forget-key").addEventListener("click", () => {
      setApiKey("");
      this.#showKey();
      announce("The API key is forgotten.");
    });
    byId("theme").addEventListener("click", () => this.#nextTheme());
    this.#showTheme();
    this.#showKey();
    document.addEventListener("keydown", (event) => this.#escape(event));
    window.addEventListener("pagehide", () => this.#keepRunning());
    onChange((name) => this.#changedElsewhere(name));
  }

  /** Escape ends one thing: a side over the chat, the answer under way, the countdown to another try. */
  #escape(event) {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    if (this.panels.shut()) return;
    if (this.chat.running(this.current)) this.chat.stop(this.current);
    else this.thread.stopWaiting();
  }

  /** False, with the field in focus, where a setting has a value that is not allowed. */
  #allowed() {
    const wrong = this.settings.invalid();
    if (!wrong) return true;
    this.panels.openTab("settings");
    this.settings.focus(wrong);
    announce("A setting has a value that is not allowed.");
    return false;
  }

  /** Send a message; false if it was not sent. */
  send(text) {
    if (this.chat.running(this.current) || !this.#allowed()) return false;
    this.chat.send(this.current, text);
    this.composer.focus();
    return true;
  }

  /** Show a conversation. */
  open(conversation) {
    this.current = conversation;
    save(CURRENT, conversation.id);
    this.thread.show(conversation);
    this.composer.setRunning(this.chat.running(conversation));
    this.#list();
  }

  /** Begin a new conversation. */
  fresh() {
    this.panels.shut();
    this.open(tree.newConversation());
    this.composer.focus();
  }

  async #remove(conversation) {
    if (!(await confirmDelete(tree.title(conversation)))) return;
    this.chat.stop(conversation);
    conversation.removed = true;
    tree.forgetConversation(conversation);
    this.conversations = this.conversations.filter((item) => item !== conversation);
    if (conversation === this.current) this.open(tree.newConversation());
    else this.#list();
    byId("new").focus();
  }

  #keep(conversation) {
    if (conversation.removed) return;
    const kept = tree.keepConversation(conversation);
    byId("not-kept").hidden = kept;
    if (conversation.nodes.length && !this.conversations.includes(conversation)) this.conversations.push(conversation);
    this.conversations.sort((a, b) => b.updated - a.updated);
    this.#list();
  }

  /** Keep what answers under way have so far; other conversations are kept, and another tab may have newer ones. */
  #keepRunning() {
    this.conversations.filter((item) => this.chat.running(item)).forEach((item) => this.#keep(item));
  }

  #list() {
    document.title = this.current.nodes.length ? `${tree.title(this.current)} · qengine` : "qengine";
    const open = (conversation) => {
      this.open(conversation);
      if (!this.panels.shut()) this.composer.focus();
    };
    showList(this.conversations, this.current, { open, remove: (conversation) => this.#remove(conversation) });
  }

  /** Another tab changed or deleted a conversation. */
  #changedElsewhere(name) {
    if (!tree.isConversationName(name) || this.chat.runs.size) return;
    this.conversations = tree.loadConversations();
    const same = this.conversations.find((item) => item.id === this.current.id);
    if (same) this.open(same);
    else this.#list();
  }

  /** Ask for the models' names; a server that wants a key for that has the key dialog opened, once. */
  async #loadModels() {
    if (this.loadingModels) return;
    this.loadingModels = true;
    try {
      const { data } = await getJson("v1/models");
      const before = byId("model").value;
      byId("model").replaceChildren(...data.map(({ id }) => el("option", { value: id }, id.split("/").at(-1))));
      if (data.some(({ id }) => id === before)) byId("model").value = before;
      byId("model-name").textContent = byId("model").selectedOptions[0].textContent;
      byId("model").hidden = data.length < 2;
      byId("model-name").hidden = data.length > 1;
      this.modelsKnown = true;
    } catch (error) {
      if (error.status === 401 && !this.askedForKey) {
        this.askedForKey = true;
        this.#key();
      }
    }
    this.loadingModels = false;
  }

  async #key() {
    const taken = await askForKey();
    this.#showKey();
    if (taken) {
      this.live.poll();
      this.#loadModels();
    }
    return taken;
  }

  #showKey() {
    byId("key-state").textContent = apiKey() ? "A key is set." : "No key is set.";
    byId("forget-key").hidden = !apiKey();
  }

  #serverState(state, stats) {
    if (state === "gone") this.modelsKnown = false; // what is started next may serve another model
    if (state === "ready" && !this.modelsKnown) this.#loadModels();
    byId("status").dataset.state = state;
    if (byId("status-text").textContent !== STATES[state]) byId("status-text").textContent = STATES[state];
    if (stats?.gpu?.name) byId("device").textContent = stats.gpu.name;
  }

  #nextTheme() {
    const all = Object.keys(THEMES);
    window.qengineTheme.set(all[(all.indexOf(window.qengineTheme.choice) + 1) % all.length]);
    this.#showTheme();
    announce(`Colors: ${THEMES[window.qengineTheme.choice]}`);
  }

  #showTheme() {
    const { choice } = window.qengineTheme;
    const label = `Colors: ${THEMES[choice]}. Change`;
    byId("theme").setAttribute("aria-label", label);
    byId("theme").title = label;
    byId("theme").querySelector("use").setAttribute("href", `#icon-${choice}`);
  }
}

window.qengine = new App();
