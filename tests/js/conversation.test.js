// conversation.js: what a browser keeps of a conversation, and what it forgets.
import assert from "node:assert/strict";
import { test } from "node:test";

import { withoutThinking } from "../../streamserve/static/streamserve/blocks.js";
import { Conversation, newId } from "../../streamserve/static/streamserve/conversation.js";
import { isLive, newTurn } from "../../streamserve/static/streamserve/turn_tree.js";
import { beginPart } from "../../streamserve/static/streamserve/parts.js";

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

const merge = (chat, { isOurs = () => false } = {}) =>
  chat.merge({ isOurs, changed: (turn, stored) => Object.assign(turn, stored), removed: () => {} });

/** Ask and answer, and store it. */
function answered(chat, question, parent = undefined) {
  const turn = chat.add(question, parent);
  Object.assign(turn, { text: `About ${question}`, state: "done" });
  chat.save(turn);
  return turn;
}

const shown = (chat) => chat.path.map(({ question }) => question);

test("another tab opens the conversation that was begun last, with its turns", () => {
  const storage = new MemoryStorage();
  const first = open(storage);
  const turn = first.add("Why?");
  turn.text = "Because.";
  first.save(turn);
  const second = open(storage);
  assert.equal(second.id, first.id);
  merge(second);
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

test("a changed question is a branch, and the other branch stays", () => {
  const chat = open(new MemoryStorage());
  const first = answered(chat, "One?");
  const second = answered(chat, "Two?");
  answered(chat, "Three?");
  const changed = answered(chat, "Two, changed?", second.parent);
  assert.deepEqual(shown(chat), ["One?", "Two, changed?"]);
  assert.deepEqual(chat.siblings(changed), [second, changed]);
  assert.deepEqual(chat.siblings(first), [first]);
  chat.show(second);
  assert.deepEqual(shown(chat), ["One?", "Two?", "Three?"]);
});

test("going to a branch and back leads to the end where it was left", () => {
  const chat = open(new MemoryStorage());
  const left = answered(chat, "Left");
  const older = answered(chat, "Older");
  answered(chat, "Newer", left.id);
  chat.show(older);
  const right = answered(chat, "Right", "");
  assert.deepEqual(shown(chat), ["Right"]);
  chat.show(left);
  assert.deepEqual(shown(chat), ["Left", "Older"]);
  chat.show(right);
  assert.deepEqual(shown(chat), ["Right"]);
});

test("a request has the branch that leads to its question, and no other", () => {
  const chat = open(new MemoryStorage());
  const one = answered(chat, "One?");
  answered(chat, "Two?");
  const other = chat.add("Else?", one.id);
  const { messages } = chat.fieldsFor(other);
  assert.deepEqual(messages.map(({ content }) => content), ["One?", "About One?", "Else?"]);
});

test("a continuation is asked for with the text so far, and a later question after the whole answer", () => {
  const chat = open(new MemoryStorage());
  const turn = answered(chat, "Why?");
  Object.assign(turn, { text: "Half of ", state: "stopped" });
  beginPart(turn);
  const { messages, ...fields } = chat.fieldsFor(turn);
  assert.deepEqual(fields, { continue_final_message: true });
  assert.deepEqual(messages, [{ role: "user", content: "Why?" }, { role: "assistant", content: "Half of " }]);
  Object.assign(turn, { text: "it", state: "done" });
  chat.save(turn);
  assert.equal(chat.fieldsFor(chat.add("Then?")).messages[1].content, "Half of it");
});

test("a reload shows the branch that was shown, a new tab the one that was chosen last", () => {
  const [storage, own] = [new MemoryStorage(), new MemoryStorage()];
  const chat = open(storage, own);
  const one = answered(chat, "One?");
  answered(chat, "One, changed?", one.parent);
  chat.show(one);
  for (const again of [open(storage, own), open(storage)]) {
    merge(again);
    assert.deepEqual(shown(again), ["One?"]);
    assert.equal(again.siblings(one).length, 2);
  }
});

test("a tab follows what another tab adds to the branch it shows, and keeps its own otherwise", () => {
  const storage = new MemoryStorage();
  const [first, second] = [open(storage), open(storage)];
  const one = answered(first, "One?");
  merge(second);
  answered(first, "Two?");
  merge(second);
  assert.deepEqual(shown(second), ["One?", "Two?"]);
  answered(first, "One, changed?", one.parent);
  merge(second);
  assert.deepEqual(shown(second), ["One?", "Two?"], "it has ended, and stands beside");
  assert.equal(second.siblings(second.turns[0]).length, 2);
});

test("a tab shows what runs in another tab, unless an answer runs here", () => {
  const storage = new MemoryStorage();
  const [first, second, third] = [open(storage), open(storage), open(storage)];
  const one = answered(first, "One?");
  merge(second);
  merge(third);
  third.add("Mine?");
  first.save(first.add("One, changed?", one.parent));
  merge(second);
  merge(third, { isOurs: isLive });
  assert.deepEqual(shown(second), ["One, changed?"]);
  assert.deepEqual(shown(third), ["One?", "Mine?"]);
});

test("questions asked in two tabs at the same time are siblings, and neither is lost", () => {
  const storage = new MemoryStorage();
  const [first, second] = [open(storage), open(storage)];
  answered(first, "One?");
  merge(second);
  const [mine, other] = [first.add("Mine?"), second.add("Other?")];
  first.save(mine);
  second.save(other);
  merge(first, { isOurs: (turn) => turn === mine });
  merge(second, { isOurs: (turn) => turn === other });
  assert.deepEqual(shown(first), ["One?", "Mine?"]);
  assert.deepEqual(shown(second), ["One?", "Other?"]);
  assert.equal(first.siblings(mine).length, 2);
});

test("records of the version before are one branch, in the order of their times", () => {
  const storage = new MemoryStorage();
  const chat = open(storage);
  for (const [at, question] of ["One?", "Two?"].entries()) {
    storage.setItem(`${chat.name}/00000000${at + 1}-1`, JSON.stringify({ version: 2, revision: 1, question, text: "Yes", state: "done" }));
  }
  merge(chat);
  assert.deepEqual(shown(chat), ["One?", "Two?"]);
  assert.equal(chat.turns[1].parent, "000000001-1");
});

test("a record that no version wrote, or whose parent is no earlier turn, makes no circle", () => {
  const storage = new MemoryStorage();
  const chat = open(storage);
  const record = { version: 3, revision: 1, question: "Round?", text: "", state: "done", parent: "000000001-1" };
  storage.setItem(`${chat.name}/000000001-1`, JSON.stringify(record));
  storage.setItem(`${chat.name}/000000002-1`, JSON.stringify({ ...record, version: 99 }));
  merge(chat);
  assert.deepEqual(shown(chat), ["Round?"]);
});

test("too many turns go from other branches first", () => {
  const chat = open(new MemoryStorage());
  const other = answered(chat, "Other branch");
  const kept = answered(chat, "Kept", "");
  for (let count = 0; count < 199; count += 1) answered(chat, `Q${count}`);
  chat.trim();
  assert.equal(chat.turns.length, 200);
  assert.equal(chat.turns.includes(other), false);
  assert.equal(chat.path[0], kept);
});

test("an old conversation is forgotten with its branch shown, and this one never", () => {
  const storage = new MemoryStorage();
  const chat = open(storage);
  answered(chat, "Now");
  storage.setItem("ss/user/chat/1-2/000000001-1", "{}");
  storage.setItem("ss/user/chat/1-2/leaf", "000000001-1");
  assert.deepEqual(chat.oldOnes(), ["ss/user/chat/1-2"]);
  chat.forget("ss/user/chat/1-2");
  assert.equal(Object.keys(storage).some((name) => name.includes("1-2/")), false);
  assert.equal(chat.path.length, 1);
});
