// The line above the conversation: no network, no server, or a connection that is tried again.

import { words } from "./words.js";

const LOST_SECONDS = 0.8; // a reconnect that succeeds at once is not worth a banner

export class Banner {
  constructor(node, text) {
    this.node = node;
    this.textNode = text;
    this.isGone = false; // the server answers nothing
    this.retryAt = null; // when a lost connection is tried again
  }

  gone(isGone) {
    this.isGone = isGone;
    this.show();
  }

  /** A connection is lost and tried again in `seconds`; null when it works again. */
  lost(seconds) {
    clearTimeout(this.timer);
    clearInterval(this.clock);
    this.retryAt = seconds === null ? null : performance.now() + seconds * 1000;
    if (seconds === null) return this.show();
    if (this.node.hidden) this.timer = setTimeout(() => this.show(), LOST_SECONDS * 1000);
    else this.show();
    this.clock = setInterval(() => this.node.hidden || this.show(), 500);
    return undefined;
  }

  show() {
    const isNeeded = this.isGone || this.retryAt !== null || navigator.onLine === false;
    if (isNeeded) this.textNode.textContent = this.text();
    this.node.hidden = !isNeeded;
  }

  text() {
    if (navigator.onLine === false) return words("You are offline.");
    if (this.isGone) return words("The server does not answer. Trying again…");
    const left = Math.ceil(((this.retryAt ?? 0) - performance.now()) / 1000);
    return left > 0
      ? words("Connection lost. Trying again in {seconds} s.", { seconds: left })
      : words("Connection lost. Trying again…");
  }
}
