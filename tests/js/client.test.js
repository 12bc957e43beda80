// client.js against a server of this process: events, stops, refusals, lost connections; partial_json.js by random values.
import assert from "node:assert/strict";
import { once } from "node:events";
import { readFileSync, readdirSync } from "node:fs";
import { createServer } from "node:http";
import { test } from "node:test";

import * as client from "../../streamserve/static/streamserve/client.js";

const { AnswerFailed, RequestFailed, ask, partialJson, resume } = client;
const ID = "f".repeat(32);
const DONE = { type: "done", data: { finish_reason: "stop", totalTokens: 2 } };

/** Serve `handlers`, one for each request, in order; return the address, what was asked, and an end. */
async function serving(t, ...handlers) {
  const asked = [];
  const server = createServer(async (request, response) => {
    const body = await new Response(/** @type {any} */ (request)).text();
    asked.push({ url: request.url, method: request.method, headers: request.headers, body: body && JSON.parse(body) });
    const handler = /\/(ack|timings)$/.test(request.url ?? "") ? (_, done) => done.end('{"counted": true}') : handlers.shift();
    await handler(request, response);
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  t.after(() => {
    server.closeAllConnections();
    server.close();
  });
  return { url: `http://127.0.0.1:${/** @type {any} */ (server.address()).port}/streams`, asked };
}

/** A response that has these events, from `first` on; without the last one its connection breaks. */
function events(list, { first = 1, isCut = false } = {}) {
  return (_, response) => {
    response.writeHead(200, { "Content-Type": "text/event-stream", "X-Stream-Id": ID, "Streamserve-From": first, "Streamserve-Reader": "r" });
    for (const [at, { type, data }] of list.entries()) response.write(`event: ${type}\nid: log-${first + at}\ndata: ${JSON.stringify(data)}\n\n`);
    if (isCut) setTimeout(() => response.destroy(), 20);
    else response.end();
  };
}

const token = (text) => ({ type: "token", data: { text, token_ids: [1], index: 0, choice: 0 } });

/** The report of an answer, which nothing waits for. */
async function reported(asked) {
  for (;;) {
    const report = asked.find((one) => one.url.endsWith("/timings"));
    if (report !== undefined) return report;
    await new Promise((done) => setTimeout(done, 5));
  }
}

async function toEnd(answer) {
  for await (const event of answer) assert.ok(event.type);
}

function refusal(status, code, headers = {}) {
  return (_, response) => {
    response.writeHead(status, { "Content-Type": "application/json", ...headers });
    response.end(JSON.stringify({ error: { code, message: `It is ${code}.`, param: null } }));
  };
}

test("an answer is asked for, read and kept", async (t) => {
  const { url, asked } = await serving(t, events([{ type: "status", data: { status: "queued" } }, token("a "), token("b"), DONE]));
  const started = [];
  const answer = ask({ url, body: { prompt: "hi" }, headers: { "X-Own": "1" }, onStarted: (id) => started.push(id) });
  const types = [];
  for await (const event of answer) types.push([event.type, event.seq]);
  assert.deepEqual(types, [["status", 1], ["token", 2], ["token", 3], ["done", 4]]);
  assert.deepEqual([answer.text, answer.status?.status, answer.done?.finish_reason], ["a b", "queued", "stop"]);
  assert.deepEqual([started, answer.streamId, answer.lastId], [[ID], ID, "log-4"]);
  assert.deepEqual([asked[0].body, asked[0].headers["x-own"]], [{ prompt: "hi" }, "1"]);
  await assert.rejects(() => toEnd(answer), /has been read/);
});

test("after a lost connection the rest follows, each event once", async (t) => {
  const { url, asked } = await serving(t, events([token("a")], { isCut: true }), events([token("b"), DONE], { first: 2 }));
  const links = [];
  const answer = ask({ url, body: {}, onConnection: ({ isLost }) => links.push(isLost) });
  await toEnd(answer);
  assert.equal(answer.text, "ab");
  const again = asked.find((one) => one.method === "GET");
  assert.deepEqual([again.url, again.headers["last-event-id"]], [`/streams/${ID}/events`, "log-1"]);
  assert.deepEqual(links, [false, false]); // the first try is at once
});

test("a reload comes back to all of it", async (t) => {
  const { url, asked } = await serving(t, events([token("a"), token("b"), DONE]));
  const answer = resume(ID, { url });
  await toEnd(answer);
  assert.equal(answer.text, "ab");
  assert.equal(asked[0].headers["last-event-id"], undefined);
});

test("a refusal that may pass is waited for, with the same key", async (t) => {
  const { url, asked } = await serving(t, refusal(503, "engine_loading", { "Retry-After": "1" }), events([token("a"), DONE]));
  const answer = ask(url, {});
  await toEnd(answer);
  assert.equal(answer.text, "a");
  assert.equal(asked[0].headers["idempotency-key"], asked[1].headers["idempotency-key"]);
});

test("a refusal is an error with its code", async (t) => {
  const { url } = await serving(t, refusal(404, "model_not_found"));
  await assert.rejects(
    () => toEnd(ask(url, {})),
    (error) => error instanceof RequestFailed && error.status === 404 && error.code === "model_not_found" && error.message === "It is model_not_found.",
  );
});

test("an answer that fails throws after its last event", async (t) => {
  const { url } = await serving(t, events([token("a"), { type: "error", data: { code: "engine_died", message: "Gone.", retryable: true } }]));
  const answer = ask(url, {});
  const types = [];
  await assert.rejects(
    async () => { for await (const { type } of answer) types.push(type); },
    (error) => error instanceof AnswerFailed && error.code === "engine_died" && error.isRetryable,
  );
  assert.deepEqual([types, answer.text], [["token", "error"], "a"]);
});

test("a stop keeps what was read, and the loop ends", async (t) => {
  let open;
  const { url, asked } = await serving(
    t,
    (request, response) => {
      events([token("a"), token("b")])(request, { writeHead: (...all) => response.writeHead(...all), write: (text) => response.write(text), end: () => {} });
      open = response;
    },
    (_, response) => {
      response.end("{}");
      open.end(`event: token\nid: log-3\ndata: ${JSON.stringify(token("c").data)}\n\nevent: done\nid: log-4\ndata: {"finish_reason":"cancelled"}\n\n`);
    },
  );
  const answer = ask(url, {});
  for await (const { seq } of answer) if (seq === 2) assert.equal(await answer.stop(), true);
  assert.deepEqual([answer.text, answer.done?.finish_reason], ["ab", "cancelled"]);
  const stop = asked.find((one) => one.url === `/streams/${ID}/stop`);
  assert.deepEqual(stop.body, { seen_seq: 2 });
});

test("what the loop has shown is acknowledged", async (t) => {
  const { url, asked } = await serving(t, (_, response) => {
    events([token("a"), token("b")])(_, { writeHead: (...all) => response.writeHead(...all), write: (text) => response.write(text), end: () => {} });
  });
  const answer = ask(url, {});
  for await (const { seq } of answer) {
    if (seq < 2) continue;
    while (!asked.some((one) => one.url.endsWith("/ack"))) await new Promise((done) => setTimeout(done, 5));
    break; // leaves the answer, which can be resumed
  }
  assert.deepEqual(asked.find((one) => one.url.endsWith("/ack")).body, { reader: "r", seq: 1, away: false });
});

test("what was seen is reported once, after the end, with the headers of the answer", async (t) => {
  const { url, asked } = await serving(t, events([token("a")], { isCut: true }), events([token("b"), DONE], { first: 2 }));
  const answer = ask({ url, body: {}, headers: { Authorization: "Bearer key" } });
  await toEnd(answer);
  const report = await reported(asked);
  assert.deepEqual([report.url, report.headers.authorization], [`/streams/${ID}/timings`, "Bearer key"]);
  const { headers, first_byte: byte, first_delta: delta, ended, ...rest } = report.body;
  assert.ok(0 <= headers && headers <= byte && byte <= delta && delta <= ended, JSON.stringify(report.body));
  assert.deepEqual([rest.first_paint, rest.last_paint, rest.reconnects, rest.hidden], [null, null, 1, false]); // Node paints nothing
});

test("a reader that came back, or may not report, reports nothing", async (t) => {
  const whole = events([token("a"), DONE]);
  const { url, asked } = await serving(t, whole, whole, whole);
  await toEnd(resume(ID, { url }));
  await toEnd(ask({ url, body: {}, reportsTimings: false }));
  await toEnd(ask({ url, body: { n: 3 } })); // its report is the first
  await reported(asked);
  assert.equal(asked.filter((one) => one.url.endsWith("/timings")).length, 1);
  assert.deepEqual(asked.at(-1).url, `/streams/${ID}/timings`);
});

test("a pipeline's answer is followed beside it, and what it asks is answered there", async (t) => {
  const call = { id: "call_1", name: "refund", arguments: "{}", message: "Refund 5 €?" };
  const interrupt = { type: "done", data: { finish_reason: "interrupt" } };
  const { url, asked } = await serving(t, events([token("a"), { type: "approval", data: call }], { isCut: true }), events([interrupt], { first: 3 }), events([token("b"), DONE]));
  const answer = ask(url.replace("/streams", "/pipelines/billing"), {});
  await toEnd(answer);
  assert.deepEqual([answer.done?.finish_reason, answer.approvals], ["interrupt", [call]]);
  const rest = answer.approve({ call_1: true });
  await toEnd(rest);
  assert.equal(rest.text, "b");
  assert.deepEqual(asked.filter((one) => !/\/(ack|timings)$/.test(one.url)).map((one) => one.url), ["/pipelines/billing", `/streams/${ID}/events`, `/streams/${ID}/approvals`]);
  assert.deepEqual(asked.find((one) => one.url.endsWith("/approvals")).body, { approvals: [{ id: "call_1", allow: true }] });
});

test("the types name what the module exports", () => {
  const types = readFileSync(new URL("../../streamserve/static/streamserve/client.d.ts", import.meta.url), "utf8");
  const named = [...types.matchAll(/^export (?:function|class) (\w+)/gm)].map(([, name]) => name);
  assert.deepEqual([...new Set(named)].sort(), Object.keys(client).sort());
});

// --- partial JSON ----------------------------------------------------------------------------------------------------

/** Whether `later` has all that `before` has, and perhaps more. */
function hasGrown(before, later) {
  if (before === undefined) return true;
  if (typeof before === "string") return typeof later === "string" && later.startsWith(before);
  if (Array.isArray(before)) return Array.isArray(later) && before.every((one, at) => at < later.length && hasGrown(one, later[at]));
  if (before !== null && typeof before === "object") {
    return later !== null && typeof later === "object" && Object.keys(before).every((key) => Object.hasOwn(later, key) && hasGrown(before[key], later[key]));
  }
  return Object.is(before, later);
}

function makeRandom(seed) {
  let state = seed;
  return (most) => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return Math.floor((state / 2 ** 32) * most);
  };
}

const TEXTS = ["", "a", "né", "😀", '"', "\\", "a\nb", "\u2028", "</script>", "\ud83d", "x".repeat(9), "__proto__", "true"];
const NUMBERS = [0, -0.5, 12, 1e21, -1.5e-7, 123456789, 3.14159];

function randomValue(random, depth) {
  const kind = random(depth > 3 ? 4 : 6);
  if (kind === 0) return TEXTS[random(TEXTS.length)] + TEXTS[random(TEXTS.length)];
  if (kind === 1) return NUMBERS[random(NUMBERS.length)];
  if (kind === 2) return [true, false, null][random(3)];
  if (kind === 3) return TEXTS[random(TEXTS.length)];
  const many = random(4);
  if (kind === 4) return Array.from({ length: many }, () => randomValue(random, depth + 1));
  return Object.fromEntries(Array.from({ length: many }, (_, at) => [`${TEXTS[random(TEXTS.length)]}${at || ""}`, randomValue(random, depth + 1)]));
}

const escaped = (text) => text.replace(/[^ -~]/g, (char) => `\\u${char.charCodeAt(0).toString(16).padStart(4, "0")}`);

test("every beginning of JSON has a value that only grows, to the whole value", () => {
  for (let seed = 1; seed <= 400; seed += 1) {
    const value = randomValue(makeRandom(seed), 0);
    for (const text of [JSON.stringify(value), JSON.stringify(value, null, 2), escaped(JSON.stringify(value))]) {
      let before;
      for (let end = 0; end <= text.length; end += 1) {
        const now = partialJson(text.slice(0, end));
        assert.ok(hasGrown(before, now), `seed ${seed}: ${JSON.stringify(before)} → ${JSON.stringify(now)} of ${text.slice(0, end)}`);
        before = now;
      }
      assert.ok(hasGrown(before, partialJson(text, { isWhole: true })), `seed ${seed}`);
      assert.deepEqual(partialJson(text, { isWhole: true }), JSON.parse(text), `seed ${seed}: ${text}`);
    }
  }
});

test("what may still change is not there yet", () => {
  assert.deepEqual(partialJson('{"a": 12'), {});
  assert.deepEqual(partialJson('{"a": 12, "b": tr'), { a: 12 });
  assert.deepEqual(partialJson('{"a": "x\\u26'), { a: "x" });
  assert.deepEqual(partialJson('["\\ud83d'), [""]);
  assert.equal(partialJson(""), undefined);
  assert.equal(partialJson("12"), undefined);
  assert.equal(partialJson("12", { isWhole: true }), 12);
});

test("what is no JSON keeps what stands before the fault", () => {
  assert.deepEqual(partialJson('{"a": 1, b: 2}'), { a: 1 });
  assert.deepEqual(partialJson("[1 2]"), [1]);
  assert.equal(partialJson("Hello"), undefined);
  assert.ok(Array.isArray(partialJson("[".repeat(100_000))));
});

test("no other module opens a stream of ours", () => {
  const own = ["acks.js", "client.js", "sse.js", "stream.js"];
  const folders = ["../../streamserve/static/streamserve/", "../../project/lab/static/lab/"].map((path) => new URL(path, import.meta.url));
  for (const folder of folders) {
    for (const name of readdirSync(folder).filter((file) => file.endsWith(".js") && !own.includes(file))) {
      const text = readFileSync(new URL(name, folder), "utf8");
      assert.doesNotMatch(text, /from "[./a-z]*\/(acks|sse|stream)\.js"/, name);
    }
  }
});
