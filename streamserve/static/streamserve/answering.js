// One answer on the page, from sending to its end. Connects a turn with its stream and its view.
//
// Text is appended as events arrive and painted on animation frames. A stop keeps exactly the text that was painted,
// here and, by `seen_seq`, on the server.
//
// The tab that holds the turn's lock owns the answer: it sends the question and stores what comes. Other tabs follow the
// same stream, and store nothing. When the owner closes, one of them takes over.

import { addEvent, cutTo, endAll, extentOf, hasContent } from "./blocks.js";
import { AnswerStream, RequestFailed, Sleep, seqOf } from "./client.js";
import { newId } from "./conversation.js";
import { answersOf, endPart } from "./parts.js";
import { afterFrame, afterPaint } from "./reader_times.js";
import { isLive } from "./turn_tree.js";
import { words } from "./words.js";

const MAX_SENDS = 8;
const NOT_THERE = ["engine_loading", "model_waiting_for_memory", "engine_paused", "engine_draining", "engine_died", "no_engine"]; // shown by the page itself
const TOO_LONG = ["context_length_exceeded", "never_fits", "body_too_large"];
const MAY_PASS = [401, 403, 408, 409, 425, 429]; // refusals of 400 to 499 that a later try may not meet
const SAVE_SECONDS = 0.4;
const HIDDEN_PAINT_SECONDS = 0.5; // animation frames stop in a hidden tab
const DEAR_PAINT_MS = 8; // after a paint that takes longer, the next one waits four times its duration
const LAST_FIGURES_SECONDS = 10; // how long a stopped answer waits for the server's `done` event

export class Answering {
  /**
   * `chat` gives: config, isAway, conversation, locks, readiness, announce(text), link(state), changed(answering), painted(),
   * signIn(). `isAsked`: this tab has just asked for this answer, or for its continuation; nothing of that is stored yet.
   * `release` is the turn's lock, where this tab holds it.
   */
  constructor(chat, turn, view, { isAsked = false, release = null } = {}) {
    this.chat = chat;
    this.turn = turn;
    this.view = view;
    this.isStopped = false;
    this.isDetached = false;
    this.isAsked = isAsked;
    this.release = release; // gives up the turn's lock; null while another tab holds it
    this.leaving = new AbortController();
    this.news = new Sleep(); // woken when the owner has stored something, or this tab becomes the owner
    /** @type {number | null} */
    this.frame = null;
    this.paintMs = 0; // what the last paint took
    this.marks = [];
    this.painted = { extent: extentOf(turn), id: turn.lastId };
    this.sleep = new Sleep();
    this.stream = new AnswerStream({
      streamsUrl: chat.config.streamsUrl,
      headers: chat.config.headers,
      keepaliveSeconds: chat.config.keepaliveSeconds,
      on: {
        started: (streamId, headers) => this.started(streamId, headers),
        connected: () => this.chat.link({ isLost: false }),
        lost: (seconds) => this.chat.link({ isLost: !this.isStopped, seconds }),
      },
    });
  }

  get isLive() {
    return isLive(this.turn);
  }

  get isOwner() {
    return this.release !== null;
  }

  /** Whether this tab decides over the answer: it owns it, or has just asked for it. */
  get isOurs() {
    return this.isOwner || this.isAsked;
  }

  async run() {
    this.chat.announce(words("Generating"));
    this.view.show();
    document.addEventListener("visibilitychange", () => this.look(), { signal: this.leaving.signal });
    this.look();
    try {
      await this.own();
      while (this.isLive && !this.isDetached && this.turn.streamId === null) {
        if (this.isOwner) await this.send();
        else await this.news.wait(3600);
      }
      if (this.turn.streamId !== null && !this.stream.isFinished && !this.isDetached && !this.isStopped) {
        for await (const event of this.stream.resume(this.turn.streamId, this.turn.lastId)) this.take(event);
      }
    } catch (error) {
      if (!this.isDetached) this.fail(error);
    } finally {
      clearTimeout(this.saveTimer);
      if (!this.isDetached) {
        this.chat.link({ isLost: false });
        this.settle();
      }
      this.leave();
      afterPaint((isPainted) => {
        if (isPainted) this.seen();
        this.report();
      });
    }
  }

  /** Tell the server whether the visitor sees the answer. */
  look() {
    this.stream.acks.lookAway(this.chat.isAway);
    if (this.chat.isAway) this.stream.times.hidden();
  }

  /** Tell the server once what the visitor saw of an answer that was asked for here, and when. */
  report() {
    if (this.chat.config.reportsTimings) this.stream.report();
  }

  // --- owning --------------------------------------------------------------------------------------------------------

