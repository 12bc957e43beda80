// The admin's live page: models and streams with metrics once a second, and a button for each possible action.
// Rows and cards are kept and updated in place, so that a button stays under the pointer.

import { loadingFigures } from "./loading.js";
import { readEvents } from "./sse.js";
import { Backoff, Sleep, Watchdog } from "./stream.js";

const SILENCE_SECONDS = 20; // the server sends an event every second
const CHART_SIZE = { width: 240, height: 48 };
const STREAM_COUNTS = {
  Streams: "Answers that have not ended: the rows of this model in the table below",
  Starting: "Answers that have no token yet",
  Running: "Answers that are being made",
  Parked: "Answers that wait for their reader and hold no memory here",
};
const ENGINE_COUNTS = {
  Sequences: "Running and waiting, of all processes: an answer has several (choices, a pipeline's parts), one sequence, or none while it is parked. The engine reports once a second",
  Running: "In the engine's batch",
  Waiting: "For a place in it",
  Queue: "Seconds of computing ahead of who comes now",
};
const RECENT_COUNTS = {
  "First token": "From a request's arrival to its first token: median and 95th percentile, of this process",
  Gap: "Between two tokens: median and 95th percentile, of this process",
};
const TOTAL_COUNTS = {
  "Prefix hits": "Blocks of prompts that were found in the prefix cache",
  Parks: "How often the engine parked an answer: its reader was behind, or other answers waited",
  Preempted: "How often a running answer gave its memory back, to be computed again",
  Expired: "Requests that waited for their first step until it was too late",
  Refused: "Requests that would have waited too long, and were refused at once",
};
const READERS = {
  starting: "have no token yet",
  late: "have waited for over a second for their next token",
  hungry: "run out of tokens soon: these go first",
  ahead: "have tokens to read for a while: their answers may pause",
  away: "look at something else, as in a hidden tab: these go last",
};
const CAPACITY = {
  useful: "of this time the engine computed something new",
  recomputed: "it computed again what a preemption or a park had dropped",
  idle: "it had nothing to do",
};
const WARM = "warm"; // prompts that are only to be cached: the class has no readers
// The actions of an operator by state: [label, action].
const PAUSE = ["Pause", "pause"];
const RESUME = ["Resume", "resume"];
const DRAIN = ["Drain", "drain"];
const CONTROLS = { ready: [PAUSE, DRAIN], paused: [RESUME, DRAIN], draining: [RESUME] };
const CONTROL_HINTS = {
  pause: "Park every answer and take nothing new, until resumed",
  resume: "Continue",
  drain: "Take nothing new, and let the answers that run come to their end",
};

function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

/** Give `parent` one child per item, by key and in order: made once, then updated. */
class Keyed {
  constructor(parent, make) {
    this.parent = parent;
    this.make = make;
    this.views = new Map();
  }

  update(items, keyOf, ...more) {
    const keys = new Set(items.map(keyOf));
    for (const [key, view] of this.views) {
      if (keys.has(key)) continue;
      view.node.remove();
      this.views.delete(key);
    }
    items.forEach((item, index) => {
      const key = keyOf(item);
      if (!this.views.has(key)) this.views.set(key, this.make(item));
      const view = this.views.get(key);
      if (this.parent.children[index] !== view.node) this.parent.insertBefore(view.node, this.parent.children[index] ?? null);
      view.update(item, ...more);
    });
  }
}

class ModelCard {
  constructor({ alias }, control) {
    this.state = element("span", { class: "ss-state" });
    this.controls = new Controls(control === null ? null : (action) => control(alias, action));
    this.progress = element("progress", { max: "1", "aria-label": `Loading ${alias}` });
    this.words = element("p", { class: "ss-words" });
    this.streams = new Counts("Streams now", STREAM_COUNTS);
    this.sequences = new Counts("In the engine now", ENGINE_COUNTS);
    this.recent = new Counts("", RECENT_COUNTS);
    this.totals = new Counts("Since the engine began", TOTAL_COUNTS);
    this.speed = element("strong", {}, "0");
    this.chart = new Chart("Tokens a second");
    this.readers = new Bar("Readers of what runs now", READERS);
    this.capacity = new Bar("Capacity", CAPACITY);
    this.blocks = new Bar("KV blocks now", { used: "held by running answers", cached: "kept for prompts that begin alike", free: "hold nothing" });
    this.classes = new ClassTable();
    this.speedOver = element("span");
    const speed = element("div", { class: "ss-speed" }, element("p", {}, this.speed, this.speedOver), this.chart.node);
    const counts = [this.streams, this.sequences, this.recent, this.totals].map(({ node }) => node);
    this.figures = element(
      "div",
      { class: "ss-figures" },
      element("div", {}, ...counts, speed),
      element("div", {}, this.readers.node, this.capacity.node, this.blocks.node, this.classes.node),
    );
    this.node = element(
      "article",
      { class: "ss-card" },
      element("header", {}, element("h2", {}, alias), this.state, this.controls.node),
      this.controls.problem,
      this.words,
      this.progress,
      this.figures,
    );
  }

