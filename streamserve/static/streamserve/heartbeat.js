// Notices within three seconds that the server is gone, and that it is back. Knows an address; no DOM but the tab's visibility.
//
// Any answer counts, except a gateway's. A tab asks often only while a person uses it or waits for an answer, rarely when
// it is left alone, and never while it is hidden.

import { Sleep } from "./client.js";

const BUSY_SECONDS = 1.4;
const IDLE_SECONDS = 15;
const IN_USE_SECONDS = 60; // how long after the last key or movement a tab counts as used
const TIMEOUT_SECONDS = { first: 1.4, most: 6 }; // the first, together with BUSY_SECONDS, is less than three
const ACTIVITY = ["pointermove", "pointerdown", "keydown", "wheel", "touchstart", "focus"];

export class Heartbeat {
  /** `onChange(isGone)`; `isBusy()`: whether an answer is awaited; `heardAt()`: when the server last sent a byte, in ms. */
  constructor({ url, onChange, isBusy, heardAt }) {
    this.url = url;
    this.onChange = onChange;
    this.isBusy = isBusy;
    this.heardAt = heardAt;
    this.isGone = false;
    this.usedAt = performance.now();
    this.sleep = new Sleep();
    this.isLazy = false;
    this.timeoutSeconds = TIMEOUT_SECONDS.first;
  }

  start() {
    for (const name of ACTIVITY) window.addEventListener(name, () => this.used(), { passive: true, capture: true });
    document.addEventListener("visibilitychange", () => this.sleep.wake());
    for (const name of ["online", "offline", "pageshow"]) window.addEventListener(name, () => this.sleep.wake());
    void this.run();
  }

  used() {
    this.usedAt = performance.now();
    if (this.isLazy) this.sleep.wake();
  }

  async run() {
    for (;;) {
      this.isLazy = !this.isGone && !this.isBusy() && performance.now() - this.usedAt > IN_USE_SECONDS * 1000;
      await this.sleep.wait(document.hidden ? 3600 : this.isLazy ? IDLE_SECONDS : BUSY_SECONDS);
      if (document.hidden) continue;
      if (performance.now() - this.heardAt() < BUSY_SECONDS * 1000) this.change(false);
      else this.change(!(await this.ask()));
    }
  }

  /** Ask now: a request has failed. */
  doubt() {
    this.sleep.wake();
  }

  change(isGone) {
    if (isGone === this.isGone) return;
    this.isGone = isGone;
    this.onChange(isGone);
  }

  async ask() {
    const startedAt = performance.now();
    try {
      const signal = AbortSignal.timeout(this.timeoutSeconds * 1000);
      const response = await fetch(this.url, { cache: "no-store", signal });
      await response.text(); // an unread response stays open, and the signal aborts it
      this.allow((3 * (performance.now() - startedAt)) / 1000);
      const isOurs = (response.headers.get("Content-Type") ?? "").startsWith("application/json");
      return isOurs || ![502, 503, 504].includes(response.status);
    } catch (error) {
      if (error.name === "TimeoutError") this.allow(2 * this.timeoutSeconds); // perhaps the network is only slow
      return false;
    }
  }

  allow(seconds) {
    this.timeoutSeconds = Math.min(TIMEOUT_SECONDS.most, Math.max(TIMEOUT_SECONDS.first, seconds));
  }
}
