// Which tab does what: locks that the browser drops when a tab closes or crashes. Knows names only.
//
// Web Locks need https (or localhost). Elsewhere tabs ask each other over a BroadcastChannel who holds a name: a tab that
// does not answer in time holds nothing.

const ANSWER_SECONDS = 0.3; // how long other tabs have to answer
const POLL_SECONDS = 1;

export function makeLocks() {
  return navigator.locks === undefined ? new AskedLocks() : new WebLocks(navigator.locks);
}

/** `take` and `wait` return a function that releases the lock. Releasing twice does nothing. */
class WebLocks {
  constructor(manager) {
    this.manager = manager;
  }

  /** Take the lock if it is free; null if another tab holds it. */
  take(name) {
    return this.request(name, { ifAvailable: true });
  }

  /** Take the lock as soon as its holders have left; null if `signal` aborts before. */
  wait(name, signal) {
    return this.request(name, { signal });
  }

  /** Hold a name together with other tabs: no tab can `take` it meanwhile. */
  share(name) {
    return this.request(name, { mode: "shared" });
  }

  request(name, options) {
    return new Promise((granted) => {
      const held = (lock) => {
        if (lock === null) return granted(null);
        return new Promise((release) => granted(release));
      };
      this.manager.request(name, options, held).catch(() => granted(null)); // aborted, or not permitted here
    });
  }
}

/** The same by asking the other tabs. Two tabs that take one name at the same moment may both get it. */
export class AskedLocks {
  constructor(channel = new BroadcastChannel("streamserve.locks")) {
    this.channel = channel;
    this.held = new Map(); // name → how often
    this.refusals = new Map(); // name → what to call when a holder answers
    channel.addEventListener("message", ({ data }) => this.hear(data));
  }

  hear({ ask, held }) {
    if (this.held.has(ask)) this.channel.postMessage({ held: ask });
    this.refusals.get(held)?.();
  }

  async take(name) {
    if (this.held.has(name)) return null;
    const isTaken = await new Promise((resolve) => {
      const timer = setTimeout(() => resolve(false), ANSWER_SECONDS * 1000);
      this.refusals.set(name, () => (clearTimeout(timer), resolve(true)));
      this.channel.postMessage({ ask: name });
    });
    this.refusals.delete(name);
    return isTaken ? null : this.hold(name);
  }

  async wait(name, signal) {
    while (!signal.aborted) {
      const release = await this.take(name);
      if (release !== null) return release;
      await new Promise((resolve) => setTimeout(resolve, POLL_SECONDS * 1000));
    }
    return null;
  }

  async share(name) {
    return this.hold(name);
  }

  hold(name) {
    this.held.set(name, (this.held.get(name) ?? 0) + 1);
    let isHeld = true;
    return () => {
      if (!isHeld) return;
      isHeld = false;
      const rest = this.held.get(name) - 1;
      if (rest === 0) this.held.delete(name);
      else this.held.set(name, rest);
    };
  }
}
