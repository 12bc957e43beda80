// The lab's simulator: one answer, really streamed from this site, shown in four ways side by side, and measured.
//
// The stream is read once. What differs is when each pane shows what has come (deliveries.js). What counts is what was
// there when the browser drew a frame.

import { AnswerStream, RequestFailed } from "../streamserve/client.js";
import { flushed, janky, streamed, whole } from "./deliveries.js";
import { csrfHeaders, partsOf, secondsWords } from "./pages.js";
import { reading, wordsAt } from "./score.js";

const WAYS = { whole, streamed, janky, flushed };
const MARKS = [0.6, 2, 5]; // seconds
const HIDDEN_MS = 250; // without frames, as in a hidden tab

class Pane {
  constructor(root, way) {
    this.parts = partsOf(root);
    this.way = way;
    this.reset();
  }

  reset() {
    this.delivery = WAYS[this.way]();
    this.count = this.writes = this.writeMs = 0;
    this.answerAt = null; // when the first word of the answer was on the glass, if thoughts came before it
    this.hasAnswer = false;
    this.glass = [];
    this.parts.thoughts.textContent = this.parts.answer.textContent = "";
    this.parts.figures.textContent = "";
    this.parts.score.textContent = "–";
    this.parts.why.textContent = "";
  }

  /** Write what is due. A page that writes each token writes as often as tokens come, also within a frame. */
  show(now, moment) {
    const pieces = this.delivery.take(now, moment);
    if (pieces.length === 0) return;
    const began = performance.now();
    const { thoughts, answer, text } = this.parts;
    for (const [part, isThought] of [[thoughts, true], [answer, false]]) {
      const said = pieces.filter((piece) => piece.isThought === isThought).map((piece) => piece.text).join("");
      if (said) part.append(said);
    }
    text.scrollTop = text.scrollHeight; // has the page laid out, as every chat that follows its answer does
    this.hasAnswer ||= pieces.some(({ isThought }) => !isThought);
    this.writes += 1;
    this.writeMs += performance.now() - began;
    this.count += pieces.length;
  }

  /** Note what a frame shows. */
  record(now) {
    if (this.count === (this.glass.at(-1)?.[1] ?? 0)) return;
    this.glass.push([now, this.count]);
    if (this.hasAnswer) this.answerAt ??= now;
  }

  /** The last words on the glass. */
  tail() {
    const text = this.parts.answer.textContent || this.parts.thoughts.textContent;
    return text.trim().split(/\s+/).slice(-4).join(" ");
  }

  conclude() {
    const figures = reading(this.glass);
    if (figures === null) return null;
    const { firstSeconds, lastSeconds, stillSeconds, busySeconds, laterSeconds, doneSeconds, score } = figures;
    const isLate = this.answerAt !== null && this.answerAt > firstSeconds;
    const lines = [
      ["First word", secondsWords(firstSeconds)],
      ...(isLate ? [["Answer begins", secondsWords(this.answerAt)]] : []),
      ["Last word", secondsWords(lastSeconds)],
      ["Longest standstill", secondsWords(stillSeconds)],
      ["Writes", `${this.writes} in ${Math.round(this.writeMs)} ms`],
    ];
    this.parts.figures.replaceChildren(...lines.flatMap(([name, value]) => [element("dt", name), element("dd", value)]));
    this.parts.score.textContent = String(score);
    this.parts.why.textContent =
      `Something to read for ${secondsWords(busySeconds)} of ${secondsWords(lastSeconds)} = ${score} %. ` +
      `Waits: ${secondsWords(firstSeconds)} for the first word, ${secondsWords(laterSeconds)} later. ` +
      `Read to the end after ${secondsWords(doneSeconds)}.`;
    return figures;
  }
}

