// A user's conversations on the page: the list, the conversation that is open, its address (`?c=ID`), and what other tabs and
// devices do in it. For a chat whose conversations the server keeps.
//
// What is typed and not yet accepted by the server is kept for this tab, a text a conversation: no question is lost.

import { ConversationList, titleOf } from "./conversation_list.js";
import { ConversationRoutes } from "./conversation_routes.js";
import { ServerConversation } from "./server_conversation.js";
import { words } from "./words.js";

const PARTS = ["opening", "opening-failed", "opening-words", "opening-retry"];

export class Library {
  /** `chat` gives: root, config, parts, model, show(), merge(), draft(text), announce(text). */
  constructor(chat) {
    const { conversationsUrl, headers, storageKey, source } = chat.config;
    this.chat = chat;
    this.key = storageKey;
    this.routes = new ConversationRoutes(conversationsUrl, headers);
    this.conversation = new ServerConversation(this.routes, {
      key: storageKey,
      source,
      on: { created: (conversation) => this.created(conversation) },
    });
    this.parts = Object.fromEntries(PARTS.map((name) => [name, chat.root.querySelector(`[data-ss="${name}"]`)]));
    this.list = this.makeList();
    this.title = chat.root.querySelector('[data-list="title"]');
    this.pageTitle = document.title;
    this.failure = ""; // why the open conversation could not be loaded
    this.asksLater = false; // the composer's text is asked as soon as the conversation is here
    this.mark = ""; // the state of the conversation that was loaded
    this.parts["opening-retry"].addEventListener("click", () => void this.load());
  }

  /** Whether the open conversation is not here yet: no question can follow it. */
  get isOpening() {
    return !this.conversation.isLoaded;
  }

  makeList() {
    const { root, config } = this.chat;
    return new ConversationList(root, this.routes, {
      source: config.source,
      href: (id) => (config.hasAddress ? addressOf(id) : null),
      on: {
        open: (id) => this.open(id),
        renew: () => this.chat.newChat(),
        removed: (id) => id === this.conversation.id && this.open(null, { takesFocus: false }),
        changed: ({ id }) => id === this.conversation.id && this.showTitle(),
        refreshed: () => void this.look(),
        signedOut: () => this.close(),
      },
    });
  }

  begin() {
    this.chat.parts.input.addEventListener("input", () => this.keepDraft(this.chat.parts.input.value));
    if (this.chat.config.hasAddress) window.addEventListener("popstate", () => this.open(idInAddress(), { isNew: false }));
    this.open(this.chat.config.hasAddress ? idInAddress() : this.pointed(), { isNew: false });
    void this.list.follow();
  }

  // --- opening -------------------------------------------------------------------------------------------------------

  /** Show a conversation, null for a new one. Answers that run in the old one go on. */
  open(id, { isNew = true, takesFocus = isNew } = {}) {
    if (isNew && id === this.conversation.id && !this.failure) return this.chat.focus();
    this.conversation.open(id);
    this.mark = "";
    this.asksLater = false;
    if (isNew) this.point(id, "pushState");
    this.list.current(id);
    this.chat.draft(this.draft());
    this.showTitle();
    this.showOpening("");
    this.chat.show();
    if (takesFocus) this.chat.focus();
    if (id === null) return undefined;
    return void this.load();
  }

  /** Load the open conversation: at first, again after a failure, or what is new in it. */
  async load() {
    const { id } = this.conversation;
    this.showOpening("");
    try {
      const found = await this.routes.one(id);
      if (this.conversation.id !== id) return;
      this.mark = markOf(found);
      if (this.isOpening) this.conversation.leaf = found.leaf ?? "";
      if (!(await this.conversation.load())) return;
      this.list.know(found);
      this.take(found);
    } catch (error) {
      if (this.conversation.id !== id) return;
      if (error.status === 404) return this.gone();
      console.info("conversation:", error);
      this.asksLater = false;
      if (this.isOpening) this.showOpening(words("This conversation could not be loaded."));
      else this.mark = "";
    }
  }

  take(found) {
    this.showOpening("");
    this.chat.merge();
    this.chat.useModel(found.model);
    this.showTitle();
    if (this.conversation.turns.some(({ questionId, question }) => questionId !== "" && question === this.draft())) {
      this.keepDraft(""); // it has come to the server
      this.chat.draft("");
    }
    this.chat.painted();
    if (this.asksLater) this.chat.ask(this.chat.parts.input.value);
    this.asksLater = false;
  }

