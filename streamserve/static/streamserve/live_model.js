// A model on the live page: its state and buttons, its figures against their thresholds, panels with charts, and the same
// figures as tables.
// Everything is made once and then updated, from one snapshot each time.

import { Chart, element } from "./live_chart.js";
import { clock, count, figure, minuteCounts, percent, rate, span, time } from "./live_text.js";
import { loadingFigures } from "./loading.js";

const LEVELS = { ok: "in order", warn: "over the threshold", bad: "needs you", idle: "at rest" };
const PANELS = {
  readers: [
    "Readers",
    "Late: has waited for over a second for the next token. Hungry: runs out of tokens soon, and goes first. Ahead: has tokens to read for a while. Away: looks at something else, and goes last. An answer of three choices counts as three; rows of batches have no readers.",
  ],
  latency: [
    "First token against its budget",
    "What the first token took of the budget of its class: the 95th percentile of the last 256 answers, of all web processes. Above 100 % it was late.",
  ],
  memory: [
    "Memory",
    "Blocks of the KV cache. Used: held by running answers. Cached: kept for prompts that begin alike, and given up where they are needed. Above 90 % used, the next answers wait for memory.",
  ],
  queue: [
    "Queue",
    "Seconds of computing ahead of a request that comes now. Above the line, which is the shortest first-token budget in use, its first token is late.",
  ],
  leaving: [
    "Readers who leave",
    "Counted each minute, in all processes of the machine. Stopped or left: answers that ended as cancelled or abandoned. Ended early: connections of readers that ended before their answer. Came back: readers that continued on a new connection.",
  ],
};
const LEAVING = [
  { name: "left", color: "late", label: "stopped or left" },
  { name: "reader_disconnects", color: "fourth", label: "ended early" },
  { name: "stream_resumes", color: "third", label: "came back" },
];
const READERS = [
  { name: "num_readers_away", color: "away", label: "away" },
  { name: "num_readers_ahead", color: "ahead", label: "ahead" },
  { name: "num_readers_hungry", color: "hungry", label: "hungry" },
  { name: "num_readers_late", color: "late", label: "late" },
];
const MEMORY = [{ name: "kv_blocks_used", color: "ahead", label: "used" }]; // what is cached waits for nothing
const CLASS_COLORS = ["ahead", "second", "third", "fourth"];
const MINUTE_HEADS = ["Late", "Hungry", "Ahead", "Away", "First token of its budget", "Memory used", "Queue", "Waiting", "Tokens/s", "Answers", "Stopped or left", "Ended early", "Came back"];
const SIDE_HEADS = ["Server p50", "Server p95", "Server p99", "Reader p50", "Reader p95", "Reader p99"];
const CLASS_HEADS = ["First token", "Whole answer", "In time", "Answers", "Refused"];
const MINUTE_SECONDS = 60;
const WARM = "warm"; // prompts that are only to be cached: the class has no readers
// The actions of an operator by state: [label, action].
const PAUSE = ["Pause", "pause"];
const RESUME = ["Resume", "resume"];
const DRAIN = ["Drain", "drain"];
const SLEEP = ["Sleep", "sleep"];
const WAKE = ["Wake", "wake"];
const CONTROLS = { ready: [PAUSE, DRAIN, SLEEP], asleep: [WAKE], paused: [RESUME, DRAIN], draining: [RESUME] };
const CONTROL_HINTS = {
  pause: "Park every answer and take nothing new, until resumed",
  resume: "Continue",
  drain: "Take nothing new, and let the answers that run come to their end",
  sleep: "Give its memory back, unless it answers; it is loaded again when it is asked",
  wake: "Load it now",
};