class Simulator {
  constructor(root) {
    this.config = root.dataset;
    this.parts = partsOf(root);
    this.form = root.querySelector("form");
    this.panes = [...root.querySelectorAll("[data-lab-way]")].map((pane) => new Pane(pane, pane.dataset.labWay));
    this.rows = [...root.querySelectorAll("[data-lab-seen]")];
    this.stream = null;
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.run();
    });
    this.form.addEventListener("input", () => this.showSettings());
    this.showSettings();
  }

  get settings() {
    const { scenario, ttft, rate } = Object.fromEntries(new FormData(this.form));
    return { scenario: String(scenario), ttft: Number(ttft), rate: Number(rate) };
  }

  showSettings() {
    const { scenario, ttft, rate } = this.settings;
    this.parts.ttft.textContent = `${ttft.toFixed(1)} s`;
    this.parts.rate.textContent = `${rate} a second`;
    const chosen = this.form.querySelector(`[value="${CSS.escape(scenario)}"]`);
    this.parts.question.textContent = `“${chosen.dataset.question}”`;
  }

  get now() {
    return (performance.now() - this.askedAt) / 1000;
  }

  async run() {
    this.stream?.close();
    cancelAnimationFrame(this.frame);
    clearTimeout(this.timer);
    for (const pane of this.panes) pane.reset();
    for (const cell of this.rows.flatMap((row) => [...row.cells].slice(1))) cell.textContent = "";
    this.isThinking = this.isOver = false;
    this.total = 0;
    this.marksLeft = [...MARKS];
    this.serverTtft = null;
    this.say("Asked. The answer is on its way.");
    const stream = new AnswerStream({
      streamsUrl: this.config.streamsUrl,
      headers: () => csrfHeaders(this.config.csrfCookie),
      keepaliveSeconds: Number(this.config.keepaliveSeconds),
      on: { started: () => {}, connected: () => {}, lost: () => {} },
    });
    this.stream = stream;
    this.askedAt = performance.now();
    this.awaitFrame();
    try {
      // Each token in a frame of its own; the answer ends with its reader.
      const request = { model: "pace", input: this.settings, interval_ms: 0, on_disconnect: "abort" };
      for await (const event of stream.start(request, crypto.randomUUID())) if (stream === this.stream) this.take(event);
    } catch (error) {
      if (stream === this.stream) this.fail(error instanceof RequestFailed ? error.message : "The server could not be reached.");
    }
  }

  take({ type, seq, data }) {
    if (seq !== 0) this.stream.acks.shown(seq);
    if (type === "status" && data.status === "step") this.isThinking = data.step < data.of;
    else if (type === "token") {
      const piece = { text: data.text, isThought: this.isThinking };
      this.total += 1;
      for (const pane of this.panes) {
        pane.delivery.put(piece);
        pane.show(this.now, { isFrame: false, isOver: false });
      }
    } else if (type === "done") {
      this.isOver = true;
      this.serverTtft = data.breakdown?.ttft ?? null;
    } else if (type === "error") this.fail(data.message);
  }

  fail(words) {
    this.isOver = true;
    this.marksLeft = [];
    this.say(`The answer failed. ${words}`);
  }

  /** Call `tick` before the next picture; a hidden tab draws none. */
  awaitFrame() {
    const tick = () => {
      cancelAnimationFrame(this.frame);
      clearTimeout(this.timer);
      this.tick();
    };
    this.frame = requestAnimationFrame(tick);
    this.timer = setTimeout(tick, HIDDEN_MS);
  }

  tick() {
    const { now, isOver } = this;
    for (const pane of this.panes) {
      pane.show(now, { isFrame: true, isOver });
      pane.record(now);
    }
    const isShown = isOver && this.panes.every(({ count }) => count === this.total);
    while (this.marksLeft.length > 0 && (now >= this.marksLeft[0] || isShown)) this.showMark(this.marksLeft.shift());
    if (isShown && this.marksLeft.length === 0) this.conclude();
    else this.awaitFrame();
  }

  /** Fill the column of what is seen at `mark`. */
  showMark(mark) {
    const column = MARKS.indexOf(mark) + 1;
    this.panes.forEach((pane, index) => {
      const cell = this.rows[index].cells[column];
      const words = wordsAt(pane.glass, mark);
      const isAll = this.isOver && words === this.total;
      const count = words === 0 ? "nothing" : isAll ? `all ${words} words` : `${words} ${words === 1 ? "word" : "words"}`;
      cell.replaceChildren(element("b", count), ...(words && !isAll ? [element("span", `… ${pane.tail()}`)] : []));
      cell.classList.toggle("is-empty", words === 0);
    });
  }

  conclude() {
    const figures = this.panes.map((pane) => pane.conclude());
    if (figures[1] === null) return;
    const glass = figures[1].firstSeconds;
    const server = this.serverTtft === null ? "" : `, and had left the server after ${secondsWords(this.serverTtft)}`;
    this.say(`Measured. Streamed, the first token was on your screen after ${secondsWords(glass)}${server}.`);
  }

  say(words) {
    this.parts.status.textContent = words;
  }
}

function element(name, text) {
  const made = document.createElement(name);
  made.textContent = text;
  return made;
}

for (const root of document.querySelectorAll("[data-lab-simulator]")) new Simulator(root);
