// The client of streamserve for pages without a framework (docs/client.md): ask, read the answer as it comes, stop it,
// and come back to it. The chat page reads its answers by this module, too: no other module opens a stream of ours.
//
//     const answer = ask("/streams", { prompt: "How do I pause my subscription?" });
//     for await (const event of answer) paragraph.textContent = answer.text;

import { addEvent } from "./blocks.js";
import { partialJson } from "./partial_json.js";
import { afterFrame, afterPaint } from "./reader_times.js";
import { AnswerStream, Backoff, RequestFailed, Sleep } from "./stream.js";

export { addEvent } from "./blocks.js";
export { partialJson } from "./partial_json.js";
export { ReaderTimes, reportTimings } from "./reader_times.js";
export { readEvents } from "./sse.js";
export { AnswerStream, Backoff, RequestFailed, Sleep, Watchdog, seqOf } from "./stream.js";

const MAX_SENDS = 8;

/** The answer was started, and ended in an error. `isRetryable`: the same question may succeed later. */
export class AnswerFailed extends Error {
  constructor({ code = "", message = "", retryable = false }) {
    super(message);
    this.name = "AnswerFailed";
    this.code = code;
    this.isRetryable = retryable;
  }
}

/** Ask, at `where` (an address that starts answers, or all options); the question is sent when the answer is read. */
export function ask(where, body = undefined) {
  return new Answer(typeof where === "string" ? { url: where, body } : where);
}

/** Come back to an answer: all of it again, or, with `lastId`, what follows the event with that id. */
export function resume(streamId, options = {}) {
  return new Answer({ ...options, streamId });
}

/**
 * An answer as it comes: read it once, by `for await`. It grows before each event is given: `text`, `blocks`, `citations`,
 * and `partial`, the value of a structured answer. The loop ends with the answer; it throws RequestFailed, AnswerFailed,
 * or TypeError where the server cannot be reached. A lost connection is no error: the rest follows when it is back.
 */
export class Answer {
  #url;
  #body;
  #key;
  #options;
  #streamId;
  #lastId;
  #stream;
  #sleep = new Sleep();
  #isRead = false;
  #isPainting = false;

