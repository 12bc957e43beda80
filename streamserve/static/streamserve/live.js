// The admin's live page: a headline, models and streams, once a second, and a button for each possible action.
//
//     live.js          the connection, the headline, the streams
//     live_model.js    a model: panels, tables, buttons
//     live_chart.js    a chart (uPlot)
//     live_text.js     figures in words
//
// Each event is one snapshot, and everything on the page is shown of the newest: `data-snapshot` has its id. Rows and
// cards are kept and updated in place, so that a button stays under the pointer.

import { element } from "./live_chart.js";
import { isPanel, Keyed, ModelCard, panelId, showState, stackedRow, write } from "./live_model.js";
import { ageText, clock, joined, known, rate, sumOf, time } from "./live_text.js";
import { Backoff, readEvents, Sleep, Watchdog } from "./client.js";

const SILENCE_SECONDS = 20; // the server sends an event every second
const ROW_LABELS = ["Stream", "Owner", "Model", "Age", "Tokens", "Lead", "Tokens/s", "First token", "Transport", ""];

class StreamRow {
  /** `address` is the page of the stream; null for a user who may not view it. */
  constructor({ id }, stop, address) {
    this.button = element("button", { type: "button", "aria-label": `Stop stream ${id.slice(0, 8)}` }, "Stop");
    this.button.hidden = stop === null;
    this.button.addEventListener("click", () => void this.stop(() => stop(id)));
    this.state = element("span", { class: "ss-state" });
    this.cells = Object.fromEntries(["owner", "model", "age", "tokens", "lead", "speed", "ttft", "transport"].map((name) => [name, element("td")]));
    for (const name of ["age", "tokens", "lead", "speed", "ttft"]) this.cells[name].className = "ss-number";
    this.cells.owner.className = "ss-owner";
    const { owner, model, age, tokens, lead, speed, ttft, transport } = this.cells;
    const name = element("code", {}, id.slice(0, 8));
    const short = element("td", { title: id }, address === null ? name : element("a", { href: address }, name));
    const cells = [short, owner, model, age, tokens, lead, speed, ttft, transport, element("td", { class: "ss-act" }, this.button)];
    this.node = stackedRow({ "data-stream-id": id }, element("td", {}, this.state), ROW_LABELS, cells);
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
    write(this.cells.owner, stream.owner_name || "–");
    this.cells.owner.title = stream.owner || "";
    write(this.cells.model, stream.model);
    write(this.cells.age, ageText(stream.age_seconds));
    write(this.cells.tokens, known(stream.tokens));
    write(this.cells.lead, stream.is_away ? `${known(stream.lead)}, away` : known(stream.lead));
    write(this.cells.speed, rate(stream.tokens_per_second));
    write(this.cells.ttft, time(stream.ttft));
    write(this.cells.transport, stream.transport || "–");
  }
}

const EMBEDDER_LABELS = ["Model", "Requests", "Inputs", "Tokens", "Waiting", "Refused"];
const EMBEDDER_FIGURES = ["embedding_requests", "embedding_inputs", "prompt_tokens", "num_requests_waiting", "num_requests_refused"];

class EmbedderRow {
  constructor({ alias }) {
    this.state = element("span", { class: "ss-state" });
    this.cells = EMBEDDER_FIGURES.map(() => element("td", { class: "ss-number" }));
    const cells = [element("td", {}, alias), ...this.cells];
    this.node = stackedRow({ "data-embedder": alias }, element("td", {}, this.state), EMBEDDER_LABELS, cells);
  }

  update({ state, figures }) {
    showState(this.state, state);
    this.cells.forEach((cell, index) => write(cell, known(figures[EMBEDDER_FIGURES[index]])));
  }
}

class LivePage {
  constructor(root) {
    this.root = root;
    const part = (name) => root.querySelector(`[data-ss="${name}"]`);
    this.link = part("link");
    this.none = part("none");
    this.sum = part("sum");
    this.table = part("table");
    this.headline = part("headline");
    this.words = part("headline-words");
    this.meaning = part("headline-meaning");
    this.look = part("headline-look");
    this.source = part("source");
    this.points = new Map(); // by model: the columns of its charts
    const control = root.dataset.controlUrl ? (alias, action) => this.control(alias, action) : null;
    const figures = part("figures");
    this.cards = new Keyed(part("cards"), (model) => new ModelCard(model, control, figures.content.cloneNode(true), (alias, place) => this.hrefOf(alias, place)));
    const stop = root.dataset.stopUrl ? (id) => this.stop(id) : null; // null without the permission to stop
    const { streamUrl } = root.dataset;
    const addressOf = (id) => (streamUrl ? streamUrl.replace("STREAM_ID", id) : null);
    this.rows = new Keyed(part("rows"), (stream) => new StreamRow(stream, stop, addressOf(stream.id)));
    this.embedders = part("embedders");
    this.embedderRows = new Keyed(part("embedder-rows"), (embedder) => new EmbedderRow(embedder));
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

  /** Show a snapshot; the first of a connection has all points of the charts, each other the newest. */
  show(snapshot) {
    const { models, streams, headline, taken_at: takenAt, process } = snapshot;
    this.showStatus("Up to date", false);
    const most = snapshot.window_seconds / snapshot.point_seconds;
    for (const { alias, points } of models) {
      const before = this.points.get(alias);
      this.points.set(alias, snapshot.is_whole || !before ? points : joined(before, points, most));
    }
    this.headline.className = `ss-headline is-${headline.level}`;
    write(this.words, headline.words);
    write(this.meaning, headline.meaning);
    this.meaning.hidden = headline.meaning === "";
    const href = headline.place ? this.hrefOf(headline.model, headline.place) : null;
    this.look.hidden = href === null;
    if (href !== null && this.look.getAttribute("href") !== href) this.look.setAttribute("href", href);
    this.cards.update(models, ({ alias }) => alias, snapshot, (alias) => this.points.get(alias));
    this.rows.update(streams, ({ id }) => id);
    this.embedderRows.update(snapshot.embedders, ({ alias }) => alias);
    this.embedders.hidden = snapshot.embedders.length === 0;
    write(this.sum, sumOf(streams.length, snapshot));
    this.sum.hidden = streams.length === 0;
    this.none.hidden = streams.length > 0;
    this.table.hidden = streams.length === 0;
    this.source.textContent = `Snapshot ${snapshot.snapshot}, ${clock(takenAt, true)}. The engines' figures are their own reports: each web process of ${process.host} shows the same. This is process ${process.pid}.`;
    this.source.hidden = false;
    this.root.dataset.snapshot = snapshot.snapshot;
  }

  /** Return where an operator looks for the cause of a figure: a panel, or the list of streams; null without a permission. */
  hrefOf(alias, place) {
    if (isPanel(place)) return `#${encodeURIComponent(panelId(alias, place))}`;
    const { streamsUrl } = this.root.dataset;
    if (!streamsUrl) return null;
    const query = new URLSearchParams({ model: alias, ...(place === "failed" && { error_code__gt: "" }) });
    return `${streamsUrl}?${query}`;
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

for (const root of document.querySelectorAll("[data-streamserve-live]")) void new LivePage(root).run();
