// delivery_checks.js: what a probe shows of the way to a browser.

import assert from "node:assert/strict";
import { test } from "node:test";
import { buffering, compression, delays, http, request, response } from "../../streamserve/static/streamserve/delivery_checks.js";

const CLOCK = 5000; // how far the browser's clock is ahead
const arriving = (late) => late.map((delay, number) => ({ sent: number / 4, at: CLOCK + number / 4 + delay }));

test("delays count from the fastest event, whatever the clocks", () => {
  assert.deepEqual(delays(arriving([0.5, 0, 0.25])), [0.5, 0, 0.25]);
});

test("events that are held are told from a browser that stalls", () => {
  const held = Array.from({ length: 12 }, (_, number) => 3 - number / 4);
  assert.equal(buffering(arriving(held)).fault, "buffered");
  assert.equal(buffering(arriving([0, 0, 0, 0, 1, 0.75, 0.5, 0.25, 0, 0, 0, 0])).fault, "");
  assert.equal(buffering(arriving([0, 0])).state, "could not tell");
});

test("each fault has the doctor's name", () => {
  const here = { host: "example.org", protocol: "https:" };
  const seen = { host: "example.org", scheme: "https", client: "198.51.100.1" };
  const headers = { "content-type": "text/event-stream", "cache-control": "no-cache", "x-stream-id": "doctor" };
  const without = (name, value = null) => (asked) => (asked === name ? value : headers[asked]);
  assert.equal(compression("gzip").fault, "compressed");
  assert.equal(http("http/1.1", "1.1", true).fault, "no_http2");
  assert.equal(http("h2", "1.0", true).fault, "http10");
  assert.equal(request({ ...seen, host: "10.0.0.1" }, here).fault, "host_changed");
  assert.equal(request({ ...seen, scheme: "http" }, here).fault, "scheme_unknown");
  assert.equal(response(without("content-type", "text/plain")).fault, "content_type_changed");
  assert.equal(response(without("cache-control")).fault, "cacheable");
  assert.equal(response(without("x-stream-id")).fault, "stream_id_lost");
});

test("nothing is found on a right way", () => {
  const all = [
    buffering(arriving([0, 0, 0])),
    compression("identity"),
    compression(null),
    http("h2", "1.1", true),
    http("http/1.1", "1.1", false),
    request({ host: "a:1", scheme: "http", client: "::1" }, { host: "a:1", protocol: "http:" }),
    response((name) => ({ "content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-stream-id": "x" })[name]),
  ];
  assert.deepEqual(all.map(({ state }) => state), Array(all.length).fill("ok"));
});
