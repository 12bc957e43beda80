// One answer's stream: started once, then followed through reloads, lost networks and suspended laptops.
// Only the GET is retried: sending a question twice would run the model twice.
// Knows events and connections; no DOM.

import { Acks } from "./acks.js";
import { ReaderTimes, reportTimings } from "./reader_times.js";
import { readEvents } from "./sse.js";
import { words } from "./words.js";

const BACKOFF_SECONDS = { first: 0.5, most: 15 };
// Silence of two and a half keepalives means a dead connection, even if the browser has not noticed.
const STALL_KEEPALIVES = 2.5;
// Statuses after which a retry may succeed a moment later.
const TRY_LATER = new Set([408, 425, 429, 500, 502, 503, 504]);

/** The server refused the request. */
export class RequestFailed extends Error {
  /**
   * @param {string} message
   * @param {{status?: number, code?: string, retryAfterSeconds?: number | null}} details
   */
  constructor(message, { status = 0, code = "", retryAfterSeconds = null } = {}) {
    super(message);
    this.name = "RequestFailed";
    this.status = status;
    this.code = code;
    this.retryAfterSeconds = retryAfterSeconds;
  }

  static async from(response) {
    const body = await response.json().catch(() => ({}));
    const error = body && typeof body.error === "object" && body.error !== null ? body.error : {};
    const retryAfter = Number.parseInt(response.headers.get("Retry-After") ?? "", 10);
    return new RequestFailed(String(error.message ?? words("The server answered {status}.", { status: response.status })), {
      status: response.status,
      code: String(error.code ?? ""),
      retryAfterSeconds: Number.isFinite(retryAfter) ? Math.max(1, retryAfter) : null,
    });
  }
}

/** Full jitter: clients that lose a server together do not reconnect together. */
export class Backoff {
  constructor({ first, most } = BACKOFF_SECONDS, random = Math.random) {
    this.first = first;
    this.most = most;
    this.random = random;
    this.attempt = 0;
  }

  reset() {
    this.attempt = 0;
  }

  nextSeconds() {
    const ceiling = Math.min(this.most, this.first * 2 ** this.attempt);
    this.attempt += 1;
    return this.first / 2 + this.random() * (ceiling - this.first / 2);
  }
}

