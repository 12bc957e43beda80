// The lab: one answer, the ways to interrupt it, and what the server holds of it meanwhile.
//
// The answer is read as the chat reads it (client.js). "Close the tab" ends the connection as a closed tab does, so that
// this page stays to show what the server makes of it. What is read slowly is shown slowly, and acknowledged as shown.

import { AnswerStream, readEvents, RequestFailed } from "../streamserve/client.js";
import { csrfHeaders, partsOf } from "./pages.js";

const SLOW_SECONDS = 0.35; // for an event, while it is read slowly
const CUT_SECONDS = 3; // without a network
const NUM_SEATS = 16;
const LEAD_EVENTS = 60; // a reader that has so many still to read does not run out of text
const HELD_SECONDS = 1; // without a new event, while the reader is behind
const INTERRUPTIONS = ["close", "cut", "slow", "web", "engine", "stop"];

class Lab {
  constructor(root) {
    this.root = root;
    this.config = root.dataset;
    this.parts = partsOf(root);
    this.buttons = Object.fromEntries(
      [...root.querySelectorAll("[data-lab-do]")].map((button) => [button.dataset.labDo, button]),
    );
    for (const [name, button] of Object.entries(this.buttons)) button.addEventListener("click", () => void this[name]());
    this.stream = null;
    this.source = null; // of the server's state
    this.isSlow = this.hasWaited = false;
    this.isClosed = false; // by "close the tab"
    this.reset();
  }

  reset() {
    this.text = "";
    this.waiting = []; // events that came and are not shown yet
    this.shownSeq = 0;
    this.lastId = "";
    this.isOver = false;
    this.isLost = this.wasHeld = this.hasLeft = false;
    this.shownAt = -Infinity;
    this.before = {}; // the state before, to tell what has changed
    this.grown = { seq: 0, at: performance.now() }; // the log's last event, and since when
    this.startedAt = performance.now();
    this.parts.text.textContent = "";
    this.parts.events.textContent = "";
    this.parts.verdict.hidden = true;
  }

  // --- asking and interrupting ---------------------------------------------------------------------------------------

  async ask() {
    this.stream?.close();
    this.source?.close();
    this.reset();
    this.setClosed(false);
    this.setSlow(false);
    this.note("You asked.");
    this.stream = this.newStream();
    this.allow(true);
    await this.run(() =>
      this.stream.start(
        {
          model: this.config.model,
          messages: [{ role: "user", content: this.config.question }],
          max_tokens: 2000,
        },
        crypto.randomUUID(),
      ),
    );
  }

  /** End the connection, as a closed tab does; or open the tab again, and read on after the last event shown. */
  async close() {
    if (!this.isClosed) {
      this.setClosed(true);
      this.waiting = []; // a closed tab shows nothing more
      this.stream.close();
      this.note("You closed the tab.");
      return;
    }
    this.setClosed(false);
    this.note(`You opened it again, and asked for what follows event ${this.shownSeq}.`);
    const id = this.stream.streamId;
    this.stream = this.newStream();
    await this.run(() => this.stream.resume(id, this.lastId));
  }

  cut() {
    this.note(`You cut the network for ${CUT_SECONDS} seconds.`);
    const cut = this.stream;
    cut.backoff.nextSeconds = () => CUT_SECONDS;
    cut.abort.abort();
  }

  slow() {
    this.setSlow(!this.isSlow);
    this.note(this.isSlow ? "You began to read slowly." : "You read as fast as it comes again.");
  }

  async web() {
    await this.kill("web", "the web process that makes the answer");
  }

  async engine() {
    await this.kill("engine", "the engine");
  }

  async kill(what, words) {
    try {
      const response = await fetch(`${location.pathname}${this.stream.streamId}/kill/${what}/`, {
        method: "POST",
        headers: this.headers(),
      });
      if (!response.ok) throw new Error(await response.text());
      const { killed } = await response.json();
      this.note(`You killed ${words} (${killed}).`);
    } catch (error) {
      // A process that kills itself answers no more.
      this.note(error instanceof TypeError && what === "web" ? `You killed ${words}.` : `Nothing was killed. ${error.message}`);
    }
  }

  async stop() {
    this.note("You pressed stop.");
    await this.stream.stop(this.shownSeq);
  }

  headers() {
    return csrfHeaders(this.config.csrfCookie);
  }

  // --- the answer ----------------------------------------------------------------------------------------------------

  newStream() {
    return new AnswerStream({
      streamsUrl: this.config.streamsUrl,
      headers: () => this.headers(),
      keepaliveSeconds: Number(this.config.keepaliveSeconds),
      on: {
        started: (id) => this.watch(id),
        connected: () => {
          if (this.isLost) this.note(`Connected again. The server sends what follows event ${this.stream.seq}.`);
          this.isLost = false;
        },
        lost: () => {
          if (!this.isLost && !this.isClosed) this.note("The connection is lost.");
          this.isLost = true;
        },
      },
    });
  }