  /** @param {import("./client.js").AnswerOptions & import("./client.js").ResumeOptions & {streamId?: string}} options */
  constructor({
    url = "/streams",
    streamsUrl = streamsOf(url),
    body = undefined,
    streamId = "",
    lastId = "",
    key = newKey(),
    headers = csrfHeaders,
    keepaliveSeconds = 15,
    reportsTimings = true,
    onStarted = () => {},
    onConnection = () => {},
  }) {
    this.text = "";
    this.blocks = [];
    this.citations = [];
    this.approvals = [];
    this.status = null;
    this.done = null;
    this.isStopped = false;
    [this.#url, this.#body, this.#key, this.#streamId, this.#lastId] = [url, body, key, streamId, lastId];
    this.#options = { streamsUrl, headers, keepaliveSeconds, reportsTimings, onStarted, onConnection };
    this.#stream = new AnswerStream({
      streamsUrl,
      headers: typeof headers === "function" ? headers : () => headers,
      keepaliveSeconds,
      on: {
        started: (id) => onStarted(id),
        connected: () => onConnection({ isLost: false, seconds: 0 }),
        lost: (seconds) => onConnection({ isLost: true, seconds }),
      },
    });
  }

  /** Its id, for `resume`; "" before it has started. */
  get streamId() {
    return this.#stream.streamId ?? this.#streamId;
  }

  /** The id of the last event given, for `resume`. */
  get lastId() {
    return this.#stream.lastId || this.#lastId;
  }

  /** The value of its text, read as JSON that is still being written; see `partialJson`. */
  get partial() {
    return partialJson(this.text, { isWhole: this.done !== null });
  }

  async *[Symbol.asyncIterator]() {
    if (this.#isRead) throw new Error("This answer has been read. Use resume(answer.streamId) to read it again.");
    this.#isRead = true;
    const left = new AbortController();
    this.#watchPage(left.signal);
    try {
      for await (const event of this.#events()) {
        const { type, seq, data } = event;
        if (this.isStopped && type !== "done" && type !== "error") continue; // what was read is kept, and no more
        if (type === "done") this.done = data;
        else if (type === "status") this.status = data;
        else addEvent(this, type, data);
        this.#stream.times.rendering();
        try {
          yield event;
        } finally {
          this.#stream.times.rendered(); // what the loop has done with it
        }
        this.#paintSoon();
        if (seq !== 0) this.#stream.acks.shown(seq); // the loop asks for the next event: this one is shown
        if (type === "error") throw new AnswerFailed(data);
      }
    } finally {
      this.close();
      afterPaint((isPainted) => {
        left.abort();
        if (isPainted) this.#stream.times.painted();
        this.#report();
      });
    }
  }

  /** End it on the server, after the last event that was given. The loop then gets `done`, and ends. */
  async stop() {
    if (this.isStopped || this.done !== null) return true;
    this.isStopped = true;
    this.#sleep.wake();
    if (!this.streamId) {
      this.close();
      return true;
    }
    this.#stream.streamId ??= this.#streamId;
    return this.#stream.stop(this.#stream.seq);
  }

  /**
   * Answer what the run asks (`approvals`), once `done` has come with `finish_reason` "interrupt": an object of each call's
   * id, true or false. Returns the rest of the run, as an answer of its own.
   */
  approve(allowed) {
    const approvals = Object.entries(allowed).map(([id, allow]) => ({ id, allow }));
    const url = `${this.#options.streamsUrl}/${this.streamId}/approvals`;
    return new Answer({ ...this.#options, url, body: { approvals }, key: `approval-${this.streamId}` });
  }

  /** Read no further. The server keeps the answer for a while: `resume` comes back to it. Breaking the loop does so, too. */
  close() {
    this.#stream.close();
    this.#sleep.wake();
  }

  async *#events() {
    if (this.#streamId) {
      yield* this.#stream.resume(this.#streamId, this.#lastId);
      return;
    }
    const backoff = new Backoff();
    for (let sends = 1; !this.#stream.isClosed; sends += 1) {
      try {
        yield* this.#stream.start(this.#body, this.#key, this.#url);
        return;
      } catch (error) {
        if (this.#stream.isClosed) return;
        if (this.#stream.streamId !== null || sends >= MAX_SENDS || !mayPass(error)) throw error;
        await this.#sleep.wait(error.retryAfterSeconds ?? backoff.nextSeconds());
      }
    }
  }

  /** The next frame shows what the loop has made of the event. */
  #paintSoon() {
    if (this.#isPainting || typeof requestAnimationFrame === "undefined" || document.hidden) return;
    this.#isPainting = true;
    const { times } = this.#stream;
    requestAnimationFrame(() => {
      times.rendering();
      afterFrame(() => {
        this.#isPainting = false;
        times.rendered();
        times.painted();
      });
    });
  }

  #report() {
    if (this.#options.reportsTimings) this.#stream.report();
  }

  /** In a page: tell the server when it is hidden, and reconnect at once when the network is back. */
  #watchPage(signal) {
    if (typeof document === "undefined") return;
    const look = () => {
      this.#stream.acks.lookAway(document.hidden);
      if (document.hidden) this.#stream.times.hidden();
    };
    document.addEventListener("visibilitychange", look, { signal });
    window.addEventListener("pagehide", () => this.#report(), { signal });
    window.addEventListener("online", () => this.#stream.nudge(), { signal });
    window.addEventListener("pageshow", () => this.#stream.nudge(), { signal });
    look();
  }
}

/** Where the streams are that an address starts: beside pipelines and conversations. */
function streamsOf(url) {
  return url.replace(/\/(?:pipelines\/[^/?]+|conversations\/[0-9a-f]+\/messages)$/, "/streams");
}

/** Whether the same question may be taken a moment later. It is answered once, by its key, however often it is sent. */
function mayPass(error) {
  if (error instanceof TypeError) return true; // no response
  return error instanceof RequestFailed && (error.status === 429 || error.status === 503 || error.code === "answer_running");
}

function newKey() {
  return crypto.randomUUID?.() ?? Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16)).join("");
}

/**
 * What Django asks of a POST with a session: the token of its cookie.
 * @returns {Record<string, string>}
 */
function csrfHeaders() {
  const cookies = typeof document === "undefined" ? "" : document.cookie;
  const token = /(?:^|; *)csrftoken=([^;]*)/.exec(cookies)?.[1];
  return token === undefined ? {} : { "X-CSRFToken": decodeURIComponent(token) };
}
