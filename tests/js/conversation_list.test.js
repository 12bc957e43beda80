// conversation_index.js, server_turns.js, server_conversation.js: the server's list and messages, as the page shows them.
import assert from "node:assert/strict";
import { test } from "node:test";

import { wholeOf } from "../../streamserve/static/streamserve/blocks.js";
import { ConversationIndex, groupsOf, inOrder } from "../../streamserve/static/streamserve/conversation_index.js";
import { beginPart } from "../../streamserve/static/streamserve/parts.js";
import { ConversationRoutes } from "../../streamserve/static/streamserve/conversation_routes.js";
import { ServerConversation } from "../../streamserve/static/streamserve/server_conversation.js";
import { turnsOf } from "../../streamserve/static/streamserve/server_turns.js";

test("a list that has not changed is not sent again", async (t) => {
  const sent = [];
  t.mock.method(globalThis, "fetch", async (_url, { headers }) => {
    sent.push(headers["If-None-Match"]);
    if (headers["If-None-Match"] === '"1"') return new Response(null, { status: 304 });
    return new Response(JSON.stringify({ conversations: [], has_more: false }), { headers: { ETag: '"1"' } });
  });
  const routes = new ConversationRoutes("/conversations", () => ({}));
  const first = await routes.list({ limit: 40 });
  assert.deepEqual(await routes.list({ limit: 40 }), first);
  assert.deepEqual(sent, [undefined, '"1"']);
});

const conversation = (id, updated, fields = {}) => ({ id, updated, pinned: false, title: id, leaf: "m", running: false, ...fields });
const ids = (index) => index.shown.map(({ id }) => id);

test("the pinned stand first, then the newest", () => {
  const sorted = [conversation("a", 1), conversation("b", 3), conversation("c", 2, { pinned: true })].sort(inOrder);
  assert.deepEqual(sorted.map(({ id }) => id), ["c", "b", "a"]);
});

test("what stands behind the last loaded page is not shown until its page is loaded", () => {
  const index = new ConversationIndex();
  index.takeFirst([conversation("a", 9), conversation("b", 8)], true);
  index.put(conversation("old", 1)); // opened by its address
  assert.deepEqual(ids(index), ["a", "b"]);
  assert.equal(index.cursor, "b");
  index.takeNext([conversation("c", 7), conversation("old", 1)], false);
  assert.deepEqual(ids(index), ["a", "b", "c", "old"]);
});

test("a first page that comes again brings what is new, and removes what was deleted elsewhere", () => {
  const index = new ConversationIndex();
  index.takeFirst([conversation("a", 9), conversation("b", 8)], true);
  index.takeNext([conversation("c", 7)], false);
  index.takeFirst([conversation("new", 10), conversation("b", 8)], true);
  assert.deepEqual(ids(index), ["new", "b", "c"]);
  index.takeFirst([conversation("b", 8)], false);
  assert.deepEqual(ids(index), ["b"]);
});

test("a conversation that is updated moves to the front, and is there once", () => {
  const index = new ConversationIndex();
  index.takeFirst([conversation("a", 9), conversation("b", 8)], true);
  index.takeFirst([conversation("c", 12), conversation("a", 9)], true);
  assert.deepEqual(ids(index), ["c", "a", "b"]);
});

test("a conversation without a message is not shown", () => {
  const index = new ConversationIndex();
  index.takeFirst([conversation("a", 9, { leaf: null }), conversation("b", 8)], false);
  assert.deepEqual(ids(index), ["b"]);
});

