// The list of a user's conversations: beside the chat where there is room, else a drawer over it. Search, groups by age, more
// pages on scrolling; open, rename, pin, share, delete with undo, by mouse, touch, or keyboard alone.
//
// It follows the server: at once when the page is looked at again or another tab of this browser has changed something,
// else by a conditional request now and then while the page is visible. Knows no messages: chat.js opens conversations.

import { ConversationIndex, groupsOf } from "./conversation_index.js";
import { ListMenu } from "./list_menu.js";
import { copyText, element } from "./render.js";
import { Backoff, Sleep } from "./client.js";
import { pageLanguage, words } from "./words.js";

const PAGE = 40;
const SEARCH_SECONDS = 0.25; // after the last key
const POLL_SECONDS = 15;
const RUNNING_POLL_SECONDS = 5; // while an answer runs elsewhere
const UNDO_SECONDS = 20;
const CLOSED = "streamserve.list"; // in the storage of this browser: "closed" where the list beside the chat is hidden
const PARTS = [
  "nav", "close", "new", "search", "scroll", "groups", "loading", "words", "failed", "retry", "toast", "toast-words", "undo",
  "backdrop",
];

export class ConversationList {
  /**
   * `on.open(id)`, `on.renew()`, `on.removed(id)`, `on.changed(conversation)`, `on.refreshed()`, `on.signedOut()`; `href(id)`
   * is the address of a conversation, null where it has none.
   */
  constructor(root, routes, { source, on, href }) {
    this.root = root;
    this.routes = routes;
    this.source = source;
    this.on = on;
    this.href = href;
    this.parts = Object.fromEntries(PARTS.map((name) => [name, root.querySelector(`[data-list="${name}"]`)]));
    this.all = new ConversationIndex();
    /** @type {ConversationIndex | null} */
    this.found = null; // of a search
    this.query = "";
    this.currentId = null;
    this.news = new Set(); // ids of conversations whose answer has ended while another was open
    this.isLoading = false; // a further page
    this.isLoaded = false; // the first page has come
    this.isWanted = false;
    this.refreshes = 0;
    /** @type {(() => Promise<void>) | null} */
    this.undoing = null; // undoes what the line below the list says
    this.sleep = new Sleep();
    this.backoff = new Backoff({ first: POLL_SECONDS, most: 120 });
    this.channel = new BroadcastChannel("streamserve.conversations");
    this.menu = new ListMenu(root, {
      rename: (id) => this.rename(id),
      pin: (id) => void this.pin(id),
      share: (id) => void this.share(id),
      remove: (id) => void this.remove(id),
      exportUrl: (id) => routes.exportUrl(id),
      closed: () => this.draw(),
    });
    this.listen();
    this.fold(remembered());
  }

  /** The list that is shown. */
  get index() {
    return this.found ?? this.all;
  }

  get(id) {
    return this.all.get(id) ?? this.found?.get(id) ?? null;
  }

  // --- following the server ------------------------------------------------------------------------------------------

  /** Never ends. */
  async follow() {
    for (;;) {
      this.isWanted = false;
      const isHeard = !document.hidden && (await this.refresh());
      if (isHeard && this.isWanted) continue; // something has changed meanwhile
      const isRunning = [...this.all.known.values()].some(({ running }) => running);
      const seconds = isRunning ? RUNNING_POLL_SECONDS : POLL_SECONDS;
      await this.sleep.wait(isHeard || document.hidden ? seconds : this.backoff.nextSeconds());
    }
  }

  page(asked) {
    return this.routes.list({ limit: PAGE, source: this.source, ...asked });
  }

  /** Load the first page anew. Resolves to whether the server has answered. */
  async refresh() {
    const number = (this.refreshes += 1);
    try {
      const { conversations, has_more: hasMore } = await this.page({});
      if (number !== this.refreshes) return true; // a later answer knows more
      for (const { id, running } of conversations) {
        if (this.all.get(id)?.running && !running && id !== this.currentId) this.news.add(id);
      }
      this.all.takeFirst(conversations, hasMore);
      this.isLoaded = true;
      this.backoff.reset();
      this.parts.failed.hidden = true;
      this.draw();
      this.on.refreshed();
      return true;
    } catch (error) {
      this.fail(error, this.isLoaded);
      return false;
    }
  }

  /** An answer has ended before the reader's eyes: it is no news. */
  ended(id) {
    const known = this.get(id);
    if (known !== null) this.know({ ...known, running: false });
  }

