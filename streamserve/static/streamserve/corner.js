// The floating form of the chat: a button in the corner of the page opens it, Escape or its own button closes it.
//
// Closing stops no answer; a dot on the button tells that one has ended meanwhile. Whether the chat is open is kept for this
// tab's next page. The focus enters the chat with a click, and returns to the button; after a change of page it stays there.

import { words } from "./words.js";

export class Corner {
  /** `onToggle()` is called after the chat was opened or closed; `focus()` puts the focus where a question is typed. */
  constructor(root, storageKey, { onToggle, focus }) {
    this.root = root;
    this.key = `${storageKey}/open`;
    this.onToggle = onToggle;
    this.launch = root.parentElement.querySelector(".ss-launch");
    this.launch.hidden = false;
    this.launch.addEventListener("click", () => {
      this.show(true);
      this.root.focus({ preventScroll: true }); // for touch screens, where the question's field is not focused
      focus();
    });
    root.querySelector('[data-ss="close"]').addEventListener("click", () => this.close());
    root.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.isComposing && !event.defaultPrevented) this.close();
    });
    this.show(sessionStorage.getItem(this.key) === "true");
  }

  get isOpen() {
    return !this.root.hidden;
  }

  close() {
    this.show(false);
    this.launch.focus({ preventScroll: true });
  }

  show(isOpen) {
    this.root.hidden = !isOpen;
    this.launch.hidden = isOpen;
    this.launch.setAttribute("aria-expanded", String(isOpen));
    this.mark(false);
    sessionStorage.setItem(this.key, String(isOpen));
    this.onToggle();
  }

  /** An answer has ended. */
  ended() {
    if (!this.isOpen) this.mark(true);
  }

  mark(hasNews) {
    const label = hasNews ? `${words("Answer complete")}. ${words("Open the chat")}` : words("Open the chat");
    this.launch.classList.toggle("has-news", hasNews);
    this.launch.setAttribute("aria-label", label);
    this.launch.title = label;
  }
}