/** Give `parent` one child per item, by key and in order: made once, then updated. */
export class Keyed {
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

export class ModelCard {
  /** `figures` is the table of figures without values; `hrefOf(alias, place)` is where an operator looks, or null. */
  constructor({ alias }, control, figures, hrefOf) {
    this.state = element("span", { class: "ss-state" });
    this.controls = new Controls(control === null ? null : (action) => control(alias, action));
    this.progress = element("progress", { max: "1", "aria-label": `Loading ${alias}` });
    this.words = element("p", { class: "ss-words" });
    this.now = element("p", { class: "ss-now" });
    this.recent = new Recent((place) => hrefOf(alias, place));
    this.panels = Object.fromEntries(Object.keys(PANELS).map((name) => [name, new Panel(name, panelId(alias, name))]));
    this.classes = new ClassTable();
    this.all = new FigureTable(figures);
    this.minutes = new MinuteTable();
    this.figures = element(
      "div",
      { class: "ss-figures" },
      this.now,
      this.recent.node,
      element("div", { class: "ss-panels" }, ...Object.values(this.panels).map(({ node }) => node)),
      folded("Budgets of each class", this.classes.node),
      folded("All figures of the engine as a table, with their names in /metrics", this.all.node),
      folded("The charts as a table", this.minutes.node),
    );
    this.node = element(
      "article",
      { class: "ss-card", "data-model": alias },
      element("header", {}, element("h2", {}, alias), this.state, this.controls.node),
      this.controls.problem,
      this.words,
      this.progress,
      this.figures,
    );
  }

  /** Show a model of a snapshot; `points` are the whole columns of its charts. */
  update(model, snapshot, pointsOf) {
    const points = pointsOf(model.alias);
    showState(this.state, model.state);
    this.controls.update(model.state);
    this.showLoading(model);
    if (this.figures.hidden) return;
    write(this.now, workOf(model));
    this.recent.update(model.recent);
    const times = { from: snapshot.taken_at - snapshot.window_seconds, to: snapshot.taken_at };
    for (const panel of Object.values(this.panels)) panel.show(model, points, times);
    this.classes.update(model.classes, model.num_recent);
    this.all.update(model.figures);
    this.minutes.update(points, model);
  }

  showLoading({ state, stage, fraction, message, dtype, linears, loaded_bytes: loadedBytes, total_bytes: totalBytes, elapsed_seconds: elapsedSeconds }) {
    const isLoading = state === "loading";
    const figures = isLoading ? loadingFigures({ stage, fraction, loadedBytes, totalBytes, elapsedSeconds }) : "";
    const arithmetic = linears ? `${dtype}, linear layers by ${linears}` : "";
    const words = [figures, message, arithmetic].filter(Boolean).join(" · ");
    write(this.words, words);
    this.words.hidden = words === "";
    this.progress.hidden = !isLoading;
    this.progress.value = fraction ?? 0;
    this.figures.hidden = isLoading || ["idle", "asleep", "failed"].includes(state);
  }
}

/** What the engine does: "312 tokens/s, read at 240. In the last 15 min it computed 62 % of the time, …". */
function workOf({ figures, streams, by_state: states, capacity, capacity_seconds: seconds, rate_seconds: rateSeconds }) {
  const parts = [
    `${count(streams)} ${streams === 1 ? "stream" : "streams"}: ${states.starting} starting, ${states.running} running, ${states.parked} parked.`,
    `In the engine: ${count(figures.num_requests_running)} running, ${count(figures.num_requests_waiting)} waiting.`,
    `${rate(figures.tokens_per_second)} tokens/s in the last ${span(rateSeconds)}; the readers read ${rate(figures.readers_tokens_per_second)}.`,
  ];
  if (capacity !== null) {
    parts.push(
      `In the last ${span(seconds)} the engine computed ${percent(capacity.useful)} of the time, computed again what it had dropped ${percent(capacity.recomputed)}, and was idle ${percent(capacity.idle)}.`,
    );
  }
  return parts.join(" ");
}

/** The id of a panel, which the headline's link and those of figures name. */
export function panelId(alias, name) {
  return `ss-${alias}-${name}`;
}

export function isPanel(place) {
  return place in PANELS;
}

/** The last minutes: each figure that has a threshold, and what the server measured beside what readers did. */
class Recent {
  constructor(hrefOf) {
    this.title = element("h3");
    this.parting = element("p", { class: "ss-now" });
    this.tiles = element("ul", { class: "ss-tiles" });
    this.keyed = new Keyed(this.tiles, ({ place }) => new Tile(hrefOf(place)));
    this.sides = new SideTable();
    this.node = element("section", { class: "ss-recent" }, this.title, this.tiles, this.parting, folded("What readers measured beside the server's own times", this.sides.node));
  }

