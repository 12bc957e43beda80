// blocks.js: an answer's events as blocks of text, thoughts and calls.
import assert from "node:assert/strict";
import { test } from "node:test";

import { addEvent, cutTo, endAll, extentOf, hasContent, wholeOf } from "../../streamserve/static/streamserve/blocks.js";
import { answersOf, beginPart, beginningOf, canContinue, endPart, isAsking } from "../../streamserve/static/streamserve/parts.js";
import { newTurn } from "../../streamserve/static/streamserve/turn_tree.js";

function turnOf(...events) {
  const turn = newTurn("?");
  for (const [type, data, now] of events) assert.equal(addEvent(turn, type, { choice: 0, ...data }, now), true);
  return turn;
}

test("text alone has no blocks", () => {
  const turn = turnOf(["token", { text: "He" }], ["token", { text: "llo" }]);
  assert.equal(turn.text, "Hello");
  assert.deepEqual(turn.blocks, []);
});

test("a thought is timed and is not part of the text", () => {
  const turn = turnOf(
    ["block_start", { index: 0, kind: "thinking" }, 1000],
    ["token", { index: 0, text: "hm" }],
    ["block_stop", { index: 0 }, 4000],
    ["block_start", { index: 1, kind: "text" }],
    ["token", { index: 1, text: "Yes" }],
  );
  assert.equal(turn.text, "Yes");
  assert.deepEqual(
    turn.blocks.map(({ kind, text, isOpen, seconds }) => ({ kind, text, isOpen, seconds })),
    [
      { kind: "thinking", text: "hm", isOpen: false, seconds: 3 },
      { kind: "text", text: "Yes", isOpen: true, seconds: undefined },
    ],
  );
});

test("text before the first block becomes a block of its own", () => {
  const turn = turnOf(["token", { text: "Look: " }], ["block_start", { index: 1, kind: "tool_use", id: "c1", name: "find" }]);
  assert.deepEqual(turn.blocks.map(({ kind, text }) => [kind, text]), [["text", "Look: "], ["tool_use", ""]]);
});

test("other choices are not shown, and unknown events are left to the caller", () => {
  const turn = turnOf(["token", { choice: 1, text: "other" }], ["block_start", { choice: 1, index: 0, kind: "thinking" }]);
  assert.equal(hasContent(turn), false);
  assert.equal(addEvent(turn, "status", {}), false);
});

test("a snapshot replaces everything, and says the same as the events", () => {
  const turn = turnOf(["token", { text: "old" }], ["citation", { source: 1, id: "a", title: "A" }]);
  addEvent(turn, "snapshot", { text: "new", blocks: [{ index: 0, kind: "text", text: "new", is_open: true }], citations: [] });
  assert.equal(turn.text, "new");
  assert.deepEqual(turn.blocks, [{ index: 0, kind: "text", text: "new", isOpen: true }]);
  assert.deepEqual(turn.citations, []);
});

test("a source that is cited twice is listed once", () => {
  const source = { source: 1, id: "a", title: "A", url: "/a" };
  assert.equal(turnOf(["citation", source], ["citation", source]).citations.length, 1);
});

test("a cut takes back exactly what came after", () => {
  const turn = turnOf(["token", { text: "kept" }]);
  const extent = extentOf(turn);
  addEvent(turn, "token", { text: " lost" });
  addEvent(turn, "block_start", { choice: 0, index: 1, kind: "thinking" }, 0);
  cutTo(turn, extent);
  assert.equal(turn.text, "kept");
  assert.deepEqual(turn.blocks, []);
});

test("what was cut off ends", () => {
  const turn = turnOf(["block_start", { index: 0, kind: "thinking" }, 0]);
  endAll(turn, 2000);
  assert.equal(turn.blocks[0].isOpen, false);
  assert.equal(turn.blocks[0].seconds, 2);
});

test("a continued answer is one text, whose seam is inside a block", () => {
  const earlier = { text: "Half of the", blocks: [], citations: [] };
  const plain = { ...newTurn("?"), earlier: [earlier], text: " answer" };
  assert.equal(wholeOf(plain).text, "Half of the answer");
  assert.deepEqual(wholeOf(plain).blocks, []);
  const thought = { index: 0, kind: "thinking", text: "hm", isOpen: false };
  const blocks = [thought, { index: 1, kind: "text", text: "Half of the", isOpen: false }];
  const whole = wholeOf({ ...plain, earlier: [{ ...earlier, blocks }] });
  assert.deepEqual(whole.blocks.map(({ kind, text }) => [kind, text]), [["thinking", "hm"], ["text", "Half of the answer"]]);
});

test("a continuation that brings nothing leaves the answer as it was", () => {
  const turn = { ...newTurn("?"), text: "Half ", state: "stopped", finishReason: "cancelled", streamId: "a", lastId: "a-3" };
  const before = structuredClone(turn);
  beginPart(turn);
  assert.equal(turn.state, "waiting");
  assert.deepEqual([turn.text, turn.streamId, turn.lastId], ["", null, ""]);
  assert.equal(endPart(turn), true);
  assert.deepEqual(turn, before);
  assert.equal(endPart(turn), false);
});

test("a run that asks is continued in its place, and asks again where that fails", () => {
  const asked = { id: "call_1", name: "pay", arguments: "{}" };
  const turn = turnOf(["block_start", { index: 0, kind: "server_tool_use", id: "call_1", name: "pay" }], ["approval", asked], ["approval", asked]);
  assert.deepEqual(turn.approvals, [{ ...asked, message: "" }], "a replay brings it again");
  Object.assign(turn, { state: "done", finishReason: "interrupt", streamId: "a" });
  assert.equal(isAsking(turn), true);
  beginPart(turn);
  turn.answers = { streamId: "a", approvals: [{ id: "call_1", allow: true }] };
  assert.equal(answersOf(turn).streamId, "a");
  assert.deepEqual(turn.approvals, []);
  endPart(turn);
  assert.equal(isAsking(turn), true);
  assert.equal(answersOf(turn), null);
  assert.equal(isAsking({ ...turn, error: { code: "approval_answered" } }), false);
});

test("a snapshot has what was asked", () => {
  const turn = turnOf(["snapshot", { text: "", seq: 4, approvals: [{ id: "c", name: "pay", arguments: "{}", message: "Pay?" }] }]);
  assert.deepEqual(turn.approvals.map(({ message }) => message), ["Pay?"]);
});

test("what can be continued was cut short, and ends with text", () => {
  const turn = { ...newTurn("?"), text: "<think>hm</think>Half ", state: "stopped" };
  assert.equal(canContinue(turn), true);
  assert.equal(beginningOf(turn), "Half ", "with its last space");
  assert.equal(canContinue({ ...turn, text: "<think>hm" }), false);
  assert.equal(canContinue({ ...turn, state: "done", finishReason: "stop" }), false);
  assert.equal(canContinue({ ...turn, state: "done", finishReason: "length" }), true);
  assert.equal(canContinue({ ...turn, error: { isFinal: true } }), false);
  const call = { index: 1, kind: "tool_use", text: "{}", isOpen: false };
  assert.equal(canContinue({ ...turn, blocks: [call] }), false);
});
