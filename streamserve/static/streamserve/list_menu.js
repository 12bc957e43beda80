// The menu of a conversation in the list: rename, pin, share (where the site has links), export, delete. By mouse, or by arrows, Home, End, Enter and Escape.

import { words } from "./words.js";

const EDGE_PX = 8;

export class ListMenu {
  /** `on.rename(id)`, `on.pin(id)`, `on.share(id)`, `on.remove(id)`, and `on.exportUrl(id)` for the link; `on.closed()` after each. */
  constructor(root, on) {
    const part = (name) => root.querySelector(`[data-list="${name}"]`);
    this.node = part("menu");
    this.pinWords = part("pin-words");
    this.link = part("export");
    this.on = on;
    this.id = null;
    /** @type {HTMLElement | null} */
    this.button = null;
    part("rename").addEventListener("click", () => this.act(on.rename));
    part("pin").addEventListener("click", () => this.act(on.pin));
    part("share")?.addEventListener("click", () => this.act(on.share));
    part("delete").addEventListener("click", () => this.act(on.remove));
    this.link.addEventListener("click", () => this.close());
    this.node.addEventListener("keydown", (event) => this.key(event));
    this.node.addEventListener("toggle", ({ newState }) => newState === "closed" && this.closed());
  }

  get isOpen() {
    return this.node.matches(":popover-open");
  }

  get items() {
    return [...this.node.querySelectorAll('[role="menuitem"]')];
  }

  open(conversation, button) {
    this.id = conversation.id;
    this.button = button;
    button.setAttribute("aria-expanded", "true");
    this.pinWords.textContent = conversation.pinned ? words("Unpin") : words("Pin");
    this.link.href = this.on.exportUrl(conversation.id);
    this.node.showPopover();
    this.place(button.getBoundingClientRect());
    this.items[0].focus();
  }

  /** Below the button, or above it where there is no room. */
  place({ left, right, top, bottom }) {
    const { offsetWidth: width, offsetHeight: height } = this.node;
    const isRtl = getComputedStyle(this.node).direction === "rtl";
    const x = isRtl ? right - width : left;
    const y = bottom + height + EDGE_PX > window.innerHeight ? top - height : bottom;
    this.node.style.left = `${Math.max(EDGE_PX, Math.min(x, window.innerWidth - width - EDGE_PX))}px`;
    this.node.style.top = `${Math.max(EDGE_PX, y)}px`;
  }

  act(what) {
    const { id } = this;
    this.close();
    what(id);
  }

  close() {
    if (this.isOpen) this.node.hidePopover();
    this.button?.focus();
  }

  closed() {
    this.button?.removeAttribute("aria-expanded");
    this.on.closed();
  }

  key(event) {
    const { items } = this;
    const at = items.indexOf(/** @type {Element} */ (event.target));
    const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: -1 }[event.key];
    if (to !== undefined) items.at(to % items.length).focus();
    else if (event.key === "Escape" || event.key === "Tab") this.close();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