  /** Become the owner if no other tab is, else as soon as that tab has left. */
  async own() {
    const name = this.chat.conversation.nameOf(this.turn);
    this.release ??= await this.chat.locks.take(name);
    if (this.leaving.signal.aborted) return this.leave();
    if (this.isOwner) {
      this.begin();
      return undefined;
    }
    void this.chat.locks.wait(name, this.leaving.signal).then((release) => {
      if (this.leaving.signal.aborted) release?.();
      else if (release !== null) this.inherit(release);
    });
    return undefined;
  }

  /** Begin as the owner: with a question of this tab, or with what a tab that has left was doing. */
  begin() {
    if (this.turn.state === "waiting" && this.turn.isSent) {
      throw new RequestFailed(words("The page was left before this answer began."), { code: "left" });
    }
    this.save();
    this.isAsked = false;
  }

  /** The owner has left, or has finished. */
  inherit(release) {
    this.release = release;
    if (!this.isLive) return this.leave();
    const stored = this.chat.conversation.stored(this.turn);
    if (stored === null && !this.isAsked) this.detach(); // another tab has removed the question
    else if (stored !== null && (!isLive(stored) || this.turn.streamId === null)) this.adopt(stored);
    try {
      if (this.isLive && !this.isDetached) this.begin();
    } catch (error) {
      this.fail(error);
      this.settle();
    }
    this.news.wake();
    return undefined;
  }

  /** Another tab has stored its progress. The text follows from the stream, until the answer has ended. */
  adopt(stored) {
    if (this.turn.streamId !== null && isLive(stored)) return;
    if (this.isAsked && !isLive(stored)) return; // what this tab asks for comes after it
    this.isAsked = false;
    Object.assign(this.turn, stored);
    if (!this.isLive) this.stream.close();
    this.news.wake();
    this.paint();
    this.view.show();
    this.chat.changed(this);
  }

  save() {
    if (this.isOwner) this.chat.conversation.save(this.turn);
  }

  leave() {
    this.leaving.abort();
    this.release?.();
    this.release = null;
  }

  /** Leave, but give the lock to what comes after it in this tab; null if another tab holds it. */
  handOver() {
    const { release } = this;
    this.release = null;
    this.detach();
    this.leave();
    return release;
  }

  // --- sending -------------------------------------------------------------------------------------------------------

  async send() {
    const answers = answersOf(this.turn);
    const { streamsUrl } = this.chat.config;
    const url = answers === null ? streamsUrl : `${streamsUrl}/${answers.streamId}/approvals`;
    // Of this question: the server answers it once, however often it is sent. A run is continued once, after a reload too.
    const key = answers === null ? newId() : `approval-${answers.streamId}`;
    let request = null;
    for (let sends = 1; ; sends += 1) {
      await this.chat.readiness.wait();
      if (this.isStopped || this.isDetached) return;
      try {
        this.turn.isSent = true; // a reload does not send it again
        this.save();
        this.view.showStatus("");
        request ??= answers === null ? await this.chat.requestFor(this.turn) : { approvals: answers.approvals };
        for await (const event of this.stream.start(request, key, url)) this.take(event);
        return;
      } catch (error) {
        if (this.turn.streamId !== null || !canSendAgain(error) || sends >= MAX_SENDS) throw error;
        this.turn.isSent = false;
        this.save();
        await this.waitTurn(error);
      }
      if (this.isStopped || this.isDetached) return;
    }
  }

  /** Refused for now, before a stream was created: count down, then send again. */
  async waitTurn(error) {
    const isThere = !NOT_THERE.includes(error.code);
    if (!isThere) this.chat.readiness.doubt();
    const why =
      error.status === 429 ? words("You have reached the limit of answers at a time.") : words("The model is busy.");
    for (let left = error.retryAfterSeconds ?? 2; left > 0 && !this.isStopped; left -= 1) {
      if (isThere) this.view.showStatus(`${why} ${words("Trying again in {seconds} s", { seconds: left })}`);
      await this.sleep.wait(1);
    }
  }

  started(streamId, headers) {
    this.turn.streamId = streamId;
    this.chat.conversation.accepted(this.turn, headers);
    if (this.isStopped) void this.stream.stop(0);
    else this.turn.state = "streaming";
    this.save();
    this.chat.changed(this);
  }

  // --- events --------------------------------------------------------------------------------------------------------

  take({ type, seq, id, data }) {
    if (type === "done") this.done(data);
    else if (this.isStopped) return;
    else if (type === "error") this.fail(new RequestFailed(data.message, { code: data.code }));
    else if (type === "status") this.status(data);
    else if (addEvent(this.turn, type, data)) this.grown(type, data, seq); // events of other types are ignored
    if (id !== "" && this.isLive) this.turn.lastId = id;
    if (document.hidden) this.stream.acks.shown(seqOf(this.turn.lastId)); // paints are rare there, and what came counts
    this.saveSoon();
  }