  /** Take a conversation that was opened by its address. */
  know(conversation) {
    this.all.put(conversation);
    this.draw();
  }

  /** Other tabs of this browser look at once. */
  tell() {
    this.channel.postMessage("changed");
  }

  async more() {
    const { index } = this;
    if (this.isLoading || !index.hasMore || index.cursor === null) return;
    this.isLoading = true;
    try {
      const { conversations, has_more: hasMore } = await this.page({ after: index.cursor, q: this.query });
      index.takeNext(conversations, hasMore);
    } catch (error) {
      this.fail(error);
    } finally {
      this.isLoading = false;
      this.draw();
    }
  }

  async search() {
    const query = this.parts.search.value.trim();
    if (query === this.query) return;
    this.query = query;
    if (query === "") this.found = null;
    else {
      const found = new ConversationIndex();
      try {
        const { conversations, has_more: hasMore } = await this.page({ q: query });
        found.takeFirst(conversations, hasMore);
      } catch (error) {
        if (this.query === query) this.fail(error);
        return;
      }
      if (this.query !== query) return; // typed on meanwhile
      this.found = found;
      this.parts.failed.hidden = true;
    }
    this.parts.scroll.scrollTop = 0;
    this.draw();
  }

  /** A list that is there stays, and is asked for again. */
  fail(error, isSilent = false) {
    if (error.status === 401) return this.signedOut();
    console.info("conversations:", error);
    if (isSilent) return undefined;
    this.parts.loading.hidden = true;
    this.parts.failed.hidden = false;
    return undefined;
  }

  /** The session has ended, perhaps by a logout in another tab: nothing of the user's is shown any more. */
  signedOut() {
    this.all = new ConversationIndex();
    this.all.takeFirst([], false);
    this.found = null;
    this.query = "";
    this.parts.search.value = "";
    this.hideToast();
    this.draw();
    this.on.signedOut();
  }

  // --- changing a conversation ---------------------------------------------------------------------------------------

  current(id) {
    this.currentId = id;
    this.news.delete(id);
    this.draw();
  }

  /** Change it here at once; a refusal takes that back. */
  async change(id, fields) {
    const before = this.get(id);
    if (before === null) return;
    this.take({ ...before, ...fields });
    try {
      this.take(await this.routes.change(id, fields));
      void this.refresh(); // a list that was under way may be older
      this.tell();
    } catch (error) {
      this.take(before);
      this.complain(error);
    }
  }

  complain(error) {
    this.toast(error instanceof TypeError ? words("The server could not be reached.") : error.message);
  }

  /** Make a link to the branch shown, and copy it. */
  async share(id) {
    try {
      const { id: shareId, url } = await this.routes.share(id);
      const address = new URL(url, location.href).href;
      const isCopied = await copyText(address);
      const said = isCopied
        ? words("The link is copied. Whoever has it reads this conversation as it is now.")
        : words("Whoever has this link reads this conversation as it is now: {url}", { url: address });
      this.toast(said, async () => {
        await this.routes.unshare(id, shareId);
        this.toast(words("The link does not work any more."));
      });
    } catch (error) {
      this.complain(error);
    }
  }

  take(conversation) {
    this.all.put(conversation);
    if (this.found?.get(conversation.id)) this.found.put(conversation);
    this.draw();
    this.on.changed(conversation);
  }

  pin(id) {
    return this.change(id, { pinned: !this.get(id).pinned });
  }

  rename(id) {
    const item = this.itemOf(id);
    if (item === null) return;
    const link = item.querySelector(".ss-item-link");
    const before = this.get(id).title;
    const input = element("input", { class: "ss-item-input", dir: "auto", maxlength: "200", "aria-label": words("Title") });
    input.value = before;
    let isOver = false;
    const end = (isKept, hasFocus) => {
      if (isOver) return;
      isOver = true;
      this.renaming = null;
      this.drawn = ""; // it may differ from the list under the field
      input.replaceWith(link);
      const title = input.value.trim();
      if (isKept && title !== "" && title !== before) void this.change(id, { title });
      else this.draw();
      if (hasFocus) this.focusItem(id);
    };
    input.addEventListener("keydown", (event) => {
      event.stopPropagation(); // arrows and Escape are this field's
      if (event.isComposing || event.keyCode === 229 || !["Enter", "Escape"].includes(event.key)) return;
      event.preventDefault();
      end(event.key === "Enter", true);
    });
    input.addEventListener("blur", () => end(true, false));
    this.renaming = id;
    link.replaceWith(input);
    input.focus();
    input.select();
  }