  /** It was deleted, or is another user's. */
  gone() {
    this.conversation.open(null);
    this.point(null, "replaceState");
    this.list.current(null);
    this.chat.show();
    this.showTitle();
    this.showOpening(words("This conversation is not there any more."));
  }

  /** Show nothing of a user who has signed out. The address stays: after another login it opens the conversation again. */
  close() {
    if (this.conversation.id !== null) this.conversation.open(null);
    this.chat.show();
    this.showTitle();
    this.showOpening("");
    this.chat.signIn();
    const link = this.chat.parts["sign-in"].querySelector("a");
    if (link !== null && this.chat.config.hasAddress) link.href = withNext(link.href);
  }

  /** The list was loaded anew: follow what is new in the open conversation. */
  async look() {
    const { id } = this.conversation;
    if (id === null) return;
    const known = this.list.get(id);
    if (known === null || this.failure !== "" || markOf(known) !== this.mark) await this.load();
  }

  // --- what this page does -------------------------------------------------------------------------------------------

  /** The first question has made the conversation. */
  created(conversation) {
    this.point(conversation.id, "replaceState");
    this.keepDraft(this.draft(null), conversation.id);
    this.keepDraft("", null);
    this.list.current(conversation.id);
  }

  /** The conversation is still loading: its next question waits for it in the composer. */
  askLater() {
    this.asksLater = this.failure === "";
  }

  asked(question) {
    this.keepDraft(question);
  }

  /** An answer of the open conversation has begun, or ended. */
  changed({ isAccepted, isLive }) {
    if (isAccepted) this.keepDraft("");
    if (!isLive && this.conversation.id !== null) this.list.ended(this.conversation.id);
    void this.list.refresh();
    this.list.tell();
  }

  // --- drafts --------------------------------------------------------------------------------------------------------

  draft(id = this.conversation.id) {
    return stored(() => sessionStorage.getItem(this.draftName(id))) ?? "";
  }

  keepDraft(text, id = this.conversation.id) {
    stored(() => (text === "" ? sessionStorage.removeItem(this.draftName(id)) : sessionStorage.setItem(this.draftName(id), text)));
  }

  draftName(id) {
    return `${this.key}/draft/${id ?? "new"}`;
  }

  // --- where the page is ---------------------------------------------------------------------------------------------

  /** What this page, or this tab, opens again. */
  point(id, how) {
    if (this.chat.config.hasAddress) return history[how](null, "", addressOf(id));
    for (const storage of ["sessionStorage", "localStorage"]) {
      stored(() => (id === null ? window[storage].removeItem(this.key) : window[storage].setItem(this.key, id)));
    }
    return undefined;
  }

  pointed() {
    const id = stored(() => sessionStorage.getItem(this.key)) ?? stored(() => localStorage.getItem(this.key));
    return idIn(id);
  }

  // --- drawing -------------------------------------------------------------------------------------------------------

  showTitle() {
    const { id } = this.conversation;
    const known = id === null ? null : this.list.get(id);
    const title = known === null ? "" : titleOf(known);
    if (this.title !== null) this.title.textContent = title;
    if (this.chat.config.hasAddress) document.title = title === "" ? this.pageTitle : `${title} · ${this.pageTitle}`;
  }

  /** Show grey lines until the conversation is loaded, or why it is not. */
  showOpening(failure) {
    this.failure = failure;
    this.parts.opening.hidden = !this.isOpening || failure !== "";
    this.parts["opening-failed"].hidden = failure === "";
    this.parts["opening-words"].textContent = failure;
    this.parts["opening-retry"].hidden = !this.isOpening;
    this.chat.showEmpty();
  }
}

function markOf({ updated, leaf, running }) {
  return `${updated}/${leaf}/${running}`;
}

function addressOf(id) {
  const url = new URL(window.location.href);
  if (id === null) url.searchParams.delete("c");
  else url.searchParams.set("c", id);
  return `${url.pathname}${url.search}`;
}

/** The address of the login, leading back to what this page shows. */
function withNext(href) {
  const url = new URL(href);
  url.searchParams.set("next", `${window.location.pathname}${window.location.search}`); // Django's REDIRECT_FIELD_NAME
  return url.href;
}

function idInAddress() {
  return idIn(new URL(window.location.href).searchParams.get("c"));
}

function idIn(text) {
  return /^[0-9a-f]{32}$/.test(text ?? "") ? text : null;
}

/** What the browser's storage gives; null where it is forbidden or full. */
function stored(use) {
  try {
    return use() ?? null;
  } catch {
    return null;
  }
}