  update(model, windowSeconds, pointSeconds) {
    showState(this.state, model.state);
    this.controls.update(model.state);
    this.showLoading(model);
    const { starting, running, parked } = model.by_state;
    this.streams.show({ Streams: [count(model.streams)], Starting: [count(starting)], Running: [count(running)], Parked: [count(parked)] });
    this.sequences.show({
      Sequences: [count(model.running + model.waiting)],
      Running: [count(model.running)],
      Waiting: [count(model.waiting)],
      Queue: [`${rate(model.queue_seconds)} s`],
    });
    const { ttft_p50: ttft, ttft_p95: lateTtft, itl_p50: gap, itl_p95: lateGap } = model.latency ?? {};
    this.recent.title.textContent = `Last ${span(windowSeconds)}`;
    this.recent.show({ "First token": pair(ttft, lateTtft), Gap: pair(gap, lateGap) });
    this.totals.show({
      "Prefix hits": [model.prefix_hit_rate == null ? "–" : `${Math.round(100 * model.prefix_hit_rate)} %`],
      Parks: [count(model.parks)],
      Preempted: [count(model.preemptions)],
      Expired: [count(model.expired)],
      Refused: [count(model.refused)],
    });
    this.speed.textContent = rate(model.tokens_per_second);
    this.speedOver.textContent = `tokens/s, last ${span(model.rate_seconds)}`;
    this.chart.show(model.history?.tokens_per_second ?? [], windowSeconds, pointSeconds);
    this.readers.show(model.readers ?? {}, count);
    this.capacity.title.textContent = model.capacity_seconds > 0 ? `Capacity, last ${span(model.capacity_seconds)}` : "Capacity";
    this.capacity.show(model.capacity ?? {}, (share) => `${Math.round(100 * share)} %`);
    this.blocks.show({ used: model.blocks_used, cached: model.blocks_cached, free: model.blocks_free }, count);
    this.classes.update(model.classes ?? {}, model.num_recent);
  }

  showLoading({ state, stage, fraction, message, dtype, linears, loaded_bytes: loadedBytes, total_bytes: totalBytes, elapsed_seconds: elapsedSeconds }) {
    const isLoading = state === "loading";
    const figures = isLoading ? loadingFigures({ stage, fraction, loadedBytes, totalBytes, elapsedSeconds }) : "";
    const arithmetic = linears ? `${dtype}, linear layers by ${linears}` : "";
    const words = [figures, message, arithmetic].filter(Boolean).join(" · ");
    if (this.words.textContent !== words) this.words.textContent = words;
    this.words.hidden = words === "";
    this.progress.hidden = !isLoading;
    this.progress.value = fraction ?? 0;
    this.figures.hidden = isLoading || state === "idle" || state === "failed";
  }
}

/** The parts of a whole as a bar, with a key; `hints` names the parts in order and explains each. */
class Bar {
  constructor(title, hints) {
    this.title = element("b", {}, title);
    this.names = Object.keys(hints);
    this.parts = this.names.map((name) => svg("rect", { class: `ss-${name}`, height: "1" }, svg("title", {}, `${name}: ${hints[name]}`)));
    this.bar = svg("svg", { class: "ss-bar", viewBox: "0 0 1 1", preserveAspectRatio: "none", role: "img" }, ...this.parts);
    this.keys = this.names.map((name) => element("span", { class: `ss-${name}`, title: hints[name] }));
    this.node = element("figure", { class: "ss-parts" }, element("figcaption", {}, this.title, ...this.keys), this.bar);
  }

  show(values, format) {
    const numbers = this.names.map((name) => values[name] ?? 0);
    const total = numbers.reduce((sum, number) => sum + number, 0);
    let left = 0;
    numbers.forEach((number, index) => {
      const width = total > 0 ? number / total : 0;
      this.parts[index].setAttribute("x", String(left));
      this.parts[index].setAttribute("width", String(width));
      this.keys[index].textContent = `${format(number)} ${this.names[index]}`;
      left += width;
    });
    this.bar.setAttribute("aria-label", `${this.title.textContent}: ${this.keys.map((key) => key.textContent).join(", ")}`);
  }
}