  async remove(id) {
    const conversation = this.get(id);
    if (conversation === null) return;
    const ids = this.index.shown.map((one) => one.id);
    const next = ids[ids.indexOf(id) + 1] ?? ids[ids.indexOf(id) - 1];
    const hadFocus = this.parts.nav.contains(document.activeElement);
    this.all.remove(id);
    this.found?.remove(id);
    this.draw();
    if (hadFocus) this.focusItem(next);
    const wasOpen = id === this.currentId;
    try {
      await this.routes.remove(id);
    } catch (error) {
      if (error.status !== 404) {
        this.take(conversation);
        return this.complain(error);
      }
    }
    this.toast(words("“{title}” is deleted.", { title: titleOf(conversation) }), () => this.restore(conversation, wasOpen));
    void this.refresh();
    this.tell();
    return this.on.removed(id);
  }

  async restore(conversation, wasOpen) {
    this.take(await this.routes.change(conversation.id, { deleted: false }));
    this.tell();
    if (wasOpen) this.on.open(conversation.id);
    this.focusItem(conversation.id);
  }

  async undo() {
    const undo = this.undoing;
    this.hideToast();
    try {
      await undo?.();
    } catch (error) {
      this.complain(error);
    }
  }

  /** Show a line below the list, and the way to undo what it says. */
  toast(text, /** @type {(() => Promise<void>) | null} */ undo = null) {
    this.undoing = undo;
    this.parts["toast-words"].textContent = text;
    this.parts.undo.hidden = undo === null;
    this.parts.toast.hidden = false;
    this.waitToast();
  }

  /** It stays as long as it is pointed at or has the focus. */
  waitToast() {
    clearTimeout(this.toastTimer);
    this.toastTimer = setTimeout(() => {
      if (this.parts.toast.matches(":hover, :focus-within")) this.waitToast();
      else this.hideToast();
    }, UNDO_SECONDS * 1000);
  }

  hideToast() {
    const hadFocus = this.parts.toast.contains(document.activeElement);
    this.parts.toast.hidden = true;
    this.undoing = null;
    if (hadFocus) this.focusItem(this.currentId);
  }

  // --- drawing -------------------------------------------------------------------------------------------------------

  /** Draw the list anew where it differs, but not under an open menu or a title that is being changed. */
  draw() {
    if (this.renaming != null || this.menu.isOpen) return;
    const { shown, hasMore, end } = this.index;
    const drawn = JSON.stringify([shown, hasMore, this.currentId, [...this.news], this.query, new Date().toDateString()]);
    if (drawn !== this.drawn) this.drawItems(shown);
    this.drawn = drawn;
    this.parts.loading.hidden = !hasMore || (end === null && !this.parts.failed.hidden);
    this.parts.words.hidden = shown.length > 0 || hasMore;
    this.parts.words.textContent =
      this.found === null ? words("Your conversations will be here.") : words("Nothing has “{query}” in it.", { query: this.query });
    this.root.classList.toggle("has-running", shown.some(({ id, running }) => running && id !== this.currentId));
    this.fill();
  }

  /** The focus stays on its conversation. */
  drawItems(shown) {
    const focused = /** @type {HTMLElement | null} */ (document.activeElement);
    const focusedId = focused?.closest(".ss-item")?.getAttribute("data-id");
    const isMore = focused?.matches(".ss-item-more");
    const groups = this.found === null ? groupsOf(shown) : [{ name: "", conversations: shown }];
    this.parts.groups.replaceChildren(...groups.map((group) => this.groupNode(group)));
    this.enter(focusedId ?? this.currentId);
    if (focusedId != null) this.focusItem(focusedId, isMore ? ".ss-item-more" : undefined);
  }

  groupNode({ name, conversations }) {
    const list = element("ul", {}, ...conversations.map((one) => this.itemNode(one)));
    if (name === "") return element("section", { "aria-label": words("Found") }, list);
    const heading = element("h2", {}, groupWords(name));
    return element("section", {}, heading, list);
  }