  /** "waiting" pauses the answer until "resumed"; so does "loading" after text, or after "waiting". */
  status(data) {
    if (data.status === "step") return this.step(data);
    if (data.status === "trimmed") return this.note(data.message);
    const hasBegun = this.view.isHeldUp || hasContent(this.turn);
    const isHeldUp = data.status === "waiting" || (data.status === "loading" && hasBegun);
    const why = isHeldUp ? data.message || words("Waiting for the model") : "";
    if (why === "" && !this.view.isHeldUp) return this.view.isStep ? undefined : this.view.showStatus(progressText(data));
    this.view.holdUp(why);
    return this.chat.announce(why || words("Generating"));
  }

  /** A step of a pipeline stays on screen until text follows it. */
  step(data) {
    const text = progressText(data);
    this.turn.steps[(data.step ?? 1) - 1] = data.message || text; // a replay brings a step again
    this.view.showStatus(text, { isStep: true });
    this.chat.announce(text);
  }

  note(text) {
    if (!text || this.turn.notes.includes(text)) return;
    this.turn.notes.push(text);
    this.paintSoon();
  }

  grown(type, data, seq) {
    if (type !== "citation") {
      if (this.view.isHeldUp) this.view.holdUp(""); // a replay may lack the "resumed" event
      if (data.text && this.view.isStep) this.view.showStatus("");
      if (type === "block_start") this.chat.announce(data.kind === "thinking" ? words("Thinking…") : words("Generating"));
      this.marks.push({ seq: data.seq ?? seq, extent: extentOf(this.turn) });
    }
    this.paintSoon();
  }

  done(data) {
    this.turn.figures = { ...figuresOf(data), ttftSeen: this.stream.times.firstPaint };
    if (this.isStopped) return;
    const isCancelled = data.finish_reason === "cancelled";
    if (isCancelled && data.kept_seq != null) this.cutAt(data.kept_seq); // stopped in another tab
    this.turn.finishReason = data.finish_reason;
    this.turn.state = isCancelled ? "stopped" : "done";
  }

  cutAt(keptSeq) {
    const kept = this.marks.filter(({ seq }) => seq <= keptSeq).at(-1);
    if (kept !== undefined) cutTo(this.turn, kept.extent);
  }

  fail(error) {
    if (this.isStopped) return;
    const { message, code } = describe(error, this.turn, this.chat.conversation.isMostly(this.turn));
    const isFinal = error.status >= 400 && error.status < 500 && !MAY_PASS.includes(error.status);
    if (!endPart(this.turn)) this.turn.state = "failed";
    this.turn.error = { message, code, isFinal, isTooLong: TOO_LONG.includes(code) };
    if (this.turn.error.code === "unauthorized") this.chat.signIn();
  }

  // --- ending --------------------------------------------------------------------------------------------------------

  /** Freeze the text that is on screen and send its position to the server. */
  stop() {
    if (!this.isLive || (!this.isOurs && this.turn.streamId === null)) return; // only its own tab can take it back
    this.isStopped = true;
    this.turn.state = "stopped";
    this.turn.finishReason = "cancelled";
    cutTo(this.turn, this.painted.extent);
    this.turn.lastId = this.painted.id;
    this.stream.streamId ??= this.turn.streamId;
    if (this.turn.streamId !== null) void this.stream.stop(seqOf(this.painted.id));
    if (!this.turn.isSent) this.stream.close();
    this.sleep.wake();
    this.news.wake();
    this.settle();
    setTimeout(() => this.stream.close(), LAST_FIGURES_SECONDS * 1000);
  }

  /** Show and store the final state: the turn has ended, or its metrics came after a stop. */
  settle() {
    endAll(this.turn);
    this.paint();
    this.view.show();
    this.chat.painted(); // the lines under the text need room too
    this.save();
    this.chat.changed(this);
  }

  /** Stop, and store nothing more: the conversation is over. */
  giveUp() {
    this.stop();
    this.leave();
  }

  /** Detach from the answer, which continues on the server, as a reload does. */
  detach() {
    this.isDetached = true;
    this.stream.close();
    this.sleep.wake();
    this.news.wake();
  }

  // --- painting ------------------------------------------------------------------------------------------------------

  paintSoon() {
    if (this.frame !== null) return;
    const paint = () => this.paintFrame();
    if (document.hidden) this.frame = setTimeout(paint, HIDDEN_PAINT_SECONDS * 1000);
    else if (this.paintMs > DEAR_PAINT_MS) this.frame = setTimeout(() => requestAnimationFrame(paint), this.paintMs * 4);
    else this.frame = requestAnimationFrame(paint);
  }