test("groups are days of the visitor's calendar, then months", () => {
  const at = (...date) => new Date(...date).getTime() / 1000;
  const now = new Date(2026, 10, 26, 0, 30).getTime();
  const list = [
    conversation("p", at(2026, 1, 1), { pinned: true }),
    conversation("t", at(2026, 10, 26, 0, 10)),
    conversation("y", at(2026, 10, 25, 23, 50)),
    conversation("w", at(2026, 10, 20)),
    conversation("m", at(2026, 10, 1)),
    conversation("o", at(2026, 8, 9)),
    conversation("o2", at(2026, 8, 1)),
  ];
  const groups = groupsOf(list, now).map(({ name, conversations }) => [name, conversations.length]);
  assert.deepEqual(groups.slice(0, 5), [["pinned", 1], ["today", 1], ["yesterday", 1], ["week", 1], ["month", 1]]);
  assert.deepEqual(groups.slice(5), [[new Date(2026, 8, 1).getTime(), 2]]);
});

// --- messages and turns ------------------------------------------------------------------------------------------------

const text = (words) => [{ index: 0, kind: "text", text: words }];
const common = { state: "done", citations: [], steps: [], attachments: [], stream: null, finish_reason: null, error: null, rating: null, comment: "" };
const usage = { prompt_tokens: 9, cached_tokens: 4, completion_tokens: 3 };
const question = (id, parent, words) => ({ ...common, id, parent, role: "user", blocks: text(words), usage });
const answer = (id, parent, words, fields = {}) => ({ ...common, id, parent, role: "assistant", blocks: text(words), finish_reason: "stop", usage, ...fields });

test("messages become turns: another answer has the same question, a changed question is another", () => {
  const turns = turnsOf([
    question("q1", null, "One?"), answer("a1", "q1", "Yes"), answer("a2", "q1", "No"),
    question("q2", "a1", "Two?"), answer("a3", "q2", "", { state: "running", blocks: [], stream: "s3", finish_reason: null }),
  ]);
  assert.deepEqual(turns.map(({ id, parent, question: asked }) => [id, parent, asked]), [["a1", "", "One?"], ["a2", "", "One?"], ["a3", "a1", "Two?"]]);
  assert.deepEqual(turns.map(({ state }) => state), ["done", "done", "streaming"]);
  assert.equal(turns[2].streamId, "s3");
  assert.equal(turns[0].figures.cachedTokens, 4);
});

test("an answer with thoughts keeps its blocks, and a failed answer names why", () => {
  const blocks = [{ index: 0, kind: "thinking", text: "hm" }, { index: 1, kind: "text", text: "Yes" }];
  const [thought, failed] = turnsOf([
    question("q", null, "?"), answer("a", "q", "", { blocks }), answer("b", "q", "Part", { state: "failed", error: "timeout" }),
  ]);
  assert.equal(thought.text, "Yes");
  assert.equal(thought.blocks.length, 2);
  assert.equal(failed.text, "Part");
  assert.match(failed.error.message, /took too long/);
});

test("an answer that asks has its questions, until another message goes on with it", () => {
  const asked = { finish_reason: "interrupt", approvals: [{ id: "c", name: "pay", arguments: "{}" }] };
  const messages = [question("q", null, "?"), answer("a", "q", "Shall I?", asked)];
  const [turn] = turnsOf(messages);
  assert.deepEqual([turn.finishReason, turn.approvals[0].name], ["interrupt", "pay"]);
  const [whole] = turnsOf([...messages, answer("b", "a", "Done.")]);
  assert.deepEqual([whole.id, whole.approvals, whole.earlier.length], ["b", [], 1]);
});

/** A server with these messages; `asked` are the requests that change something. */
function serverOf(messages, pageSize = 100) {
  const asked = [];
  return {
    asked,
    pages: 0,
    async messages(_id, { after }) {
      this.pages += 1;
      const from = after === null ? 0 : messages.findIndex(({ id }) => id === after) + 1;
      const page = messages.slice(from, from + pageSize);
      return { messages: page, has_more: from + pageSize < messages.length };
    },
    async create(fields) {
      asked.push(fields);
      return { id: "c1" };
    },
    async change(_id, fields) {
      asked.push(fields);
      return {};
    },
    async rate(_id, messageId, fields) {
      const at = messages.findIndex(({ id }) => id === messageId);
      messages[at] = { ...messages[at], ...fields };
      return messages[at];
    },
  };
}