  itemNode(conversation) {
    const { id, running } = conversation;
    const title = titleOf(conversation);
    const href = this.href(id);
    const link = element(href === null ? "button" : "a", { class: "ss-item-link", tabindex: "-1", title });
    if (href === null) link.setAttribute("type", "button");
    else link.setAttribute("href", href);
    link.append(element("span", { class: "ss-item-title", dir: "auto" }, title));
    if (running) link.append(element("span", { class: "ss-sr" }, `, ${words("is being answered")}`));
    else if (this.news.has(id)) link.append(element("span", { class: "ss-sr" }, `, ${words("Answer complete")}`));
    if (id === this.currentId) link.setAttribute("aria-current", "page");
    const label = words("Options of “{title}”", { title });
    const more = element("button", { type: "button", class: "ss-item-more", tabindex: "-1", "aria-haspopup": "menu", "aria-label": label }, "⋯");
    const item = element("li", { class: "ss-item", "data-id": id }, link, more);
    item.classList.toggle("is-current", id === this.currentId);
    item.classList.toggle("is-running", running);
    item.classList.toggle("has-news", !running && this.news.has(id));
    return item;
  }

  itemOf(id) {
    return [...this.parts.groups.querySelectorAll(".ss-item")].find((item) => item.getAttribute("data-id") === id) ?? null;
  }

  /** Load on until the list is longer than what is seen of it. */
  fill() {
    const { scroll } = this.parts;
    if (scroll.clientHeight > 0 && scroll.scrollHeight - scroll.scrollTop < 2 * scroll.clientHeight) void this.more();
  }

  // --- the focus -----------------------------------------------------------------------------------------------------

  /** Tab enters the list at this conversation, or at its first. */
  enter(id) {
    const items = [...this.parts.groups.querySelectorAll(".ss-item")];
    const entry = items.find((item) => item.getAttribute("data-id") === id) ?? items[0];
    for (const item of items) {
      for (const node of item.children) node.setAttribute("tabindex", item === entry ? "0" : "-1");
    }
  }

  focusItem(id, what = ".ss-item-link") {
    this.enter(id);
    const item = this.itemOf(id) ?? this.parts.groups.querySelector(".ss-item");
    const node = item?.querySelector(what);
    if (node instanceof HTMLElement) node.focus();
    else this.parts.search.focus();
  }

  // --- beside the chat, or over it -----------------------------------------------------------------------------------

  /** Whether the list lies over the chat: the style sheet decides, by the room there is. */
  get isDrawer() {
    return getComputedStyle(this.parts.nav).position === "absolute";
  }

  get isOpen() {
    return this.root.classList.contains("is-list-open") || (!this.isDrawer && !this.root.classList.contains("has-list-closed"));
  }

  toggle() {
    if (this.isOpen) return this.close();
    this.root.classList.remove("has-list-closed");
    if (!this.isDrawer) remember("open");
    this.root.classList.toggle("is-list-open", this.isDrawer);
    this.show();
    if (this.isDrawer && this.index.shown.length > 0) this.focusItem(this.currentId ?? this.index.shown[0].id);
    else this.parts.close.focus(); // and not the search, which brings a phone's keyboard
    void this.refresh();
    return undefined;
  }

  close() {
    const hadFocus = this.parts.nav.contains(document.activeElement);
    if (this.isDrawer) this.root.classList.remove("is-list-open");
    else this.fold("closed");
    this.show();
    if (hadFocus) this.root.querySelector('[data-list="toggle"]').focus();
  }

  fold(state) {
    this.root.classList.toggle("has-list-closed", state === "closed");
    remember(state);
    this.show();
  }

  /** What is not reachable with the eyes is not with Tab. */
  show() {
    const isOver = this.isDrawer && this.isOpen;
    if (!this.isDrawer) this.root.classList.remove("is-list-open");
    this.parts.backdrop.hidden = !isOver;
    this.root.querySelector(".ss-main").toggleAttribute("inert", isOver);
    this.parts.nav.toggleAttribute("inert", !this.isOpen);
    this.root.querySelector('[data-list="toggle"]').setAttribute("aria-expanded", String(this.isOpen));
    this.fill();
  }

  // --- listening -----------------------------------------------------------------------------------------------------

