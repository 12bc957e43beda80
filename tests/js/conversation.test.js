// conversation.js: what a browser keeps of a conversation, and what it forgets.
import assert from "node:assert/strict";
import { test } from "node:test";

import { Conversation, isLive, newId, newTurn, withoutThinking } from "../../streamserve/static/streamserve/conversation.js";

/** Web Storage in memory: names are its keys, as `Object.keys(localStorage)` gives them. */
class MemoryStorage {
  getItem(name) {
    return Object.hasOwn(this, name) ? this[name] : null;
  }
  setItem(name, value) {
    this[name] = value;
  }
  removeItem(name) {
    delete this[name];
  }
  get length() {
    return Object.keys(this).length;
  }
  key(index) {
    return Object.keys(this)[index] ?? null;
  }
}

/** @param {any} storage @param {any} own */
const open = (storage, own = new MemoryStorage()) => new Conversation("ss/user/chat", storage, own);

test("another tab opens the conversation that was begun last, with its turns", () => {
  const storage = new MemoryStorage();
  const first = open(storage);
  const turn = first.add("Why?");
  turn.text = "Because.";
  first.save(turn);
  const second = open(storage);
  assert.equal(second.id, first.id);
  const added = [];
  second.merge({ isOurs: () => false, added: (one) => added.push(one), changed: () => {}, removed: () => {} });
  assert.equal(added.length, 1);
  assert.deepEqual(second.turns.map(({ question, text }) => [question, text]), [["Why?", "Because."]]);
});

test("a new chat leaves the old one where it can be opened again", () => {
  const storage = new MemoryStorage();
  const chat = open(storage);
  const { id } = chat;
  chat.save(chat.add("One?"));
  chat.renew();
  assert.notEqual(chat.id, id);
  assert.equal(chat.turns.length, 0);
  assert.equal(chat.left, id);
});

test("turns stand in the order of asking, within one millisecond too", () => {
  const chat = open(new MemoryStorage());
  const ids = ["a", "b", "c"].map((question) => chat.add(question).id);
  assert.deepEqual([...ids].sort(), ids);
  assert.equal(new Set(ids).size, 3);
});

test("a storage that refuses everything does not break the chat", () => {
  const refuse = () => {
    throw new Error("forbidden");
  };
  const forbidden = { getItem: refuse, setItem: refuse, removeItem: refuse };
  const chat = open(forbidden, /** @type {any} */ (forbidden));
  const turn = chat.add("Still?");
  chat.save(turn);
  assert.equal(chat.turns[0], turn);
});

test("a turn is live until it ends", () => {
  const turn = newTurn("?");
  assert.equal(isLive(turn), true);
  assert.equal(isLive({ ...turn, state: "stopped" }), false);
});

test("ids of conversations have the form that is read back", () => {
  assert.match(newId(), /^[0-9]+-[0-9]+$/);
});

test("the model is not shown its old thoughts", () => {
  assert.equal(withoutThinking("<think>hm</think>Yes").trim(), "Yes");
});
