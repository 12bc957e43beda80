// reader_times.js by a clock of the test: each moment is where it belongs, and what the page held up is the page's.
import assert from "node:assert/strict";
import { test } from "node:test";

import { ReaderTimes } from "../../streamserve/static/streamserve/reader_times.js";

/** Times with a clock that the test sets, in milliseconds. */
function timed() {
  const clock = { ms: 1000 };
  const times = new ReaderTimes(() => clock.ms / 1000);
  const at = (ms, ...calls) => {
    clock.ms = 1000 + ms;
    for (const call of calls) times[call]();
  };
  return { times, at };
}

/** A whole answer: sent at 0, headers at 100, deltas at 300, 350 and 900, the end with the last; each painted 10 ms later. */
function answer({ slowPaint = 0 } = {}) {
  const { times, at } = timed();
  at(0, "sent");
  at(100, "connected");
  at(101, "bytes");
  at(300, "bytes", "delta");
  at(305, "rendering");
  at(310 + slowPaint, "rendered", "painted");
  at(350 + slowPaint, "bytes", "delta");
  at(355 + slowPaint, "rendering");
  at(360 + slowPaint, "rendered", "painted");
  at(900 + slowPaint, "bytes", "delta", "ended");
  at(905 + slowPaint, "rendering");
  at(910 + slowPaint, "rendered", "painted");
  return times.report();
}

test("every moment counts from sending the question", () => {
  assert.deepEqual(answer(), {
    headers: 0.1,
    first_byte: 0.101,
    first_delta: 0.3,
    first_paint: 0.31,
    ended: 0.9,
    last_paint: 0.91,
    gap_p95: 0.525,
    paint_gap_p95: 0.525,
    render: 0.015,
    reconnects: 0,
    hidden: false,
  });
});

test("a slow rendering is the page's", () => {
  const [usual, slow] = [answer(), answer({ slowPaint: 400 })];
  assert.equal(slow.first_delta, usual.first_delta);
  assert.ok(Math.abs(slow.first_paint - usual.first_paint - 0.4) < 1e-6);
  assert.ok(Math.abs(slow.render - usual.render - 0.4) < 1e-6);
});

test("what comes while the page renders came when that began", () => {
  const { times, at } = timed();
  at(0, "sent");
  at(100, "connected", "bytes", "delta");
  at(200, "rendering");
  at(600, "bytes", "delta"); // read before the end of the rendering is known
  at(601, "rendered", "painted");
  at(640, "bytes", "delta", "ended"); // just after it
  at(700, "painted");
  const report = times.report();
  assert.deepEqual([report.ended, report.gap_p95, report.last_paint], [0.2, 0.1, 0.7]);
});

test("what comes together is one, and a frame that shows nothing new is no gap", () => {
  const { times, at } = timed();
  at(0, "sent", "connected");
  at(10, "bytes", "delta", "delta", "delta");
  at(20, "painted", "painted");
  at(500, "painted");
  at(510, "bytes", "delta");
  at(520, "painted");
  const { gap_p95: gap, paint_gap_p95: painted } = times.report();
  assert.deepEqual([gap, painted], [0.5, 0.5]);
});

test("a tab in the background says so, and paints nothing from then on", () => {
  const { times, at } = timed();
  at(0, "sent");
  at(100, "connected", "bytes", "delta");
  at(110, "painted");
  at(200, "hidden");
  at(300, "bytes", "delta", "ended");
  at(90_000, "painted"); // when it is looked at again
  const report = times.report();
  assert.deepEqual([report.hidden, report.first_paint, report.last_paint, report.paint_gap_p95], [true, 0.11, null, null]);
  assert.equal(report.ended, 0.3);
});

test("what is not known is not there", () => {
  const { times, at } = timed();
  assert.equal(times.report(), null); // nothing was asked
  at(0, "sent");
  assert.equal(times.report(), null); // nothing has come
  at(100, "connected");
  assert.deepEqual([times.report().headers, times.report().first_delta, times.report().ended], [0.1, null, null]);
  at(200, "bytes", "delta");
  at(300, "painted", "stopped");
  at(400, "bytes", "ended");
  at(500, "painted");
  assert.deepEqual([times.report().first_paint, times.report().ended, times.report().last_paint], [0.3, null, null]);
});

test("a refused try does not count, and one without a response does", () => {
  const { times, at } = timed();
  at(0, "sent");
  at(50, "forget"); // refused
  at(2000, "sent");
  at(2500, "sent"); // the same again: the network was lost
  at(2600, "connected", "bytes");
  at(2700, "connected", "connected", "connected");
  assert.deepEqual([times.report().headers, times.report().reconnects], [0.6, 3]);
});

test("of a long answer a sample of its gaps is kept", () => {
  const { times, at } = timed();
  at(0, "sent", "connected");
  for (let num = 1; num <= 30_000; num += 1) at(num * 10, "bytes", "delta");
  assert.equal(times.gaps.kept.length, 10_000);
  assert.equal(times.report().gap_p95, 0.01);
});