  listen() {
    const { nav, search, scroll, groups, backdrop } = this.parts;
    this.root.querySelector('[data-list="toggle"]').addEventListener("click", () => this.toggle());
    this.parts.close.addEventListener("click", () => this.close());
    backdrop.addEventListener("click", () => this.close());
    for (const button of this.root.querySelectorAll('[data-list="new"], [data-list="new-small"]')) {
      button.addEventListener("click", () => this.open(null));
    }
    search.addEventListener("input", () => {
      clearTimeout(this.searchTimer);
      this.searchTimer = setTimeout(() => void this.search(), SEARCH_SECONDS * 1000);
    });
    scroll.addEventListener("scroll", () => this.fill(), { passive: true });
    groups.addEventListener("click", (event) => this.click(event));
    nav.addEventListener("keydown", (event) => this.key(event));
    this.parts.undo.addEventListener("click", () => void this.undo());
    this.parts.retry.addEventListener("click", () => {
      this.parts.failed.hidden = true;
      this.parts.loading.hidden = false;
      this.sleep.wake();
    });
    new ResizeObserver(() => this.show()).observe(this.root);
    this.channel.addEventListener("message", () => this.look());
    document.addEventListener("visibilitychange", () => this.look());
    for (const name of ["focus", "online", "pageshow"]) window.addEventListener(name, () => this.look());
  }

  look() {
    if (document.hidden) return;
    this.isWanted = true;
    this.sleep.wake();
  }

  click(event) {
    if (event.target.closest(".ss-item-more")) {
      return this.onItem(event, (id) => this.menu.open(this.get(id), event.target.closest(".ss-item-more")));
    }
    if (!event.target.closest(".ss-item-link")) return undefined;
    if (event.ctrlKey || event.metaKey || event.shiftKey || event.button !== 0) return undefined; // the browser opens a tab
    event.preventDefault();
    return this.onItem(event, (id) => this.open(id));
  }

  onItem(event, act) {
    const id = event.target.closest(".ss-item")?.getAttribute("data-id");
    if (id != null) act(id);
  }

  open(id) {
    if (this.isDrawer) {
      this.root.classList.remove("is-list-open");
      this.show();
    }
    if (id === null) this.on.renew();
    else this.on.open(id);
  }

  key(event) {
    if (event.isComposing) return;
    const act = this.keys(event)[event.key];
    if (act === undefined) return;
    event.preventDefault();
    event.stopPropagation(); // Escape would stop an answer, or close a floating chat
    act();
  }

  /** What the keys do where the focus is. */
  keys(event) {
    const item = event.target.closest(".ss-item");
    const id = item?.getAttribute("data-id");
    const inSearch = event.target === this.parts.search;
    const out = {};
    if (inSearch && event.target.value !== "") out.Escape = () => this.clearSearch();
    else if (this.isDrawer) out.Escape = () => this.close();
    if (inSearch) out.ArrowDown = () => this.focusItem(this.index.shown[0]?.id);
    if ((event.ctrlKey || event.metaKey) && !inSearch && this.undoing !== null) out.z = () => void this.undo();
    if (item == null || event.ctrlKey || event.metaKey || event.altKey) return out;
    const ids = this.index.shown.map((one) => one.id);
    const at = ids.indexOf(id);
    const rtl = getComputedStyle(item).direction === "rtl";
    const isMore = event.target.matches(".ss-item-more");
    const [forward, back] = rtl ? ["ArrowLeft", "ArrowRight"] : ["ArrowRight", "ArrowLeft"];
    return {
      ...out,
      ArrowDown: () => (at + 1 < ids.length ? this.focusItem(ids[at + 1]) : void this.more()),
      ArrowUp: () => (at > 0 ? this.focusItem(ids[at - 1]) : this.parts.search.focus()),
      Home: () => this.focusItem(ids[0]),
      End: () => this.focusItem(ids.at(-1)),
      [forward]: () => this.focusItem(id, ".ss-item-more"),
      [back]: () => this.focusItem(id),
      F2: () => this.rename(id),
      Delete: () => void this.remove(id),
      ...(isMore && { ArrowDown: () => this.menu.open(this.get(id), event.target) }),
    };
  }

  clearSearch() {
    this.parts.search.value = "";
    void this.search();
  }
}

export function titleOf({ title }) {
  return title || words("New chat");
}

function groupWords(name) {
  if (name === "pinned") return words("Pinned");
  if (name === "today") return words("Today");
  if (name === "yesterday") return words("Yesterday");
  if (name === "week") return words("Last 7 days");
  if (name === "month") return words("Last 30 days");
  return new Date(name).toLocaleDateString(pageLanguage(), { month: "long", year: "numeric" });
}

function remembered() {
  try {
    return localStorage.getItem(CLOSED) ?? "open";
  } catch {
    return "open"; // forbidden
  }
}

function remember(state) {
  try {
    if (state === "closed") localStorage.setItem(CLOSED, state);
    else localStorage.removeItem(CLOSED);
  } catch {
    // forbidden: the next page shows the list
  }
}