const ON = { created: () => {} };
const open = (server) => {
  const chat = new ServerConversation(server, { key: "k", source: "chat", on: ON });
  chat.open("c1");
  return chat;
};
const merge = (chat, { isOurs = () => false } = {}) =>
  chat.merge({ isOurs, changed: (turn, stored) => Object.assign(turn, stored), removed: () => {} });
const shown = (chat) => chat.path.map(({ question: asked, text: said }) => [asked, said]);

test("all pages are loaded, and the branch of the conversation's leaf is shown", async () => {
  const server = serverOf([
    question("q1", null, "One?"), answer("a1", "q1", "Yes"), answer("a2", "q1", "No"), question("q2", "a1", "Two?"), answer("a3", "q2", "2"),
  ], 2);
  const chat = open(server);
  chat.leaf = "a2";
  await chat.load();
  merge(chat);
  assert.equal(server.pages, 3);
  assert.deepEqual(shown(chat), [["One?", "No"]]);
  chat.show(chat.turns[0]);
  assert.deepEqual(shown(chat), [["One?", "Yes"], ["Two?", "2"]]);
  assert.deepEqual(server.asked, [{ leaf: "a3" }]);
});

test("a later load asks for what had not ended, and follows what another device has asked", async () => {
  const messages = [question("q1", null, "One?"), answer("a1", "q1", "", { state: "running", stream: "s" })];
  const chat = open(serverOf(messages));
  await chat.load();
  merge(chat);
  assert.deepEqual(shown(chat), [["One?", ""]]);
  messages[1] = answer("a1", "q1", "Yes");
  messages.push(question("q2", "a1", "Two?"), answer("a2", "q2", "2"));
  await chat.load();
  merge(chat);
  assert.deepEqual(shown(chat), [["One?", "Yes"], ["Two?", "2"]]);
});

test("a first question makes the conversation once, and becomes the server's with its ids", async () => {
  const server = serverOf([]);
  const chat = new ServerConversation(server, { key: "k", source: "help", on: ON });
  const turn = chat.add("One?");
  const fields = await chat.fieldsFor(turn, "echo");
  assert.deepEqual(fields, { conversation: "c1", parent: null, prompt: "One?" });
  await chat.fieldsFor(turn, "echo");
  assert.deepEqual(server.asked, [{ model: "echo", source: "help" }]);
  chat.accepted(turn, new Headers({ "X-Message-Id": "a1", "X-Question-Id": "q1" }));
  assert.deepEqual([turn.id, turn.questionId, chat.leaf], ["a1", "q1", "a1"]);
  assert.deepEqual(await chat.fieldsFor(chat.add("Two?"), "echo"), { conversation: "c1", parent: "a1", prompt: "Two?" });
});

test("the same question again is another answer to it", async () => {
  const chat = open(serverOf([question("q1", null, "One?"), answer("a1", "q1", "Yes")]));
  await chat.load();
  merge(chat);
  const again = chat.add("One?", "");
  assert.deepEqual(await chat.fieldsFor(again, ""), { conversation: "c1", parent: "q1" });
  assert.deepEqual(await chat.fieldsFor(chat.add("Else?", ""), ""), { conversation: "c1", parent: null, prompt: "Else?" });
});

test("a rating stays, whatever was loaded before it, or is being loaded", async () => {
  const server = serverOf([question("q1", null, "One?"), answer("a1", "q1", "Yes")]);
  const chat = open(server);
  const { messages } = server;
  let release = () => {};
  let isHeld = true;
  server.messages = async (...asked) => {
    const page = await messages.apply(server, asked);
    if (isHeld) await new Promise((resolve) => (release = resolve));
    return page;
  };
  const loading = chat.load();
  await new Promise(setImmediate); // the page is on its way, from before the rating
  chat.messages.set("q1", question("q1", null, "One?")).set("a1", answer("a1", "q1", "Yes"));
  merge(chat);
  const [turn] = chat.turns;
  await chat.rate(turn, -1, "Too short");
  Object.assign(turn, { rating: -1, comment: "Too short" });
  isHeld = false;
  release();
  await loading;
  merge(chat);
  assert.deepEqual([turn.rating, turn.comment], [-1, "Too short"]);
  await chat.load(); // what has ended is not asked for again
  merge(chat);
  assert.deepEqual([turn.rating, turn.comment], [-1, "Too short"]);
});

