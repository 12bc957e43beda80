// Figures as the live page writes them, and its charts' columns. Pure.

/** "1,234". */
export function count(number) {
  return (number ?? 0).toLocaleString("en");
}

/** A stream of another process has fewer fields. */
export function known(number) {
  return number == null ? "–" : count(number);
}

export function rate(perSecond) {
  if (perSecond == null) return "–";
  return perSecond >= 100 ? count(Math.round(perSecond)) : perSecond.toFixed(1);
}

export function percent(share) {
  return share == null ? "–" : `${Math.round(100 * share)} %`;
}

export function time(seconds) {
  if (seconds == null) return "–";
  if (seconds === 0) return "0 s";
  return seconds < 1 ? `${Math.max(1, Math.round(1000 * seconds))} ms` : `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
}

/** "5 s", "40 s", "15 min". */
export function span(seconds) {
  return seconds < 120 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`;
}

export function ageText(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

const MINUTES = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const SECONDS = new Intl.DateTimeFormat("en", { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

/** "12:03", with seconds where they are asked for; `at` is in Unix seconds. */
export function clock(at, withSeconds = false) {
  return (withSeconds ? SECONDS : MINUTES).format(1000 * at);
}

/** A figure of /metrics in its unit. */
export function figure(value, unit) {
  if (value == null) return "–";
  if (unit === "ratio") return percent(value);
  return Number.isInteger(value) ? count(value) : value.toLocaleString("en", { maximumFractionDigits: 2 });
}

/** What was counted in the minute of `at`: answers, those that were stopped or left, connections, readers. */
export function minuteCounts(columns, at) {
  const index = columns.at.findIndex((begin) => begin <= at && at < begin + 60);
  if (index < 0) return ["–", "–", "–", "–"];
  const answers = columns.request_success[index] + columns.request_errors[index];
  return [answers, columns.left[index], columns.reader_disconnects[index], columns.stream_resumes[index]].map(count);
}

/**
 * "6 streams: 1 starting, 4 running, 1 parked · 4 of echo, 2 of billing".
 * @param {number} numStreams
 * @param {{by_state?: any, by_model?: any, num_more?: number}} totals
 */
export function sumOf(numStreams, { by_state: states = {}, by_model: models = {}, num_more: numMore = 0 }) {
  const parts = (counts, of) => Object.entries(counts).map(([name, number]) => `${count(number)} ${of}${name}`).join(", ");
  const sum = `${count(numStreams)} ${numStreams === 1 ? "stream" : "streams"}: ${parts(states, "")} · ${parts(models, "of ")}`;
  return numMore > 0 ? `${sum} · ${count(numMore)} more of other processes are in the list of streams` : sum;
}

/**
 * Put the newest points of a model's charts behind those that the page has. `tail` covers each slot from its first on.
 * Columns may be columns of columns (`ttft_of_budget`, by class). `most` is how many are kept.
 */
export function joined(points, tail, most) {
  const kept = tail.at.length === 0 ? points.at.length : points.at.filter((at) => at < tail.at[0]).length;
  const first = Math.max(0, kept + tail.at.length - most);
  const join = (before, after) => {
    if (Array.isArray(after)) return [...Array.from({ length: kept }, (_, index) => before?.[index] ?? null), ...after].slice(first);
    return Object.fromEntries(Object.keys({ ...before, ...after }).map((name) => [name, join(before?.[name], after[name] ?? tail.at.map(() => null))]));
  };
  return join(points, tail);
}
