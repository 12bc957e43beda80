// A chart of the live page: uPlot with a time axis, the area over a threshold coloured, and a key with the values.
// Colours are CSS's, read at each drawing, so that a chart follows the theme.

import { clock } from "./live_text.js";

const HEIGHT = 150;
const AXIS_FONT = "11px system-ui, sans-serif";
const uPlot = /** @type {any} */ (globalThis).uPlot; // vendor/uplot

export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

/**
 * One chart. `series`: `{name, color, label}` from the top down; `isStacked`: each stands on those after it.
 * `unit` formats a value; `least`: the axis reaches so far at least; `limit` of `show` is where the colour begins.
 */
export class Chart {
  constructor(title, series, { isStacked = false, unit, least = 1, isStepped = false }) {
    this.title = title;
    this.series = series;
    this.look = { isStacked, unit, least, isStepped };
    this.shown = { times: [], columns: [], from: 0, to: 0, limit: /** @type {number | null} */ (null) };
    this.top = least;
    this.canvas = element("div", { class: "ss-chart", role: "img" });
    this.at = element("span", { class: "ss-at" });
    this.values = series.map(() => element("span"));
    const keys = series.map(({ color, label }, index) => element("span", { class: `ss-key is-${color}` }, `${label} `, this.values[index]));
    const inks = [...new Set([...series.map(({ color }) => color), "quiet", "grid", "limit", "over"])];
    this.inks = Object.fromEntries(inks.map((name) => [name, element("i", { class: `is-${name}` })]));
    const hidden = element("span", { class: "ss-inks" }, ...Object.values(this.inks));
    this.node = element("div", {}, this.canvas, element("p", { class: "ss-keys" }, this.at, ...keys), hidden);
    this.plot = null;
    this.hovered = null;
    this.resizing = new ResizeObserver(() => this.plot?.setSize(this.size()));
    this.resizing.observe(this.canvas);
  }

  /** `columns`: a list of values for each of the series, and `at`. */
  show(at, columns, { from, to, limit = null }) {
    this.shown = { times: at, columns, from, to, limit };
    const { isStacked, least } = this.look;
    const lines = isStacked ? stacked(columns) : columns;
    const data = [at, ...lines];
    const top = Math.max(least, 1.15 * (limit ?? 0), ...lines.flat().map((value) => 1.1 * (value ?? 0)));
    this.top = isStacked && limit !== null ? least : top;
    if (this.plot === null) this.plot = new uPlot(this.options(), data, this.canvas);
    else this.plot.setData(data);
    this.showKeys();
  }

  size() {
    return { width: Math.max(120, this.canvas.clientWidth), height: HEIGHT };
  }

  options() {
    const color = (name) => () => getComputedStyle(this.inks[name]).color;
    const axis = { stroke: color("quiet"), font: AXIS_FONT, ticks: { show: false }, grid: { stroke: color("grid"), width: 1 } };
    return {
      ...this.size(),
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { show: false } },
      scales: { x: { range: () => [this.shown.from, this.shown.to] }, y: { range: () => [0, this.top] } },
      axes: [
        { ...axis, size: 24, gap: 4, space: 70, values: (_, splits) => splits.map((at) => clock(at)) },
        { ...axis, size: 48, gap: 4, space: 32, values: (_, splits) => splits.map((value) => this.look.unit(value)) },
      ],
      series: [{}, ...this.series.map((one) => this.line(color(one.color)))],
      hooks: {
        drawAxes: [(plot) => this.drawLimit(plot, color("over"), true)],
        draw: [(plot) => this.drawLimit(plot, color("limit"), false)],
        setCursor: [({ cursor }) => this.hover(cursor.idx)],
      },
    };
  }

  line(stroke) {
    const { isStacked, isStepped } = this.look;
    const paths = isStepped ? uPlot.paths.stepped({ align: 1 }) : uPlot.paths.linear();
    return { stroke, paths, width: isStacked ? 0 : 1.5, points: { show: false }, ...(isStacked && { fill: stroke }) };
  }

  /** Colour what is over the limit, or draw the limit as a line. */
  drawLimit(plot, color, isArea) {
    if (this.shown.limit === null) return;
    const { ctx, bbox } = plot;
    const y = Math.max(bbox.top, plot.valToPos(this.shown.limit, "y", true));
    ctx.save();
    ctx.fillStyle = ctx.strokeStyle = color();
    if (isArea) ctx.fillRect(bbox.left, bbox.top, bbox.width, y - bbox.top);
    else {
      ctx.setLineDash([6, 4]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
    }
    ctx.restore();
  }

  hover(index) {
    this.hovered = index ?? null;
    this.showKeys();
  }

  /** The key has the values at the pointer; else those of now. */
  showKeys() {
    const { times, columns } = this.shown;
    const last = times.length - 1;
    const index = this.hovered === null ? last : Math.min(this.hovered, last);
    this.at.textContent = this.hovered === null || last < 0 ? "Now:" : `${clock(times[index], true)}:`;
    const text = (column) => (column[index] == null ? "–" : this.look.unit(column[index]));
    columns.forEach((column, place) => (this.values[place].textContent = text(column)));
    const parts = this.series.map(({ label }, place) => `${label} ${text(columns[place])}`);
    this.canvas.setAttribute("aria-label", `Chart: ${this.title}, ${this.at.textContent} ${parts.join(", ")}`);
  }
}

/** Each column on top of those after it; null where nothing was seen. */
function stacked(columns) {
  return columns.map((column, place) =>
    column.map((value, index) => (value == null ? null : columns.slice(place).reduce((sum, each) => sum + (each[index] ?? 0), 0))),
  );
}
