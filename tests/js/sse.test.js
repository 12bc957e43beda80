// sse.js: the WHATWG rules of text/event-stream (9.2.6), whatever the cuts between reads.
import assert from "node:assert/strict";
import { test } from "node:test";

import { EventParser, readEvents } from "../../streamserve/static/streamserve/sse.js";

function parse(...chunks) {
  const events = [];
  const parser = new EventParser((event) => events.push(event));
  for (const chunk of chunks) parser.feed(chunk);
  return { events, parser };
}

const STREAM = "\ufeffid: a-1\nevent: token\ndata: one\ndata: two\n\n: keepalive\nid: a-2\r\ndata:three\r\n\r\ndata: four\r\rretry: 50\n\n";

test("fields, comments, every line end, a leading BOM", () => {
  const { events, parser } = parse(STREAM);
  assert.deepEqual(events, [
    { type: "token", data: "one\ntwo", id: "a-1" },
    { type: "message", data: "three", id: "a-2" },
    { type: "message", data: "four", id: "a-2" },
  ]);
  assert.equal(parser.retryMs, 50);
});

test("any cut in two gives the same events", () => {
  const whole = parse(STREAM).events;
  for (let at = 0; at <= STREAM.length; at += 1) assert.deepEqual(parse(STREAM.slice(0, at), STREAM.slice(at)).events, whole, `cut at ${at}`);
});

test("an event without data is not dispatched, and its type does not stay", () => {
  assert.deepEqual(parse("event: done\n\ndata: x\n\n").events, [{ type: "message", data: "x", id: "" }]);
});

test("an id with NUL and a retry that is no number are ignored", () => {
  const { events, parser } = parse("id: a\0b\nretry: 1s\ndata: x\n\n");
  assert.equal(events[0].id, "");
  assert.equal(parser.retryMs, null);
});

test("an endless line is refused", () => {
  assert.throws(() => parse("data: ".padEnd(8 * 1024 * 1024 + 1, "x")), RangeError);
});

test("a character that two reads share is whole, and the unfinished last event is dropped", async () => {
  const bytes = new TextEncoder().encode("data: 😀\n\ndata: lost");
  const body = new ReadableStream({
    start(controller) {
      for (const byte of bytes) controller.enqueue(Uint8Array.of(byte));
      controller.close();
    },
  });
  let numReads = 0;
  const data = [];
  for await (const event of readEvents(body, () => (numReads += 1))) data.push(event.data);
  assert.deepEqual(data, ["😀"]);
  assert.equal(numReads, bytes.length);
});