  update({ minutes, answers, least_answers: least, figures, num_reports: numReports, parting, sides }) {
    const few = answers < least ? `; below ${count(least)} answers no percentile and no share is judged` : "";
    write(this.title, `The last ${minutes} min: ${count(answers)} ${answers === 1 ? "answer" : "answers"}${few}`);
    this.keyed.update(figures, ({ name }) => name);
    write(this.parting, parting);
    this.sides.update(sides, numReports, minutes);
  }
}

/** A figure: its value, its threshold, and in words whether it is beyond that; then where to look. */
class Tile {
  constructor(href) {
    this.label = element("span", { class: "ss-tile-label" });
    this.value = element("strong", { class: "ss-tile-value" });
    this.limit = element("span", { class: "ss-tile-limit" });
    this.level = element("span", { class: "ss-level" });
    this.look = element("p", { class: "ss-meaning" });
    this.words = element("span");
    this.look.append(this.words);
    if (href !== null) this.look.append(" ", element("a", { href }, "Look there"));
    this.node = element("li", {}, this.label, this.value, this.limit, this.level, this.look);
  }

  update({ name, label, value, limit, level, words, look }) {
    this.node.className = `ss-tile is-${level}`;
    this.node.dataset.figure = name;
    write(this.label, label);
    write(this.value, value);
    write(this.limit, limit);
    write(this.level, words);
    write(this.words, look);
    this.look.hidden = level !== "warn";
  }
}

/** The percentiles of the server, and those that readers have reported. */
class SideTable {
  constructor() {
    this.rows = element("tbody");
    this.caption = element("caption");
    const table = stacking("ss-sides", ["Time", ...SIDE_HEADS], this.rows);
    table.prepend(this.caption);
    this.node = element("div", { class: "ss-scrolls", tabindex: "0", role: "region", "aria-label": "Server and readers" }, table);
    this.keyed = new Keyed(this.rows, ({ label }) => new SideRow(label));
  }

  update(sides, numReports, minutes) {
    write(this.caption, `Of the last ${minutes} min. Readers have reported ${count(numReports)} ${numReports === 1 ? "answer" : "answers"}.`);
    this.keyed.update(sides, ({ label }) => label);
  }
}

class SideRow {
  constructor(label) {
    this.cells = SIDE_HEADS.map(() => element("td"));
    this.node = stackedRow({}, element("th", { scope: "row" }, label), SIDE_HEADS, this.cells);
  }

  update({ server, reader }) {
    [...server, ...reader].forEach((seconds, index) => write(this.cells[index], time(seconds)));
  }
}

/** One question to the engine: a verdict, its chart, and what the words mean. */
class Panel {
  constructor(name, id) {
    this.name = name;
    const [title, explained] = PANELS[name];
    this.title = title;
    this.level = element("span", { class: "ss-level" });
    this.verdict = element("p", { class: "ss-verdict" });
    this.meaning = element("p", { class: "ss-meaning" });
    this.place = element("div");
    this.node = element(
      "section",
      { class: "ss-panel", id, "data-panel": name, "aria-label": title },
      element("h3", {}, title, " ", this.level),
      this.verdict,
      this.meaning,
      this.place,
      element("p", { class: "ss-explained" }, explained),
    );
    this.chart = null;
    this.made = "";
  }