  async run(read) {
    const { stream } = this;
    try {
      for await (const event of read()) this.take(event);
    } catch (error) {
      if (stream !== this.stream || this.isClosed) return;
      this.note(error instanceof RequestFailed ? error.message : "The server could not be reached.");
      this.allow(false);
    }
  }

  take(event) {
    this.waiting.push(event);
    this.show();
  }

  /** Show what has come: all of it, or, read slowly, an event now and then. */
  show() {
    clearTimeout(this.timer);
    while (this.waiting.length > 0) {
      const left = this.isSlow ? this.shownAt + SLOW_SECONDS * 1000 - performance.now() : 0;
      if (left > 0) {
        this.timer = setTimeout(() => this.show(), left);
        return;
      }
      this.showEvent(this.waiting.shift());
    }
  }

  showEvent({ type, seq, id, data }) {
    this.shownAt = performance.now();
    if (seq !== 0) {
      this.shownSeq = seq;
      this.lastId = id;
      this.stream.acks.shown(seq);
    }
    if (type === "token") {
      this.text += data.text;
      this.parts.text.append(data.text);
      this.parts.text.scrollTop = this.parts.text.scrollHeight;
    } else if (type === "done" || type === "error") {
      void this.end(type === "done" ? data.finish_reason : data.message);
    }
  }

  /** Compare what was shown with the whole answer, from its first event. */
  async end(reason) {
    this.isOver = true;
    this.allow(false);
    this.note(reason === "cancelled" ? "The answer is stopped." : `The answer is over (${reason}).`);
    let whole = "";
    try {
      const response = await fetch(`${this.config.streamsUrl}/${this.stream.streamId}/events`, { cache: "no-store" });
      for await (const { type, data } of readEvents(response.body, () => {})) {
        if (type === "snapshot") whole = JSON.parse(data).text; // all events up to it, as one
        if (type === "token") whole += JSON.parse(data).text;
        if (type === "done" || type === "error") break;
      }
    } catch {
      return;
    }
    const isSame = whole === this.text;
    this.parts.verdict.hidden = false;
    this.parts.verdict.classList.toggle("is-wrong", !isSame);
    this.parts.verdict.textContent = isSame
      ? `Compared with the server's log: all ${whole.length} characters are here, in order, and none twice.`
      : `The server's log has ${whole.length} characters, this page ${this.text.length}: they differ.`;
  }

  // --- the server's side ---------------------------------------------------------------------------------------------

  watch(id) {
    this.source?.close();
    if (this.config.mayKill !== "true") return;
    this.source = new EventSource(`${location.pathname}${id}/state/`);
    this.source.addEventListener("state", ({ data }) => this.showState(JSON.parse(data)));
  }

  showState({ web, engine, answer }) {
    const { parts } = this;
    if (answer !== null && answer.last_seq !== this.grown.seq) this.grown = { seq: answer.last_seq, at: performance.now() };
    const isHeld = this.isHeld(answer);
    if (engine !== null) {
      const isIn = answer?.state === "running";
      const seats = Math.max(engine.running, Number(isIn));
      parts.seats.replaceChildren(
        ...Array.from({ length: NUM_SEATS }, (_, seat) => {
          const one = document.createElement("i");
          one.className = seat < seats ? (isIn && seat === 0 ? (isHeld ? "is-held" : "is-ours") : "is-taken") : "";
          return one;
        }),
      );
      parts.batch.textContent = this.batchWords(engine, answer, isHeld);
      const { blocks_total: total, blocks_used: used, blocks_cached: cached } = engine;
      const [usedBar, cachedBar] = parts.memory.children;
      usedBar.style.setProperty("--share", String(total ? used / total : 0));
      cachedBar.style.setProperty("--share", String(total ? cached / total : 0));
      parts.blocks.textContent = `${used} blocks in use, ${cached} kept for a return, ${total - used - cached} free`;
    }
    if (answer !== null) {
      const reader = answer.reader ?? { sent_seq: this.shownSeq, received_seq: this.shownSeq };
      const end = Math.max(1, answer.last_seq);
      parts["bar-log"].style.setProperty("--share", "1");
      parts["bar-sent"].style.setProperty("--share", String(Math.min(1, reader.sent_seq / end)));
      parts["bar-received"].style.setProperty("--share", String(Math.min(1, this.shownSeq / end)));
      parts.cursors.textContent = answer.reader
        ? `${answer.last_seq} in the log · ${reader.sent_seq} sent · ${reader.received_seq} known to be read`
        : `${answer.last_seq} in the log · nobody reads`;
    }
    parts.processes.replaceChildren(
      ...web.map(({ pid, makes, is_read: isRead }) =>
        item(`web process ${pid}`, [makes && "makes this answer", isRead && "you read here"]),
      ),
      ...(engine?.pid ? [item(`engine ${engine.pid}`, [engine.state !== "ready" && engine.state])] : []),
    );
    parts.now.textContent = this.nowWords(engine, answer, isHeld);
    this.noteChanges(web, engine, answer, isHeld);
  }