/** Each latency class: its budgets beside what its last answers took. */
class ClassTable {
  constructor() {
    const heads = ["Class", "First token", "Whole answer", "In time", "Answers", "Refused"];
    this.rows = element("tbody");
    const head = element("tr", {}, ...heads.map((name) => element("th", { scope: "col" }, name)));
    this.caption = element("caption");
    this.node = element("table", { class: "ss-classes" }, this.caption, element("thead", {}, head), this.rows);
    this.keyed = new Keyed(this.rows, (one) => new ClassRow(one));
  }

  update(classes, numRecent) {
    this.caption.textContent = `Classes, last ${count(numRecent)} answers of each`;
    const shown = Object.entries(classes).filter(([name]) => name !== WARM);
    this.keyed.update(shown, ([name]) => name);
    this.node.hidden = shown.length === 0;
  }
}

class ClassRow {
  constructor([name]) {
    this.cells = Object.fromEntries(["ttft", "total", "inTime", "answers", "refused"].map((each) => [each, element("td")]));
    this.node = element("tr", {}, element("th", { scope: "row" }, name), ...Object.values(this.cells));
  }

  update([, one]) {
    this.showTimes(this.cells.ttft, one.ttft_p50, one.ttft_p95, one.ttft_budget);
    this.showTimes(this.cells.total, one.total_p50, one.total_p95, one.total_budget);
    this.cells.inTime.textContent = one.in_time == null ? "–" : `${Math.round(100 * one.in_time)} %`;
    this.cells.answers.textContent = count(one.num_answers);
    this.cells.refused.textContent = count(one.refused);
  }

  /** Median and 95th percentile, above the budget. */
  showTimes(cell, median, late, budget) {
    const measured = median == null ? "–" : `${time(median)} / ${time(late)}`;
    cell.replaceChildren(measured, element("small", {}, budget == null ? "no budget" : `of ${time(budget)}`));
    cell.title = "Median / 95th percentile of the last answers, and the budget";
    cell.classList.toggle("is-over", budget != null && late > budget);
  }
}

/** Numbers with a heading, which names their time; `hints` names them in order and explains each. */
class Counts {
  constructor(title, hints) {
    this.title = element("h3", {}, title);
    this.values = Object.fromEntries(Object.keys(hints).map((name) => [name, element("dd")]));
    const items = Object.entries(this.values).map(([name, dd]) => element("div", { title: hints[name] }, element("dt", {}, name), dd));
    this.node = element("section", { class: "ss-counts" }, this.title, element("dl", {}, ...items));
  }

  show(values) {
    for (const [name, nodes] of Object.entries(values)) this.values[name].replaceChildren(...nodes);
  }
}

/** The buttons of a model; `control(action)` is null for a user who may only view. */
class Controls {
  constructor(control) {
    this.control = control;
    this.state = null;
    this.node = element("span", { class: "ss-controls" });
    this.problem = element("p", { class: "ss-words is-problem", role: "alert", hidden: "" });
  }

  update(state) {
    if (this.control === null || state === this.state) return;
    this.state = state;
    const buttons = (CONTROLS[state] ?? []).map(([label, action]) => {
      const button = element("button", { type: "button", title: CONTROL_HINTS[action] }, label);
      button.addEventListener("click", () => void this.send(action));
      return button;
    });
    this.node.replaceChildren(...buttons);
  }

  /** The next event brings the new state and its buttons. */
  async send(action) {
    const buttons = [...this.node.children];
    for (const button of buttons) button.disabled = true;
    this.problem.textContent = await this.control(action);
    this.problem.hidden = this.problem.textContent === "";
    for (const button of buttons) button.disabled = false;
  }
}

