// The pure files of the lab: deliveries.js, life.js and score.js.
import assert from "node:assert/strict";
import { test } from "node:test";

import { flushed, janky, seeded, streamed, whole } from "../../project/lab/static/lab/deliveries.js";
import { firstTokenParts, median, stagesOf } from "../../project/lab/static/lab/life.js";
import { reading, wordsAt } from "../../project/lab/static/lab/score.js";

const TOKEN = { isFrame: false, isOver: false };
const FRAME = { isFrame: true, isOver: false };
const END = { isFrame: true, isOver: true };

/** Put a word each tenth of a second, look at each, then at the end; return [seconds, words shown] of each showing. */
function shown(delivery, words = 50) {
  const out = [];
  for (let word = 0; word < words; word += 1) {
    delivery.put(word);
    out.push([word / 10, delivery.take(word / 10, TOKEN)], [word / 10 + 0.01, delivery.take(word / 10 + 0.01, FRAME)]);
  }
  out.push([words / 10, delivery.take(words / 10, END)]);
  return out.filter(([, taken]) => taken.length > 0);
}

test("every delivery shows each word once, in order", () => {
  for (const make of [whole, streamed, janky, flushed]) {
    assert.deepEqual(shown(make()).flatMap(([, taken]) => taken), Array.from({ length: 50 }, (_, word) => word));
  }
});

test("a whole answer comes at the end, a stream at each word, a flush at each frame", () => {
  assert.deepEqual(shown(whole()).map(([at]) => at), [5]);
  assert.deepEqual(shown(streamed()).map(([at]) => at), Array.from({ length: 50 }, (_, word) => word / 10));
  assert.ok(shown(flushed()).every(([at]) => Math.abs((at * 10) % 1 - 0.1) < 1e-6));
});

test("jank holds for 0.3 to 1.3 seconds, the same in every run", () => {
  const times = shown(janky()).map(([at]) => at);
  assert.deepEqual(times, shown(janky()).map(([at]) => at));
  const holds = times.slice(1, -1).map((at, index) => at - times[index]);
  assert.ok(holds.length >= 2 && holds.every((hold) => hold >= 0.3 && hold <= 1.3 + 0.11), String(holds));
  const random = seeded(7);
  assert.ok(Array.from({ length: 100 }, random).every((number) => number >= 0 && number < 1));
});

test("who has something to read from the question to the last word has a score of 100, who gets all at the end 0", () => {
  const always = reading([[0, 40], [5, 60]], 4);
  assert.deepEqual([always.score, always.busySeconds, always.laterSeconds, always.doneSeconds], [100, 5, 0, 15]);
  const late = reading([[10, 40]], 4);
  assert.deepEqual([late.score, late.firstSeconds, late.doneSeconds], [0, 10, 20]);
});

test("a wait for the first word counts, and so does a standstill beyond what is still to be read", () => {
  assert.equal(reading([[2, 40], [10, 60]], 4).score, 80);
  // 20 words last for 5 s; the other 20 come at 8 s: 3 s of waiting.
  const figures = reading([[0, 20], [8, 40]], 4);
  assert.deepEqual([figures.laterSeconds, figures.doneSeconds, figures.stillSeconds, figures.score], [3, 13, 8, 63]);
  // at 4 s they come in time, however long the standstill.
  assert.equal(reading([[0, 20], [4, 40]], 4).score, 100);
});

test("at half the reading pace half of the time is waited", () => {
  const glass = Array.from({ length: 101 }, (_, word) => [word / 2, word + 1]);
  assert.equal(reading(glass, 4).score, 50);
});

test("nothing on the glass has no reading", () => {
  assert.equal(reading([]), null);
});

test("the glass at a moment is what was there last", () => {
  const glass = [[0.5, 1], [0.7, 3], [2, 9]];
  assert.deepEqual([0.4, 0.5, 1, 2, 5].map((at) => wordsAt(glass, at)), [0, 1, 3, 9, 9]);
});

const SERVER = { seq: 7, step: 30, left: 1000, came: 1001, logged: 1003, written: 1006 };
const BROWSER = { read: 1010, parsed: 1015, painted: 1021 };

test("a token's stages lie between its moments, and add up to the whole way", () => {
  const { step, all, ...spans } = stagesOf(SERVER, BROWSER);
  assert.deepEqual(spans, { handover: 1, log: 2, socket: 3, network: 4, parse: 5, paint: 6 });
  assert.deepEqual([step, all], [30, 21]);
});

test("clocks that differ by a little give no time below zero, and what is not known is null", () => {
  const { socket, network } = stagesOf(SERVER, { ...BROWSER, read: 1005 });
  assert.deepEqual([socket, network], [2, 0]);
  const { step, handover, log, all } = stagesOf({ ...SERVER, left: null, step: null }, BROWSER);
  assert.deepEqual([step, handover, log, all], [null, null, 2, null]);
});

test("the median", () => {
  assert.deepEqual([median([]), median([null]), median([3]), median([9, 1, null, 5]), median([4, 1])], [null, null, 3, 5, 2.5]);
});

const GLASS = { asked: 0, read: 90, parsed: 92, painted: 100 };
const PHASES = { network_in: 0.01, auth: 0.002, intake: 0.008, queue: 0.005, prefill: 0.05, generation: 3 };
const sum = (parts) => parts.reduce((total, { ms }) => total + ms, 0);

test("the time to the first token: all parts are what the glass took, the server's parts what the server says", () => {
  const { server, glass, parts } = firstTokenParts({ phases: PHASES, breakdown: { ttft: 0.07 } }, GLASS);
  assert.deepEqual([server, glass].map(Math.round), [70, 100]);
  assert.deepEqual(
    parts.map(({ key, ms }) => [key, Math.round(ms)]),
    [["way_in", 10], ["auth", 2], ["intake", 8], ["queue", 5], ["prefill", 50], ["commit", 5], ["way_out", 10], ["parse", 2], ["paint", 8]],
  );
  assert.equal(Math.round(sum(parts)), 100);
  assert.equal(Math.round(sum(parts.filter(({ isServer }) => isServer))), 70);
});

test("an answer that paused has one part at the server, and a clock that is not believed one way", () => {
  const { parts } = firstTokenParts({ phases: { auth: 0.002, first_token: 0.05 }, breakdown: { ttft: 0.07 } }, GLASS);
  assert.deepEqual(parts.map(({ key, ms }) => [key, Math.round(ms)]), [["server", 70], ["ways", 20], ["parse", 2], ["paint", 8]]);
  assert.equal(firstTokenParts({ phases: PHASES, breakdown: {} }, GLASS), null);
});

test("parts that two processes have measured are cut to what the server took", () => {
  const { parts } = firstTokenParts({ phases: PHASES, breakdown: { ttft: 0.06 } }, GLASS);
  assert.equal(Math.round(sum(parts.filter(({ isServer }) => isServer))), 60);
  assert.ok(parts.every(({ ms }) => ms >= 0));
});
