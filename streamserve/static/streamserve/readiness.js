// Polls /readyz until the model can answer, or sleeps and is loaded by the next question. Knows nothing of the page.

import { Backoff, Sleep } from "./client.js";

const POLL_SECONDS = 0.7;

export class Readiness {
  /** `onChange({isReady, state, message, stage, fraction, …})` after every response; `model()` returns the alias. */
  constructor({ readyUrl, model, onChange }) {
    this.readyUrl = readyUrl;
    this.model = model;
    this.onChange = onChange;
    this.isReady = false;
    this.isPolling = false;
    this.waiters = [];
    this.sleep = new Sleep();
  }

  /** Resolve once the model is ready. */
  wait() {
    if (this.isReady) return Promise.resolve();
    void this.poll();
    return new Promise((resolve) => this.waiters.push(resolve));
  }

  /** Poll again from the start, after a request was refused because the model is not ready. */
  doubt() {
    this.isReady = false;
    this.sleep.wake();
  }

  async poll() {
    if (this.isPolling) return;
    this.isPolling = true;
    const backoff = new Backoff({ first: 1, most: 10 });
    while (!this.isReady) {
      const seconds = (await this.ask()) ? POLL_SECONDS : backoff.nextSeconds();
      if (!this.isReady) await this.sleep.wait(seconds);
    }
    this.isPolling = false;
    for (const resolve of this.waiters.splice(0)) resolve();
  }

  /** Poll once. False if the server cannot be reached. */
  async ask() {
    try {
      const response = await fetch(this.readyUrl, { headers: { Accept: "application/json" }, cache: "no-store" });
      const text = await response.text();
      // A site may not serve /readyz publicly: then the first question shows whether the model answers.
      this.take([401, 403, 404].includes(response.status) ? { ready: true } : JSON.parse(text));
      return true;
    } catch {
      return false;
    }
  }

  take(body) {
    const models = Array.isArray(body.models) ? body.models : [];
    const mine = models.find(({ alias }) => alias === this.model()) ?? models[0] ?? {};
    this.isReady = ["ready", "asleep"].includes(mine.state) || (mine.state === undefined && body.ready === true);
    this.onChange({
      isReady: this.isReady,
      state: mine.state ?? (body.ready ? "ready" : "loading"),
      stage: mine.stage ?? "",
      fraction: typeof mine.fraction === "number" ? Math.min(1, Math.max(0, mine.fraction)) : null,
      message: mine.message ?? "",
      loadedBytes: mine.loaded_bytes ?? 0,
      totalBytes: mine.total_bytes ?? 0,
      elapsedSeconds: mine.elapsed_seconds ?? 0,
    });
  }
}