/** A line over the server's last minutes: the newest point is at the right edge, and time that it has not seen is empty. */
class Chart {
  constructor(label) {
    this.area = svg("path", { class: "ss-area" });
    this.line = svg("path", { class: "ss-line" });
    const { width, height } = CHART_SIZE;
    const middle = svg("path", { class: "ss-grid", d: `M0 ${height / 2}H${width}` });
    const plot = svg(
      "svg",
      { class: "ss-plot", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
      middle,
      this.area,
      this.line,
    );
    this.most = element("span");
    this.half = element("span");
    this.since = element("span");
    this.node = element(
      "div",
      { class: "ss-chart" },
      element("div", { class: "ss-axis-y", "aria-hidden": "true" }, this.most, this.half, element("span", {}, "0")),
      plot,
      element("div", { class: "ss-axis-x", "aria-hidden": "true" }, this.since, element("span", {}, "now")),
    );
  }

  show(values, windowSeconds, pointSeconds) {
    const { width, height } = CHART_SIZE;
    const most = roundUp(Math.max(...values, 1));
    this.most.textContent = count(most);
    this.half.textContent = most >= 2 ? count(most / 2) : "";
    this.since.textContent = `${Math.round(windowSeconds / 60)} min ago`;
    const step = width / (windowSeconds / pointSeconds - 1);
    const left = width - (values.length - 1) * step;
    const points = values.map((each, index) => `${(left + index * step).toFixed(1)} ${(height - (each / most) * height).toFixed(1)}`);
    this.line.setAttribute("d", points.length > 1 ? `M${points.join("L")}` : "");
    this.area.setAttribute("d", points.length > 1 ? `M${left.toFixed(1)} ${height}L${points.join("L")}L${width} ${height}Z` : "");
  }
}

class StreamRow {
  constructor({ id }, stop) {
    this.button = element("button", { type: "button", "aria-label": `Stop stream ${id.slice(0, 8)}` }, "Stop");
    this.button.hidden = stop === null;
    this.button.addEventListener("click", () => void this.stop(() => stop(id)));
    this.state = element("span", { class: "ss-state" });
    this.cells = Object.fromEntries(["owner", "model", "age", "tokens", "lead", "speed", "ttft", "transport"].map((name) => [name, element("td")]));
    for (const name of ["age", "tokens", "lead", "speed", "ttft"]) this.cells[name].className = "ss-number";
    this.cells.owner.className = "ss-owner";
    const { owner, model, age, tokens, lead, speed, ttft, transport } = this.cells;
    this.node = element(
      "tr",
      { "data-stream-id": id },
      element("td", {}, this.state),
      element("td", { title: id }, element("code", {}, id.slice(0, 8))),
      owner, model, age, tokens, lead, speed, ttft, transport,
      element("td", { class: "ss-act" }, this.button),
    );
  }

  async stop(send) {
    this.button.disabled = true;
    this.button.textContent = "Stopping…";
    const isStopped = await send();
    this.button.disabled = isStopped;
    this.button.textContent = isStopped ? "Stopped" : "Try again";
  }

  update(stream) {
    showState(this.state, stream.state, stream.park_reason);
    this.cells.owner.textContent = stream.owner || "–";
    this.cells.owner.title = stream.owner || "";
    this.cells.model.textContent = stream.model;
    this.cells.age.textContent = ageText(stream.age_seconds);
    this.cells.tokens.textContent = known(stream.tokens);
    this.cells.lead.textContent = stream.is_away ? `${known(stream.lead)}, away` : known(stream.lead);
    this.cells.speed.textContent = rate(stream.tokens_per_second);
    this.cells.ttft.textContent = time(stream.ttft);
    this.cells.transport.textContent = stream.transport || "–";
  }
}

class LivePage {
  constructor(root) {
    this.root = root;
    const part = (name) => root.querySelector(`[data-ss="${name}"]`);
    this.link = part("link");
    this.none = part("none");
    this.sum = part("sum");
    this.speed = part("speed");
    this.table = part("table");
    const control = root.dataset.controlUrl ? (alias, action) => this.control(alias, action) : null;
    this.cards = new Keyed(part("cards"), (model) => new ModelCard(model, control));
    const stop = root.dataset.stopUrl ? (id) => this.stop(id) : null; // null without the permission to stop
    this.rows = new Keyed(part("rows"), (stream) => new StreamRow(stream, stop));
    this.backoff = new Backoff({ first: 1, most: 10 });
    this.sleep = new Sleep();
    for (const name of ["online", "pageshow", "focus"]) window.addEventListener(name, () => this.sleep.wake());
    this.pausesWhenHidden();
  }

