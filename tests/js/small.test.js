// The small pure files: json.js, words.js, loading.js, locks.js, acks.js, and the pure parts of stream.js and render.js.
import assert from "node:assert/strict";
import { test } from "node:test";

import { Acks } from "../../streamserve/static/streamserve/acks.js";
import { splitParts } from "../../streamserve/static/streamserve/answer_view.js";
import { classOf } from "../../streamserve/static/streamserve/code_colours.js";
import { cut } from "../../streamserve/static/streamserve/formulas.js";
import { isJson, mayBecomeJson, prettyJson } from "../../streamserve/static/streamserve/json.js";
import { loadingFigures, loadingWords } from "../../streamserve/static/streamserve/loading.js";
import { AskedLocks } from "../../streamserve/static/streamserve/locks.js";
import { parseBlocks, safeUrl } from "../../streamserve/static/streamserve/render.js";
import { Backoff, seqOf } from "../../streamserve/static/streamserve/stream.js";
import { count, decimal, useWords, words } from "../../streamserve/static/streamserve/words.js";

test("formatted JSON has the same characters, and reads the same", () => {
  const text = '{"a":[1,{"b":"x, y"}],"n":12345678901234567890,"e":{}}';
  const pretty = prettyJson(text);
  assert.equal(pretty.replace(/\s/g, ""), text.replace(/\s/g, ""));
  assert.deepEqual(JSON.parse(pretty), JSON.parse(text));
  assert.match(pretty, /"n": 12345678901234567890/);
});

test("a beginning of JSON is formatted, other text stays", () => {
  assert.equal(prettyJson('{"a":[1'), '{\n  "a": [\n    1');
  assert.equal(prettyJson("{x} is a set"), prettyJson("{x} is a set"));
  assert.equal(prettyJson("plain"), "plain");
});

test("what is JSON, and what may become it", () => {
  assert.equal(isJson('[{"a": 1}]'), true);
  assert.equal(isJson('{"a": '), false);
  assert.equal(mayBecomeJson('{"a": '), true);
  assert.equal(mayBecomeJson("[1] is a footnote"), false);
});

test("texts are translated, and values put in", () => {
  useWords({ "{n} left": "noch {n}" }, "de");
  assert.equal(words("{n} left", { n: 3 }), "noch 3");
  assert.equal(words("{n} of {m}", { n: 1 }), "1 of {m}");
  useWords({}, "en");
});

test("numbers are written as in the page's language", () => {
  useWords({}, "de");
  assert.deepEqual([count(12345), decimal(1.5, 2)], ["12.345", "1,50"]);
  useWords({}, "en");
  assert.deepEqual([count(12345), decimal(1.5, 2)], ["12,345", "1.50"]);
});

test("loading shows the parts that are known", () => {
  assert.equal(loadingFigures({ stage: "weights", fraction: 0.427, loadedBytes: 227e6, totalBytes: 540e6, elapsedSeconds: 3.9 }), "weights 42 % · 227 of 540 MB · 3 s");
  assert.equal(loadingFigures({}), "");
  assert.equal(loadingWords({ state: "failed", message: "No such folder." }), "The model cannot answer. No such folder.");
});

test("reconnects wait longer each time, never less than half of the first wait, never more than the most", () => {
  for (const random of [0, 0.5, 0.999]) {
    const backoff = new Backoff({ first: 1, most: 8 }, () => random);
    const waits = Array.from({ length: 6 }, () => backoff.nextSeconds());
    assert.ok(waits.every((wait, index) => wait >= 0.5 && wait <= Math.min(8, 2 ** index)));
    assert.deepEqual([...waits].sort((a, b) => a - b), waits);
    backoff.reset();
    assert.equal(backoff.nextSeconds(), waits[0]);
  }
});

test("the seq of an id is the number after its last dash", () => {
  assert.equal(seqOf("a1b2-17"), 17);
  assert.equal(seqOf(""), 0);
});

test("an address that could run something is no link", () => {
  for (const bad of ["javascript:alert(1)", "data:text/html,x", "//host/x", "https://user:pass@host/"]) assert.equal(safeUrl(bad), null, bad);
  assert.equal(safeUrl("https://example.com/a")?.href, "https://example.com/a");
});