  show(model, points, times) {
    const { level, words, meaning } = model.panels[this.name];
    this.node.className = `ss-panel is-${level}`;
    write(this.level, LEVELS[level]);
    write(this.verdict, words);
    write(this.meaning, meaning);
    this.meaning.hidden = meaning === "";
    const [series, columns, options, limit] = charted(this.name, model, points);
    const kind = series.map(({ label }) => label).join();
    if (this.chart === null || this.made !== kind) {
      this.made = kind;
      this.chart = new Chart(this.title, series, options);
      this.place.replaceChildren(this.chart.node);
    }
    this.place.hidden = series.length === 0;
    const at = this.name === "leaving" ? model.recent.by_minute.at : points.at;
    if (series.length > 0) this.chart.show(at, columns, { ...times, limit });
  }
}

/** Return a panel's series, their columns, how they are drawn, and the threshold. */
function charted(name, { figures, limits, recent }, points) {
  const column = (each) => points[each.name];
  const total = figures.kv_blocks_total;
  if (!total && (name === "readers" || name === "memory")) return [[], [], {}, null]; // a server elsewhere does not report these
  if (name === "readers") return [READERS, READERS.map(column), { isStacked: true, isStepped: true, unit: whole, least: 4 }, null];
  if (name === "memory") {
    const shares = MEMORY.map((each) => points[each.name].map((blocks) => (blocks == null ? null : blocks / total)));
    return [MEMORY, shares, { isStacked: true, unit: percent, least: 1 }, limits.kv_blocks_used / total];
  }
  if (name === "leaving") {
    const columns = LEAVING.map((each) => recent.by_minute[each.name]);
    return [LEAVING, columns, { isStepped: true, unit: whole, least: 4 }, null];
  }
  if (name === "queue") {
    const series = [{ name: "queue_seconds", color: "ahead", label: "of computing" }];
    return [series, series.map(column), { unit: time, least: 1 }, limits.queue_seconds];
  }
  const classes = Object.keys(points.ttft_of_budget);
  const series = classes.map((label, index) => ({ label, color: CLASS_COLORS[index % CLASS_COLORS.length] }));
  return [series, Object.values(points.ttft_of_budget), { unit: percent, least: 1.2 }, 1];
}

function whole(value) {
  return Number.isInteger(value) ? count(value) : "";
}

/** Every figure of the engine, as it is in /metrics. The server has made the rows. */
class FigureTable {
  constructor(template) {
    this.node = element("div", { class: "ss-scrolls", tabindex: "0", role: "region", "aria-label": "Figures of the engine" }, template);
    this.cells = [...this.node.querySelectorAll("[data-figure]")];
  }

  update(figures) {
    for (const cell of this.cells) write(cell, figure(figures[cell.dataset.figure], cell.dataset.unit));
  }
}

/** The charts' points: the last of each minute, the newest first. */
class MinuteTable {
  constructor() {
    this.rows = element("tbody");
    const table = stacking("ss-minutes", ["Time", ...MINUTE_HEADS], this.rows);
    this.node = element("div", { class: "ss-scrolls", tabindex: "0", role: "region", "aria-label": "The charts as a table" }, table);
    this.keyed = new Keyed(this.rows, () => new MinuteRow());
  }

  update(points, { figures, recent }) {
    if (!this.node.checkVisibility()) return;
    const lasts = points.at.map((_, index) => index).filter((index) => isLast(points.at, index));
    this.keyed.update(lasts.reverse(), (index) => Math.floor(points.at[index] / MINUTE_SECONDS), points, figures.kv_blocks_total, recent.by_minute);
  }
}

function isLast(at, index) {
  return index === at.length - 1 || Math.floor(at[index] / MINUTE_SECONDS) !== Math.floor(at[index + 1] / MINUTE_SECONDS);
}

class MinuteRow {
  constructor() {
    this.time = element("th", { scope: "row" });
    this.cells = MINUTE_HEADS.map(() => element("td"));
    this.node = stackedRow({}, this.time, MINUTE_HEADS, this.cells);
  }