test("a question whose response was lost gives way to the server's", async () => {
  const messages = [];
  const chat = open(serverOf(messages));
  await chat.load();
  const turn = chat.add("One?");
  Object.assign(turn, { state: "failed", isSent: true });
  messages.push(question("q1", null, "One?"), answer("a1", "q1", "Yes"));
  await chat.load();
  merge(chat);
  assert.deepEqual(chat.turns.map(({ id }) => id), ["a1"]);
  assert.deepEqual(shown(chat), [["One?", "Yes"]]);
});

test("what has ended here does not run again because the server has not written its end yet", async () => {
  const messages = [question("q1", null, "One?"), answer("a1", "q1", "", { state: "running", stream: "s" })];
  const chat = open(serverOf(messages));
  await chat.load();
  merge(chat);
  Object.assign(chat.turns[0], { state: "done", text: "Yes" });
  await chat.load();
  merge(chat);
  assert.equal(chat.turns[0].state, "done");
});

test("a conversation that was left while it was loading changes nothing", async () => {
  const chat = open(serverOf([question("q1", null, "One?"), answer("a1", "q1", "Yes")]));
  const loading = chat.load();
  chat.open(null);
  assert.equal(await loading, false);
  merge(chat);
  assert.equal(chat.turns.length, 0);
});

const STOPPED = { finish_reason: "cancelled" };

test("a continued answer is one turn with its earlier parts, and a turn of its own where a question follows it", () => {
  const messages = [question("q1", null, "One?"), answer("a1", "q1", "Half ", STOPPED), answer("a2", "a1", "of it")];
  const [turn, ...others] = turnsOf(messages);
  assert.deepEqual([turn.id, turn.parent, turn.question, wholeOf(turn).text], ["a2", "", "One?", "Half of it"]);
  assert.equal(others.length, 0);
  const asked = turnsOf([...messages, question("q2", "a1", "Two?"), answer("a3", "q2", "2")]);
  assert.deepEqual(asked.map(({ id, parent }) => [id, parent]), [["a1", ""], ["a2", ""], ["a3", "a1"]]);
});

test("a continuation names the answer that it continues, and gets the id of its own message", async () => {
  const chat = open(serverOf([question("q1", null, "One?"), answer("a1", "q1", "Half ", STOPPED)]));
  chat.leaf = "a1";
  await chat.load();
  merge(chat);
  const [turn] = chat.turns;
  beginPart(turn);
  assert.deepEqual(await chat.fieldsFor(turn, "echo"), { conversation: "c1", continue: "a1" });
  chat.accepted(turn, new Headers({ "X-Message-Id": "a2" }));
  assert.deepEqual([turn.id, turn.questionId, chat.leaf], ["a2", "q1", "a2"]);
});

test("what another device continues grows in its turn", async () => {
  const messages = [question("q1", null, "One?"), answer("a1", "q1", "Half ", STOPPED)];
  const chat = open(serverOf(messages));
  chat.leaf = "a1";
  await chat.load();
  merge(chat);
  const [turn] = chat.turns;
  messages.push(answer("a2", "a1", "", { state: "running", stream: "s2", blocks: [] }));
  await chat.load();
  merge(chat);
  assert.deepEqual(chat.turns, [turn]);
  assert.deepEqual([turn.id, turn.state, turn.streamId, wholeOf(turn).text], ["a2", "streaming", "s2", "Half "]);
  assert.deepEqual(chat.path, [turn]);
});
