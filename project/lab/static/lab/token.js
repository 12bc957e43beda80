// The way of a token, and where the time to the first token goes. The server's moments come with the lab's state, the
// browser's from its performance clock; both are of this machine, so they can be compared.

import { AnswerStream, RequestFailed } from "../streamserve/client.js";
import { firstTokenParts, median, stagesOf } from "./life.js";
import { csrfHeaders, msWords, partsOf } from "./pages.js";

const CLOCK_LOOKS = 5;
const MAX_TOKENS = 300; // at its end the answer's figures come
const SHOW_MS = 1500; // one token is shown for so long at least

class TokenPage {
  constructor(root) {
    this.config = root.dataset;
    this.parts = partsOf(root);
    this.rows = Object.fromEntries([...root.querySelectorAll("[data-lab-stage]")].map((row) => [row.dataset.labStage, row]));
    const names = root.querySelector("template").content.querySelectorAll("[data-lab-name]");
    this.names = Object.fromEntries([...names].map((name) => [name.dataset.labName, name.textContent]));
    this.stream = this.source = null;
    root.querySelector("[data-lab-do=ask]").addEventListener("click", () => void this.ask());
  }

  async ask() {
    this.stream?.close();
    this.source?.close();
    this.tokens = new Map(); // seq → moments of the browser, in ms of the wall clock
    this.drawn = []; // tokens that the next picture shows
    this.spans = new Map(); // seq → its stages
    this.shownAt = -Infinity;
    this.first = null;
    this.parts.text.textContent = "";
    this.parts.ttft.hidden = true;
    this.offset = wallOffset();
    this.say("Asked. The first token is on its way.");
    const stream = new AnswerStream({
      streamsUrl: this.config.streamsUrl,
      // When it was sent: the server counts what lies before the arrival as `network_in`.
      headers: () => ({ ...csrfHeaders(this.config.csrfCookie), "X-Request-Start": `t=${Date.now()}` }),
      keepaliveSeconds: Number(this.config.keepaliveSeconds),
      on: {
        started: (id) => this.watch(id),
        connected: () => {},
        lost: () => {},
      },
    });
    this.stream = stream;
    this.askedAt = this.wall();
    try {
      const messages = [{ role: "user", content: this.config.question }];
      const request = { model: this.config.model, messages, max_tokens: MAX_TOKENS, on_disconnect: "abort" };
      for await (const event of stream.start(request, crypto.randomUUID())) if (stream === this.stream) this.take(event);
    } catch (error) {
      if (stream === this.stream) this.say(error instanceof RequestFailed ? error.message : "The server could not be reached.");
    }
  }

  wall(now = performance.now()) {
    return now + this.offset;
  }

  take({ type, seq, data }) {
    if (seq !== 0) this.stream.acks.shown(seq);
    if (type === "token") {
      const word = document.createElement("span");
      word.textContent = data.text;
      this.parts.text.append(word);
      this.parts.text.scrollTop = this.parts.text.scrollHeight;
      const moments = { read: this.wall(this.stream.heardAt), parsed: this.wall(), painted: null, word };
      this.tokens.set(seq, moments);
      if (this.first === null) this.say("The marked token is followed; another takes its place every second or so.");
      this.first ??= moments;
      if (this.drawn.push(moments) === 1) this.awaitPicture();
    } else if (type === "done") void this.end(data);
    else if (type === "error") this.say(`The answer failed. ${data.message}`);
  }

  /** A frame is drawn after its callbacks: the task after them finds it painted. */
  awaitPicture() {
    requestAnimationFrame(() => {
      const { port1, port2 } = new MessageChannel();
      port1.onmessage = () => {
        port1.close();
        const painted = this.wall();
        for (const moments of this.drawn) moments.painted = painted;
        this.drawn = [];
      };
      port2.postMessage(null);
    });
  }