test("markdown is cut into blocks, each with its own source", () => {
  const source = "# Title\n\ntext\nmore\n\n- a\n- b\n\n```py\nx = 1\n\n```\n| a |\n|---|\n| 1 |";
  assert.deepEqual(parseBlocks(source).map(({ type }) => type), ["heading", "paragraph", "list", "code", "table"]);
});

test("growing text changes only its last block", () => {
  const source = "one\n\ntwo\n\n- a\n- b\n\nthree";
  for (let at = 1; at <= source.length; at += 1) {
    const [before, after] = [parseBlocks(source.slice(0, at - 1)), parseBlocks(source.slice(0, at))];
    assert.deepEqual(after.slice(0, before.length - 1), before.slice(0, -1), `at ${at}`);
  }
});

test("thoughts between tags are parts of their own", () => {
  assert.deepEqual(splitParts("<think>hm</think>Yes", false).map(({ type, source }) => [type, source.trim()]), [["think", "hm"], ["text", "Yes"]]);
});

test("two tabs without Web Locks do not hold one name", async () => {
  const [mine, other] = [new BroadcastChannel("test.locks"), new BroadcastChannel("test.locks")];
  try {
    const [here, there] = [new AskedLocks(/** @type {any} */ (mine)), new AskedLocks(/** @type {any} */ (other))];
    const release = await here.take("turn");
    assert.notEqual(release, null);
    assert.equal(await there.take("turn"), null);
    release?.();
    release?.();
    assert.notEqual(await there.take("turn"), null);
  } finally {
    mine.close();
    other.close();
  }
});

test("acknowledgements: the first at once, then one a second, none for a reader that does not count", async () => {
  const sent = [];
  let now = 0;
  const acks = new Acks(async (ack) => (sent.push(ack), false), () => now);
  acks.shown(1); // no connection yet
  acks.begin("r1");
  acks.shown(2);
  await Promise.resolve();
  assert.deepEqual(sent, [{ reader: "r1", seq: 2, away: false }]);
  await Promise.resolve();
  now = 5;
  acks.shown(3); // the server said that they do not count
  assert.equal(sent.length, 1);
});

test("an acknowledgement that another web process must count is sent again", async (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const [sent, results] = [[], [null, true]];
  let now = 0;
  const acks = new Acks(async (ack) => (sent.push(ack.seq), results.shift()), () => now);
  const settle = async () => {
    for (let turn = 0; turn < 4; turn += 1) await Promise.resolve();
  };
  acks.begin("r1");
  acks.shown(2);
  await settle();
  assert.deepEqual(sent, [2]);
  now = 1;
  t.mock.timers.tick(1000);
  await settle();
  assert.deepEqual(sent, [2, 2]);
  now = 9;
  t.mock.timers.tick(8000); // it counted: there is nothing new
  await settle();
  assert.deepEqual(sent, [2, 2]);
});

test("after a slow acknowledgement the next waits as long as after a quick one", async (t) => {
  t.mock.timers.enable({ apis: ["setTimeout"] });
  const [sent, answers] = [[], []];
  let now = 0;
  const acks = new Acks((ack) => (sent.push(ack.seq), new Promise((resolve) => answers.push(resolve))), () => now);
  acks.begin("r1");
  acks.shown(2);
  acks.shown(3);
  now = 9;
  answers.shift()(true);
  for (let turn = 0; turn < 4; turn += 1) await Promise.resolve();
  assert.deepEqual(sent, [2], "the server has counted it only now");
  now = 10;
  t.mock.timers.tick(1000);
  assert.deepEqual(sent, [2, 3]);
});

test("a formula is whole between the delimiters that belong together", () => {
  assert.deepEqual(cut("\\(x\\)"), { tex: "x", isDisplay: false });
  assert.deepEqual(cut("$$x$$"), { tex: "x", isDisplay: true });
  assert.deepEqual(cut("\\[x\\]"), { tex: "x", isDisplay: true });
  assert.deepEqual(cut("$x$"), { tex: "x", isDisplay: false });
  for (const part of ["\\(x", "\\(x\\]", "$$", "$$x$", "x", `$${"x".repeat(2000)}$`]) assert.equal(cut(part), null, part);
});

test("a scope of highlight.js is a class by its first word", () => {
  assert.equal(classOf("title.function_"), "ss-hl-title");
  assert.equal(classOf("language:xml"), "ss-hl-language");
});
