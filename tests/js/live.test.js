// The pure part of the admin's live page: live_text.js.
import assert from "node:assert/strict";
import { test } from "node:test";

import { figure, joined, minuteCounts, percent, sumOf, time } from "../../streamserve/static/streamserve/live_text.js";

const points = (at, values, chat) => ({ at, late: values, ttft_of_budget: { chat } });

test("the newest points replace those of their slots, and follow the rest", () => {
  const before = points([0, 5, 10], [1, 2, 3], [0.1, 0.2, 0.3]);
  const tail = points([10, 15], [4, 5], [0.4, null]);
  assert.deepEqual(joined(before, tail, 99), points([0, 5, 10, 15], [1, 2, 4, 5], [0.1, 0.2, 0.4, null]));
});

test("no more points are kept than the window has", () => {
  const before = points([0, 5, 10], [1, 2, 3], [1, 1, 1]);
  assert.deepEqual(joined(before, points([15], [4], [2]), 2), points([10, 15], [3, 4], [1, 2]));
});

test("a class that comes later, or goes, has gaps", () => {
  const before = points([0], [1], [1]);
  const tail = { at: [5], late: [2], ttft_of_budget: { document: [3] } };
  assert.deepEqual(joined(before, tail, 9).ttft_of_budget, { chat: [1, null], document: [null, 3] });
});

test("an engine that has gone adds nothing", () => {
  const before = points([0, 5], [1, 2], [1, 1]);
  assert.deepEqual(joined(before, points([], [], []), 9), before);
});

test("figures have their units", () => {
  assert.deepEqual([time(null), time(0), time(0.0004), time(0.25), time(3), time(42)], ["–", "0 s", "1 ms", "250 ms", "3.0 s", "42 s"]);
  assert.deepEqual([percent(0.256), percent(null)], ["26 %", "–"]);
  assert.deepEqual([figure(0.5, "ratio"), figure(1234, "tokens"), figure(1.234, "seconds"), figure(undefined, "")], ["50 %", "1,234", "1.23", "–"]);
});

test("the sum of the streams names states and models", () => {
  const totals = { by_state: { starting: 0, running: 1, parked: 1 }, by_model: { echo: 2 } };
  assert.equal(sumOf(2, totals), "2 streams: 0 starting, 1 running, 1 parked · 2 of echo");
  assert.match(sumOf(2, { ...totals, num_more: 7 }), /7 more of other processes/);
});

test("a minute's row has what was counted in that minute", () => {
  const columns = { at: [60, 120], request_success: [4, 5], request_errors: [1, 0], left: [2, 0], reader_disconnects: [3, 0], stream_resumes: [1, 0] };
  assert.deepEqual(minuteCounts(columns, 119), ["5", "2", "3", "1"]);
  assert.deepEqual(minuteCounts(columns, 180), ["–", "–", "–", "–"]);
});