/** A wait that `wake()` ends early. */
export class Sleep {
  wait(seconds) {
    return new Promise((/** @type {(value?: void) => void} */ resolve) => {
      const timer = setTimeout(resolve, seconds * 1000);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  wake() {}
}

/** A timer that any byte pushes back. */
export class Watchdog {
  constructor(seconds, onSilence) {
    this.seconds = seconds;
    this.onSilence = onSilence;
    this.fedAt = 0;
    this.feed();
  }

  feed() {
    clearTimeout(this.timer);
    this.fedAt = performance.now();
    this.timer = setTimeout(this.onSilence, this.seconds * 1000);
  }

  end() {
    clearTimeout(this.timer);
  }
}

export class AnswerStream {
  /**
   * `start` and `resume` yield the events, `{type, seq, id, data}`. Meanwhile `on.started(streamId, headers)`,
   * `on.connected()`, `on.lost(secondsUntilRetry)`. `headers()` gives what a POST needs (the CSRF token).
   */
  constructor({ streamsUrl, headers, keepaliveSeconds = 15, on }) {
    this.streamsUrl = streamsUrl;
    this.headers = headers;
    this.keepaliveSeconds = keepaliveSeconds;
    this.on = on;
    this.streamId = null;
    this.lastId = "";
    this.seq = 0;
    this.isClosed = false;
    this.isFinished = false;
    /** @type {number | null} */
    this.retrySeconds = null; // set by a `farewell` event: when to reconnect
    this.backoff = new Backoff();
    this.sleep = new Sleep();
    this.abort = new AbortController();
    /** @type {Watchdog | null} */
    this.watchdog = null;
    this.heardAt = -Infinity; // when the last byte came
    this.isHeld = false; // by who reads it: an event is being shown, and nothing is read meanwhile
    this.times = new ReaderTimes(); // of an answer that is asked for here
    this.isReported = false;
    this.acks = new Acks((ack) => this.acknowledge(ack));
  }

  /**
   * Send the question, and yield the events to the terminal event. Throws `RequestFailed`, or `TypeError` without a response.
   * Sent again with the same `key`, it is answered once (Idempotency-Key). `url`: another address that starts answers.
   */
  async *start(request, key, url = this.streamsUrl) {
    this.times.sent();
    const response = await fetch(url, {
      method: "POST",
      headers: {
        "Content-Type": "application/json",
        Accept: "text/event-stream",
        "Idempotency-Key": key,
        ...this.headers(),
      },
      body: JSON.stringify(request),
      signal: this.abort.signal,
      cache: "no-store",
    });
    if (!response.ok) {
      const refused = await RequestFailed.from(response);
      if (refused.code !== "answer_running") this.times.forget(); // else an earlier try has begun the answer
      throw refused;
    }
    this.streamId = response.headers.get("X-Stream-Id");
    if (this.streamId !== null) this.on.started(this.streamId, response.headers);
    yield* this.read(response);
    if (!this.isFinished && this.streamId === null) throw new TypeError("the connection ended");
    yield* this.follow();
  }

  /** Follow the stream `streamId` after the event `lastId` ("": from its beginning). */
  async *resume(streamId, lastId) {
    this.streamId = streamId;
    this.lastId = lastId;
    this.seq = seqOf(lastId);
    yield* this.follow();
  }

  async *follow() {
    while (!this.isFinished && !this.isClosed) {
      if (this.retrySeconds !== null) {
        const seconds = this.retrySeconds; // nothing is lost, so `on.lost` is not called
        this.retrySeconds = null;
        await this.sleep.wait(seconds);
        continue;
      }
      const seconds = yield* this.attempt();
      if (this.retrySeconds !== null || seconds === null) continue;
      this.on.lost(seconds);
      await this.sleep.wait(seconds);
    }
  }

  /** Read once, and yield what comes. Returns the seconds until the next attempt, null for none. */
  async *attempt() {
    this.abort = new AbortController();
    let response;
    try {
      this.arm();
      response = await fetch(`${this.streamsUrl}/${encodeURIComponent(this.streamId)}/events`, {
        // No Accept: text/event-stream, because the server answers that with 204 instead of 410.
        headers: { ...(this.lastId && { "Last-Event-ID": this.lastId }) },
        signal: this.abort.signal,
        cache: "no-store",
      });
    } catch {
      this.watchdog?.end();
      return this.isClosed ? null : this.backoff.nextSeconds();
    }
    if (response.status === 204) {
      this.watchdog?.end();
      throw new RequestFailed("The answer ended elsewhere.", { status: 204, code: "stream_finished" });
    }
    if (TRY_LATER.has(response.status)) {
      this.watchdog?.end();
      const failure = await RequestFailed.from(response);
      return failure.retryAfterSeconds ?? this.backoff.nextSeconds();
    }
    if (!response.ok) {
      this.watchdog?.end();
      throw await RequestFailed.from(response);
    }
    const seen = this.seq;
    const from = Number(response.headers.get("Streamserve-From") ?? seen + 1);
    if (from > seen + 1) throw new RequestFailed("A part of this answer is missing.", { code: "stream_expired" });
    yield* this.read(response);
    if (this.isFinished || this.isClosed) return null;
    if (this.seq > seen) this.backoff.reset(); // the connection worked: reconnect soon, but not in a tight loop
    return this.backoff.nextSeconds();
  }

  /** Yield the response's events until the terminal event, the end of the body, or a lost connection. */
  async *read(response) {
    this.on.connected();
    this.times.connected();
    this.arm();
    this.acks.begin(response.headers.get("Streamserve-Reader"));
    try {
      for await (const event of readEvents(response.body, () => this.heard())) {
        const taken = this.take(event);
        this.isHeld = true;
        if (taken !== null) yield taken;
        this.isHeld = false;
        if (this.isFinished) return;
      }
    } catch (error) {
      if (error instanceof SyntaxError || error instanceof RangeError) throw error; // not a network error
    } finally {
      this.isHeld = false;
      this.watchdog?.end();
      this.acks.end();
    }
  }

  /** Send an acknowledgement; return whether it counted or a later one may, null where another web process must count it. */
  async acknowledge(ack) {
    const response = await fetch(`${this.streamsUrl}/${encodeURIComponent(this.streamId)}/ack`, {
      method: "POST",
      headers: { "Content-Type": "application/json", ...this.headers() },
      body: JSON.stringify(ack),
      keepalive: true, // the request survives a page that is hidden for good
      signal: AbortSignal.timeout(this.keepaliveSeconds * 1000),
    });
    const text = await response.text();
    if (!response.ok) return TRY_LATER.has(response.status);
    return JSON.parse(text).counted === true || null;
  }

  heard() {
    this.heardAt = performance.now();
    this.times.bytes();
    this.watchdog?.feed();
  }

  /** The event with its number and its data, null for what its reader has, and for notices. */
  take({ type, data, id }) {
    if (type === "farewell") {
      this.retrySeconds = JSON.parse(data).retry / 1000;
      return null; // not an event of the log: it has no id
    }
    const seq = seqOf(id);
    // Invariant: every event is applied once. A replayed event at or below the cursor adds nothing.
    if (seq !== 0 && seq <= this.seq) return null;
    const payload = JSON.parse(data);
    if (seq !== 0) {
      this.seq = seq;
      this.lastId = id;
    }
    if ((type === "token" || type === "snapshot") && payload.text) this.times.delta();
    if (type === "done" || type === "error") {
      this.isFinished = true;
      this.times.ended();
    }
    return { type, seq, id, data: payload };
  }

  arm() {
    this.watchdog?.end();
    const { abort } = this;
    const seconds = this.keepaliveSeconds * STALL_KEEPALIVES;
    const watchdog = new Watchdog(seconds, () => (this.isHeld ? watchdog.feed() : abort.abort()));
    this.watchdog = watchdog;
  }

  /** Reconnect now instead of at the next timer: the page, the network or the server is back. */
  nudge() {
    this.sleep.wake();
    if (this.watchdog === null || this.streamId === null || this.isFinished) return;
    const silentSeconds = (performance.now() - this.watchdog.fedAt) / 1000;
    if (silentSeconds > this.keepaliveSeconds * 1.2) this.abort.abort();
  }

  /** Stop on the server, keeping what was seen. Idempotent there, so it is retried until it succeeds. */
  async stop(seenSeq) {
    this.times.stopped();
    const backoff = new Backoff();
    for (let attempt = 0; attempt < 6; attempt += 1) {
      try {
        const response = await fetch(`${this.streamsUrl}/${encodeURIComponent(this.streamId)}/stop`, {
          method: "POST",
          headers: { "Content-Type": "application/json", ...this.headers() },
          body: JSON.stringify({ seen_seq: seenSeq }),
          keepalive: true, // the request survives a closed tab
        });
        await response.text();
        if (!TRY_LATER.has(response.status)) return response.ok;
      } catch {
        // no network: the next attempt follows
      }
      await new Sleep().wait(backoff.nextSeconds());
    }
    return false;
  }

  /** Report what was seen of an answer that was asked for here. Once: what comes later is not in it. */
  report() {
    const times = this.isReported || this.streamId === null ? null : this.times.report();
    if (times === null) return;
    this.isReported = true;
    reportTimings(this.streamId, times, { streamsUrl: this.streamsUrl, headers: this.headers() });
  }

  /** Stop reading. The server parks the answer; it can be resumed. */
  close() {
    this.isClosed = true;
    this.abort.abort();
    this.sleep.wake();
  }
}

/** The number in an event id `log_id-seq`; 0 when there is none. */
export function seqOf(id) {
  const match = /-([0-9]{1,15})$/.exec(id);
  return match === null ? 0 : Number(match[1]);
}