  /** Paint on an animation frame, and measure until it is on the screen. */
  paintFrame() {
    const { times } = this.stream;
    times.rendering();
    this.paint();
    afterFrame(() => {
      times.rendered();
      this.seen();
    });
  }

  paint() {
    this.frame = null;
    if (this.isDetached) return;
    const startedAt = performance.now();
    this.view.paint();
    if (this.isLive) {
      this.painted = { extent: extentOf(this.turn), id: this.turn.lastId };
      this.stream.acks.shown(seqOf(this.turn.lastId));
    }
    this.chat.painted();
    this.paintMs = performance.now() - startedAt;
  }

  /** What was painted is on the screen. */
  seen() {
    const { times } = this.stream;
    times.painted();
    const { figures } = this.turn;
    if (figures === null || figures.ttftSeen === times.firstPaint) return;
    figures.ttftSeen = times.firstPaint; // a short answer ends before its first paint
    this.view.show();
    this.save();
  }

  saveSoon() {
    if (this.saveTimer !== undefined) return;
    this.saveTimer = setTimeout(() => {
      this.saveTimer = undefined;
      this.save();
    }, SAVE_SECONDS * 1000);
  }
}

function canSendAgain(error) {
  if (!(error instanceof RequestFailed)) return false;
  return error.status === 429 || error.status === 503 || error.code === "answer_running"; // its end is not written yet
}

function progressText({ status, step, of, message }) {
  if (status === "step") {
    const place = of ? words("Step {step} of {of}", { step, of }) : words("Step {step}", { step });
    return message ? `${place}: ${message}` : place;
  }
  if (message) return message;
  if (status === "queued") return step ? words("In the queue, place {place}", { place: step }) : words("In the queue");
  if (status === "prefill") return of ? words("Reading, {percent} %", { percent: Math.floor((100 * (step ?? 0)) / of) }) : words("Reading");
  if (status === "loading") return words("The model is loading");
  return "";
}

/**
 * The metrics under an answer, from the `done` event. Times in seconds.
 * @param {{totalTokens?: number, latency: number, usage?: any, breakdown?: {decode?: number, ttft?: number}, phases?: Record<string, number>}} done
 */
function figuresOf({ totalTokens, latency, usage, breakdown = {}, phases = {} }) {
  const tokens = usage?.completion_tokens ?? totalTokens ?? 0;
  const decodeSeconds = breakdown.decode || latency - (breakdown.ttft ?? 0);
  return {
    tokens,
    tokensPerSecond: tokens > 1 && decodeSeconds > 0 ? (tokens - 1) / decodeSeconds : null,
    ttftServer: breakdown.ttft ?? untilFirstToken(phases),
    total: latency ?? null,
    phases,
    cachedTokens: usage?.prompt_tokens_details?.cached_tokens ?? 0,
    promptTokens: usage?.prompt_tokens ?? 0,
  };
}

/** Of a pipeline: what came before the first token. Null where its phases are not known. */
function untilFirstToken(phases) {
  if (phases.prefill === undefined) return null;
  const after = ["network_in", "first_decode", "generation", "tools", "parked", "other"];
  return Object.entries(phases).reduce((sum, [name, seconds]) => (after.includes(name) ? sum : sum + seconds), 0);
}

/** An error as a sentence for the user, with the remedy. */
function describe(error, turn, isMostly) {
  if (error instanceof TypeError) {
    return { code: "network", message: words("The server could not be reached. Your question is still here.") };
  }
  if (!(error instanceof RequestFailed)) {
    console.error(error);
    return { code: "page", message: words("Something on this page went wrong.") };
  }
  return { code: error.code, message: messageFor(error.code, turn, isMostly) ?? error.message };
}

/** `isMostly`: the question is the larger part of what was sent. */
export function messageFor(code, turn, isMostly) {
  const expired = words("The rest of this answer is no longer kept.");
  if (TOO_LONG.includes(code)) {
    return isMostly
      ? words("This question is too long for the model. Shorten it and ask again.")
      : words("This conversation has grown too long for the model. Start a new chat to go on.");
  }
  switch (code) {
    case "unauthorized":
      return words("Your session has ended. Reload the page and sign in again.");
    case "forbidden":
      return words("Your session has ended, or you may not ask this model. Reload the page and try again.");
    case "stream_expired":
    case "stream_finished":
    case "unknown_event_id":
      return expired;
    case "stream_not_found":
      return hasContent(turn) ? expired : words("This answer is no longer kept.");
    case "engine_died":
      return words("The model has stopped working. The site's owner can see why in the log.");
    case "timeout":
      return words("The answer took too long and was ended.");
    default:
      return undefined;
  }
}