  update(index, points, numBlocks, byMinute) {
    write(this.time, clock(points.at[index], true));
    [...minuteOf(points, index, numBlocks), ...minuteCounts(byMinute, points.at[index])].forEach((text, place) => write(this.cells[place], text));
  }
}

function minuteOf(points, index, numBlocks) {
  const budgets = Object.values(points.ttft_of_budget).map((column) => column[index]).filter((each) => each != null);
  const seen = (name, text) => (points[name][index] == null ? "–" : text(points[name][index]));
  return [
    ...["num_readers_late", "num_readers_hungry", "num_readers_ahead", "num_readers_away"].map((name) => seen(name, count)),
    budgets.length > 0 ? percent(Math.max(...budgets)) : "–",
    numBlocks ? seen("kv_blocks_used", (blocks) => percent(blocks / numBlocks)) : "–",
    seen("queue_seconds", time),
    seen("num_requests_waiting", count),
    seen("tokens_per_second", rate),
  ];
}

/** Each latency class: its budgets beside what its last answers took. */
class ClassTable {
  constructor() {
    this.rows = element("tbody");
    this.caption = element("caption");
    const table = stacking("ss-classes", ["Class", ...CLASS_HEADS], this.rows);
    table.prepend(this.caption);
    this.node = element("div", { class: "ss-scrolls", tabindex: "0", role: "region", "aria-label": "Budgets of each class" }, table);
    this.keyed = new Keyed(this.rows, (one) => new ClassRow(one));
  }

  update(classes, numRecent) {
    this.caption.textContent = `Median / 95th percentile of the last ${count(numRecent)} answers of each class, and its budget`;
    const shown = Object.entries(classes).filter(([name]) => name !== WARM);
    this.keyed.update(shown, ([name]) => name);
  }
}

class ClassRow {
  constructor([name]) {
    this.cells = Object.fromEntries(["ttft", "total", "inTime", "answers", "refused"].map((each) => [each, element("td")]));
    this.node = stackedRow({}, element("th", { scope: "row" }, name), CLASS_HEADS, Object.values(this.cells));
  }

  update([, one]) {
    this.showTimes(this.cells.ttft, one.ttft_p50, one.ttft_p95, one.ttft_budget);
    this.showTimes(this.cells.total, one.total_p50, one.total_p95, one.total_budget);
    write(this.cells.inTime, percent(one.in_time));
    write(this.cells.answers, count(one.num_answers));
    write(this.cells.refused, count(one.refused));
  }

  showTimes(cell, median, late, budget) {
    const measured = median == null ? "–" : `${time(median)} / ${time(late)}`;
    const isOver = budget != null && late > budget;
    const against = budget == null ? "no budget" : `${isOver ? "over" : "of"} ${time(budget)}`;
    if (cell.textContent !== measured + against) cell.replaceChildren(measured, element("small", {}, against));
    cell.classList.toggle("is-over", isOver);
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

/** Set a text that has changed: what stays needs no layout. */
export function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function showState(node, state, reason = "") {
  const text = reason ? `${state}: ${reason}` : state;
  if (node.textContent === text) return;
  node.textContent = text;
  node.className = `ss-state is-${String(state).replace(/[^a-z]/g, "")}`;
}

/** A table whose rows become blocks on a phone, where each cell names its column; the roles outlive that. */
function stacking(name, heads, rows) {
  const cells = heads.map((head) => element("th", { scope: "col", role: "columnheader" }, head));
  rows.setAttribute("role", "rowgroup");
  const head = element("thead", { role: "rowgroup" }, element("tr", { role: "row" }, ...cells));
  return element("table", { class: `ss-stacks ${name}`, role: "table" }, head, rows);
}

export function stackedRow(attributes, first, labels, cells) {
  first.setAttribute("role", first.localName === "th" ? "rowheader" : "cell");
  cells.forEach((cell, index) => {
    cell.setAttribute("role", "cell");
    cell.dataset.label = labels[index];
  });
  return element("tr", { role: "row", ...attributes }, first, ...cells);
}

function folded(title, node) {
  return element("details", {}, element("summary", {}, title), node);
}
