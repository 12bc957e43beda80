// The pure files of the lab: deliveries.js and score.js.
import assert from "node:assert/strict";
import { test } from "node:test";

import { flushed, janky, seeded, streamed, whole } from "../../project/lab/static/lab/deliveries.js";
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

test("who never waits has a score of 100", () => {
  const figures = reading([[0, 40]], 4);
  assert.deepEqual([figures.score, figures.readSeconds, figures.doneSeconds, figures.laterSeconds], [100, 10, 10, 0]);
});

test("a wait for the first word counts, and so does a standstill beyond what is still to be read", () => {
  assert.equal(reading([[10, 40]], 4).score, 50);
  // 20 words last for 5 s; the other 20 come at 8 s: 3 s of waiting.
  const figures = reading([[0, 20], [8, 40]], 4);
  assert.deepEqual([figures.laterSeconds, figures.doneSeconds, figures.stillSeconds], [3, 13, 8]);
  // at 4 s they come in time, however long the standstill.
  assert.equal(reading([[0, 20], [4, 40]], 4).score, 100);
});

test("nothing on the glass has no reading", () => {
  assert.equal(reading([]), null);
});

test("the glass at a moment is what was there last", () => {
  const glass = [[0.5, 1], [0.7, 3], [2, 9]];
  assert.deepEqual([0.4, 0.5, 1, 2, 5].map((at) => wordsAt(glass, at)), [0, 1, 3, 9, 9]);
});