  /** A hidden page holds no connection. */
  pausesWhenHidden() {
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this.abort?.abort();
      this.sleep.wake();
      this.wakeUp?.();
    });
  }

  async run() {
    for (;;) {
      if (document.hidden) await new Promise((/** @type {(value?: void) => void} */ resolve) => (this.wakeUp = resolve));
      else {
        await this.follow();
        if (!document.hidden) await this.wait();
      }
    }
  }

  async wait() {
    const seconds = this.backoff.nextSeconds();
    this.showStatus("Connection lost. Trying again…", true);
    await this.sleep.wait(seconds);
  }

  async follow() {
    this.abort = new AbortController();
    const { abort } = this;
    const watchdog = new Watchdog(SILENCE_SECONDS, () => abort.abort());
    try {
      const response = await fetch(this.root.dataset.eventsUrl, { signal: this.abort.signal, cache: "no-store" });
      if (!response.ok || !response.headers.get("Content-Type")?.startsWith("text/event-stream")) return; // a login page, or a restart
      for await (const event of readEvents(response.body, () => watchdog.feed())) {
        if (event.type !== "figures") continue;
        this.show(JSON.parse(event.data));
        this.backoff.reset();
      }
    } catch (error) {
      if (error instanceof SyntaxError) console.error(error); // not a network error
    } finally {
      this.abort.abort();
      watchdog.end();
    }
  }

  show({ models, streams, window_seconds: windowSeconds, point_seconds: pointSeconds, ...totals }) {
    this.showStatus("Up to date", false);
    this.cards.update(models, ({ alias }) => alias, windowSeconds, pointSeconds);
    this.rows.update(streams, ({ id }) => id);
    this.speed.textContent = `Tokens/s, last ${span(totals.speed_seconds)}`;
    this.sum.textContent = sumOf(streams.length, totals);
    this.sum.hidden = streams.length === 0;
    this.none.hidden = streams.length > 0;
    this.table.hidden = streams.length === 0;
  }

  showStatus(text, isLost) {
    if (this.link.textContent !== text) this.link.textContent = text;
    this.link.classList.toggle("is-lost", isLost);
  }

  async stop(id) {
    return (await this.post(this.root.dataset.stopUrl.replace("STREAM_ID", id))) === "";
  }

  control(alias, action) {
    const url = this.root.dataset.controlUrl;
    return this.post(url.replace("ACTION", action).replace("MODEL", encodeURIComponent(alias)));
  }

  /** Return "" on success, else the reason. */
  async post(url) {
    try {
      const response = await fetch(url, {
        method: "POST",
        headers: { "X-CSRFToken": this.root.querySelector("input[name=csrfmiddlewaretoken]").value },
      });
      const body = await response.json().catch(() => ({}));
      return response.ok ? "" : body.error?.message ?? "The server refused.";
    } catch {
      return "The server could not be reached.";
    }
  }
}

function showState(node, state, reason) {
  const text = reason ? `${state}: ${reason}` : state;
  if (node.textContent === text) return;
  node.textContent = text;
  node.className = `ss-state is-${String(state).replace(/[^a-z]/g, "")}`;
}

function count(number) {
  return (number ?? 0).toLocaleString("en");
}

/** "6 streams: 1 starting, 4 running, 1 parked · 4 of echo, 2 of billing". */
/**
 * @param {number} numStreams
 * @param {{by_state?: any, by_model?: any, num_more?: number}} totals
 */
function sumOf(numStreams, { by_state: states = {}, by_model: models = {}, num_more: numMore = 0 }) {
  const parts = (counts, of) => Object.entries(counts).map(([name, number]) => `${count(number)} ${of}${name}`).join(", ");
  const sum = `${count(numStreams)} ${numStreams === 1 ? "stream" : "streams"}: ${parts(states, "")} · ${parts(models, "of ")}`;
  return numMore > 0 ? `${sum} · ${count(numMore)} more of other processes are in the list of streams` : sum;
}

/** "5 s", "40 s", "5 min". */
function span(seconds) {
  return seconds < 120 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`;
}

/** A stream of another process has fewer fields. */
function known(number) {
  return number == null ? "–" : count(number);
}

function rate(perSecond) {
  if (perSecond == null) return "–";
  return perSecond >= 100 ? count(Math.round(perSecond)) : perSecond.toFixed(1);
}

/** The next of 1, 2, 5, 10, 20, …: the top of an axis. */
function roundUp(value) {
  const decade = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * decade).find((top) => top >= value) ?? value;
}

function time(seconds) {
  if (seconds == null) return "–";
  return seconds < 1 ? `${Math.max(1, Math.round(1000 * seconds))} ms` : `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
}

/** A median and, smaller, a 95th percentile. */
function pair(median, late) {
  return median == null ? ["–"] : [time(median), element("small", {}, `p95 ${time(late)}`)];
}

function ageText(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

for (const root of document.querySelectorAll("[data-streamserve-live]")) void new LivePage(root).run();