  /** Whether the engine waits for this reader: nothing new comes, and what came is not read. */
  isHeld(answer) {
    const isRead = answer?.state === "running" && answer.reader !== null;
    const lead = isRead ? answer.last_seq - answer.reader.received_seq : 0;
    const isStill = performance.now() - this.grown.at > HELD_SECONDS * 1000;
    this.wasHeld = lead > 8 && (isStill || (this.wasHeld && lead > LEAD_EVENTS)); // it is let go now and then
    return this.wasHeld;
  }

  batchWords(engine, answer, isHeld) {
    if (isHeld) return "This answer keeps its seat, and computes nothing";
    if (answer?.state === "running") return engine.running > 1 ? `This answer, and ${engine.running - 1} beside it` : "This answer computes";
    return engine.running > 0 ? `${engine.running} others compute` : "Empty: nothing is computed";
  }

  nowWords(engine, answer, isHeld) {
    if (answer === null) return "The answer is about to begin.";
    if (answer.state === "ended") return "The answer is over. The log keeps it for who returns.";
    if (engine !== null && engine.state !== "ready") return "The engine starts again. What was shown is in the log.";
    if (answer.state === "parked") {
      return answer.reader === null
        ? "Nobody reads. The answer has left the batch, and its memory is given back."
        : "You are behind. The answer has left the batch until you have caught up.";
    }
    if (!answer.is_made) return "Its web process is gone. Another one takes over.";
    const lead = answer.last_seq - (answer.reader?.received_seq ?? answer.last_seq);
    if (isHeld) return `The engine is ${lead} events ahead of you, and waits until you have read on.`;
    return lead > LEAD_EVENTS ? `The engine is ${lead} events ahead of you. It will wait.` : "It is computed, logged, and sent to you.";
  }

  noteChanges(web, engine, answer, isHeld) {
    const maker = web.find(({ makes }) => makes)?.pid ?? null;
    const { before } = this;
    const now = { maker, engine: engine?.pid ?? null, state: answer?.state ?? before.state };
    this.before = { ...before, ...now, maker: maker ?? before.maker, engine: now.engine ?? before.engine };
    if (before.state !== undefined && now.state !== before.state) {
      if (now.state === "parked") this.note("The answer left the batch; its memory went back.");
      // An answer that begins waits for its reader for a moment, and has not left anything.
      if (this.hasLeft && now.state === "running") this.note("The answer is in the batch again.");
      this.hasLeft = now.state === "parked";
    }
    if (isHeld && this.isSlow && !this.hasWaited) {
      this.hasWaited = true;
      this.note("The engine waits for you: it computes for others.");
    }
    if (maker !== null && before.maker && maker !== before.maker) this.note(`Web process ${maker} has taken the answer over.`);
    if (now.engine !== null && before.engine && now.engine !== before.engine) this.note(`Engine ${now.engine} has started.`);
  }

  // --- the page ------------------------------------------------------------------------------------------------------

  note(words) {
    const seconds = ((performance.now() - this.startedAt) / 1000).toFixed(1);
    const line = document.createElement("li");
    const time = document.createElement("span");
    time.textContent = `${seconds} s`;
    line.append(time, ` ${words}`);
    this.parts.events.append(line);
    this.parts.events.scrollTop = this.parts.events.scrollHeight;
  }

  allow(isRunning) {
    for (const name of INTERRUPTIONS) {
      const isKill = name === "web" || name === "engine";
      this.buttons[name].disabled = !isRunning || (isKill && this.config.mayKill !== "true");
    }
  }

  setClosed(isClosed) {
    this.isClosed = isClosed;
    this.buttons.close.textContent = isClosed ? "Open it again" : "Close the tab";
    this.parts.text.classList.toggle("is-closed", isClosed);
    for (const name of ["cut", "slow", "stop"]) this.buttons[name].disabled = isClosed;
  }

  setSlow(isSlow) {
    this.isSlow = isSlow;
    this.hasWaited = false; // the engine, for this reader
    this.buttons.slow.setAttribute("aria-pressed", String(isSlow));
    this.show();
  }
}

function item(name, marks) {
  const line = document.createElement("li");
  line.textContent = [name, ...marks.filter(Boolean)].join(" · ");
  return line;
}

for (const root of document.querySelectorAll("[data-lab]")) new Lab(root);