  watch(id) {
    if (this.config.mayKill !== "true") return;
    this.source?.close();
    const source = new EventSource(`${this.config.labUrl}${id}/state/`);
    this.source = source;
    source.addEventListener("state", ({ data }) => {
      const { web, engine, answer } = JSON.parse(data);
      if (source !== this.source || answer === null) return;
      if (answer.state === "ended") source.close();
      this.parts.engine.textContent = engine?.pid ? `engine process ${engine.pid}` : "engine process";
      const maker = web.find(({ makes }) => makes);
      if (maker) this.parts.web.textContent = `web process ${maker.pid}`;
      this.match(answer.trace ?? []);
    });
  }

  /** Put both sides' moments together; show the newest token that both have seen. */
  match(trace) {
    let newest = null;
    for (const server of trace) {
      const browser = this.tokens.get(server.seq);
      if (browser?.painted && !this.spans.has(server.seq)) this.spans.set(server.seq, stagesOf(server, browser));
      if (browser?.painted) newest = server.seq;
    }
    if (newest === null || performance.now() - this.shownAt < SHOW_MS) return;
    this.shownAt = performance.now();
    this.showToken(newest);
  }

  showToken(seq) {
    const spans = this.spans.get(seq);
    const { word } = this.tokens.get(seq);
    this.marked?.classList.remove("is-traced");
    word.classList.add("is-traced");
    this.marked = word;
    const text = word.textContent.trim();
    this.parts.token.textContent = `Event ${seq}: ${text ? `“${text}”` : "a blank"}`;
    const most = Math.max(...Object.entries(spans).filter(([key]) => key !== "all").map(([, ms]) => ms ?? 0));
    const all = [...this.spans.values()];
    for (const [stage, row] of Object.entries(this.rows)) {
      const [, here, middle] = row.cells;
      const ms = spans[stage];
      here.querySelector("b").textContent = ms === null ? "–" : msWords(ms);
      here.querySelector("i")?.style.setProperty("--share", String(most ? (ms ?? 0) / most : 0));
      const usual = median(all.map((one) => one[stage]));
      middle.textContent = usual === null ? "–" : msWords(usual);
    }
    this.parts.count.textContent = `Median of ${all.length}`;
  }

  async end(done) {
    while (this.first && this.first.painted === null) await new Promise(requestAnimationFrame);
    this.say(`The answer is over: ${done.totalTokens ?? this.tokens.size} tokens.`);
    const parts = this.first && firstTokenParts(done, { ...this.first, asked: this.askedAt });
    if (parts === null) return;
    this.parts.ttft.hidden = false;
    this.parts.server.textContent = msWords(parts.server);
    this.parts.glass.textContent = msWords(parts.glass);
    const before = parts.parts.findIndex(({ isServer }) => isServer);
    const wayIn = parts.parts.slice(0, before).reduce((sum, { ms }) => sum + ms, 0);
    this.parts["bar-server"].style.setProperty("--from", String(wayIn / parts.glass));
    this.parts["bar-server"].style.setProperty("--share", String(parts.server / parts.glass));
    this.parts.between.replaceChildren(...parts.parts.map((part) => this.partRow(part, parts.glass)));
  }

  partRow({ key, ms, isServer }, whole) {
    const row = document.createElement("tr");
    const name = document.createElement("th");
    name.scope = "row";
    name.textContent = this.names[key] ?? key;
    const where = document.createElement("td");
    where.textContent = isServer ? "server" : "outside";
    const time = document.createElement("td");
    const bar = document.createElement("i");
    bar.className = isServer ? "" : "is-outside";
    bar.style.setProperty("--share", String(whole ? Math.max(0, ms) / whole : 0));
    const words = document.createElement("b");
    words.textContent = msWords(Math.max(0, ms));
    time.className = "lab-span";
    time.append(bar, words);
    row.append(name, where, time);
    return row;
  }

  say(words) {
    this.parts.status.textContent = words;
  }
}

/** What to add to `performance.now()` for the wall clock: looked at as that ticks, which it does each millisecond. */
function wallOffset() {
  const looks = Array.from({ length: CLOCK_LOOKS }, () => {
    const before = Date.now();
    let now = before;
    while (now === before) now = Date.now();
    return now - performance.now();
  });
  return Math.max(...looks); // a look that was interrupted gives less
}

for (const root of document.querySelectorAll("[data-lab-token]")) new TokenPage(root);
