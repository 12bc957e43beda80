// The conversation in the browser's storage, shared by the tabs of one browser. No DOM, no network.
//
//   KEY                 the id of the conversation that a new tab opens
//   KEY/left            of one tab: the id of the conversation that "New chat" has left
//   KEY/ID/TURN         one turn; TURN sorts by time
//   KEY/ID/leaf         the last turn of the branch shown: in this tab, and for a new tab
//
// What the chat uses (a conversation that the server keeps has the same):
//
//   id, name, nameFor(id), nameOf(turn)        names are of locks: of a conversation, of a turn
//   turns, path, siblings(turn), show(turn)    `show` goes to the branch through `turn`, to the end where it was left
//   add(question, parent), save(turn), remove(turn), stored(turn)
//   merge({isOurs, changed, removed}), trim()  what other tabs have done
//   fieldsFor(turn)                            fields of the request that asks for the answer of `turn`
//   accepted(turn, headers)                    the answer has begun: the headers of its response
//   isMostly(turn)                             whether the question is the larger part of its request
//   renew(), left, open(id), oldOnes(), forget(name)
//   rate(turn, rating, comment)                only of a server; a promise, which rejects where it could not be stored
//   exportUrl                                  only of a server: the address of the branch shown, as Markdown
//
// Invariant: a record is written by one tab only, which holds the lock of its name (locks.js). So tabs that ask at
// the same time add to one conversation, and none overwrites what another has stored. `revision` counts the writes.
// Invariant: `text`, `blocks`, `citations` and `lastId` of a turn are written together, so that a resume after `lastId` adds
// exactly what they lack.

import { withoutThinking, wholeOf } from "./blocks.js";
import { beginningOf } from "./parts.js";
import { TurnTree, isLive, newTurn } from "./turn_tree.js";

const VERSION = 3;
const LINEAR_VERSION = 2; // each turn follows the turn before it in time
const MAX_TURNS = 200;
const MAX_STORED_CHARS = 2_000_000;
const OLD_MS = 24 * 3600 * 1000; // a conversation that no tab shows is kept for a day: a reload may be under way
const TURN_ID = /^[0-9a-z]{9,}-[0-9a-z]+$/;

export class Conversation extends TurnTree {
  /** `storage` is common to all tabs, `own` is this tab's. */
  constructor(key, storage = storageOf("localStorage"), own = storageOf("sessionStorage")) {
    super();
    this.key = key;
    this.storage = storage;
    this.own = own;
    this.isStored = new WeakSet(); // turns that have a record
    this.use(this.pointed() ?? newId());
  }

  use(id) {
    this.id = id;
    this.clear();
    const name = `${this.name}/leaf`;
    this.leaf = this.get(this.own, name) ?? this.get(this.storage, name) ?? "";
  }

  /** The conversation of this tab; before it has a conversation, the last that another tab has begun. */
  pointed() {
    return idIn(this.get(this.own, this.key) ?? this.get(this.storage, this.key));
  }

  /** The name of this conversation, for a lock. */
  get name() {
    return this.nameFor(this.id);
  }

  nameFor(id) {
    return `${this.key}/${id}`;
  }

  /** The name of a turn's record and of its lock. */
  nameOf(turn) {
    return `${this.name}/${turn.id}`;
  }

  /** Begin another conversation. The previous conversation can be opened again until it is forgotten. */
  renew() {
    this.set(this.own, `${this.key}/left`, this.id);
    this.open(newId());
  }

  /** The id of the conversation that `renew` has left; null when there is none, or it is empty. */
  get left() {
    const id = idIn(this.get(this.own, `${this.key}/left`));
    return id !== null && turnNames(this.storage, this.nameFor(id)).length > 0 ? id : null;
  }

  /** Open a conversation: `merge` brings its turns. */
  open(id) {
    this.use(id);
    this.point();
  }

  // --- branches ------------------------------------------------------------------------------------------------------

  /** Show the branch through `turn`, in new tabs too. */
  show(turn) {
    super.show(turn);
    for (const storage of [this.own, this.storage]) this.set(storage, `${this.name}/leaf`, this.leaf);
  }

  /** Add a question after the turn `parent`, the last of the branch shown if none is named, and show it. */
  add(question, parent = this.path.at(-1)?.id ?? "") {
    const turn = newTurn(question, parent);
    const last = this.turns.at(-1);
    turn.id = turnId(Math.max(Date.now(), last === undefined ? 0 : timeOf(last.id) + 1));
    this.turns.push(turn);
    this.point();
    this.show(turn);
    return turn;
  }

  /** New tabs open this conversation. */
  point() {
    this.set(this.own, this.key, this.id);
    this.set(this.storage, this.key, this.id);
  }

  /** Best effort: a full or forbidden storage does not break the chat. */
  save(turn) {
    turn.revision += 1;
    if (this.set(this.storage, this.nameOf(turn), JSON.stringify({ version: VERSION, ...turn }))) this.isStored.add(turn);
  }

  /** Remove a turn that nothing follows, here and in the storage. */
  remove(turn) {
    this.turns.splice(this.turns.indexOf(turn), 1);
    this.drop(this.nameOf(turn));
  }

  /**
   * Take what other tabs have stored. Calls `changed(turn, stored)` and `removed(turn)`; `isOurs(turn)` names the turns
   * that this tab writes itself, which stay as they are.
   */
  merge({ isOurs, changed, removed }) {
    const pointed = this.pointed();
    if (this.turns.length === 0 && pointed !== null && pointed !== this.id) this.use(pointed);
    const names = turnNames(this.storage, this.name);
    for (const turn of [...this.turns]) {
      if (names.includes(this.nameOf(turn)) || !this.isStored.has(turn) || isOurs(turn)) continue;
      this.turns.splice(this.turns.indexOf(turn), 1);
      removed(turn);
    }
    const added = [];
    for (const name of names) {
      const known = this.turns.find((turn) => this.nameOf(turn) === name);
      if (known !== undefined && isOurs(known)) continue;
      const stored = this.read(name);
      if (stored === null) continue;
      if (known === undefined) added.push(this.insert(stored));
      else if (stored.revision > known.revision) changed(known, stored);
    }
    this.follow(added);
  }

  /** Show what another tab has asked, where it follows the branch shown, or runs while nothing runs there. */
  follow(added) {
    if (added.length > 0 && !this.turns.some(({ id }) => id === this.leaf)) this.show(this.turns.at(-1));
    for (const turn of added) {
      const isNewer = isLive(turn) && turn.id > this.leaf && !isLive(this.path.at(-1));
      if (turn.parent === this.leaf || isNewer) this.show(turn);
    }
  }

  insert(turn) {
    const at = this.turns.findIndex((other) => other.id > turn.id);
    this.turns.splice(at === -1 ? this.turns.length : at, 0, turn);
    this.isStored.add(turn);
    this.set(this.own, this.key, this.id); // from now on this tab's, whatever other tabs begin
    return turn;
  }

  /** What is stored of a turn; null if nothing readable is. */
  stored(turn) {
    return this.read(this.nameOf(turn));
  }

  read(name) {
    try {
      const { version, ...turn } = JSON.parse(this.get(this.storage, name) ?? "{}");
      if (![VERSION, LINEAR_VERSION].includes(version)) return null;
      if (typeof turn.question !== "string" || typeof turn.text !== "string") return null;
      const id = idOf(name);
      const parent = version === VERSION ? turn.parent : this.before(name);
      return { ...newTurn(turn.question), ...turn, id, parent: parent < id ? parent : "" }; // so that no branch is a circle
    } catch {
      return null;
    }
  }

  /** The id of the turn that was stored before a record; "" if there is none. */
  before(name) {
    return idOf(turnNames(this.storage, this.name).filter((other) => other < name).at(-1) ?? "");
  }

  /** Remove what is too much of this conversation: other branches before the branch shown, the oldest first. */
  trim() {
    const { path } = this;
    const others = this.turns.filter((turn) => !path.includes(turn));
    let chars = 0;
    for (const [age, turn] of [...others, ...path].reverse().entries()) {
      chars += this.get(this.storage, this.nameOf(turn))?.length ?? 0;
      if (age > 0 && (age >= MAX_TURNS || chars > MAX_STORED_CHARS)) this.remove(turn);
    }
  }

  /** Remove the records of a conversation by its name. */
  forget(name) {
    for (const one of namesIn(this.storage, `${name}/`)) this.drop(one);
  }

  /** The names of other conversations of this chat that are old enough to be forgotten. */
  oldOnes() {
    const newest = new Map();
    for (const name of namesIn(this.storage, `${this.key}/`)) {
      if (TURN_ID.test(idOf(name))) newest.set(name.slice(0, name.lastIndexOf("/")), timeOf(idOf(name)));
    }
    newest.delete(this.name);
    return [...newest].filter(([, time]) => Date.now() - time > OLD_MS).map(([name]) => name);
  }

  /** The fields of the request for the answer of `turn`, or for its continuation. */
  fieldsFor(turn) {
    const messages = this.messagesFor(turn);
    if (turn.earlier.length === 0) return { messages };
    return { messages: [...messages, { role: "assistant", content: beginningOf(turn) }], continue_final_message: true };
  }

  /** The messages of a request: every earlier turn of the branch that has an answer, and the question of `turn`. */
  messagesFor(turn) {
    const messages = [];
    for (const earlier of this.pathTo(turn).slice(0, -1)) {
      const answer = isLive(earlier) ? "" : answerOf(wholeOf(earlier));
      if (answer === "") continue; // failed turns are left out in pairs: templates want roles to alternate
      messages.push({ role: "user", content: earlier.question }, { role: "assistant", content: answer });
    }
    messages.push({ role: "user", content: turn.question });
    return messages;
  }

  /** The answer of `turn` has begun. The browser's own history needs nothing of its response. */
  accepted(_turn, _headers) {}

  /** Whether the question of `turn` is the larger part of its request. */
  isMostly(turn) {
    const chars = this.messagesFor(turn).reduce((sum, { content }) => sum + content.length, 0);
    return 2 * turn.question.length > chars;
  }

  get(storage, name) {
    try {
      return storage.getItem(name);
    } catch {
      return null; // forbidden
    }
  }

  drop(name) {
    try {
      this.storage?.removeItem(name);
    } catch {
      // forbidden: then nothing was stored
    }
  }

  set(storage, name, value) {
    try {
      storage.setItem(name, value);
      return true;
    } catch {
      return false; // private mode, or a quota used up by other pages of this site: the answer on screen is unaffected
    }
  }
}

/** @param {"localStorage" | "sessionStorage"} kind */
function storageOf(kind) {
  try {
    return window[kind];
  } catch {
    return null; // forbidden by the browser's settings: every use of it fails, and is caught
  }
}

/**
 * Remove what users who were signed in before have left in this browser. `key` is one of this page's user:
 * PREFIX/USER/NAME, without USER for a visitor, whose conversations stay.
 */
export function forgetOtherUsers(key) {
  const [prefix, user] = key.split("/");
  if (user === undefined) return;
  for (const storage of [storageOf("localStorage"), storageOf("sessionStorage")]) {
    for (const name of namesIn(storage, `${prefix}/`)) {
      if (!["", user].includes(name.split("/")[1])) storage?.removeItem(name);
    }
  }
}

function idIn(text) {
  return /^[0-9]+-[0-9]+$/.test(text ?? "") ? text : null;
}

export function newId() {
  return crypto.getRandomValues(new Uint32Array(2)).join("-");
}

function turnId(ms) {
  return `${ms.toString(36).padStart(9, "0")}-${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`;
}

/** The id of the turn whose record has this name. */
function idOf(name) {
  return name.slice(name.lastIndexOf("/") + 1);
}

function turnNames(storage, name) {
  return namesIn(storage, `${name}/`).filter((one) => TURN_ID.test(idOf(one)));
}

function timeOf(id) {
  return Number.parseInt(id, 36) || 0;
}

/** The keys that begin with `prefix`, sorted. */
function namesIn(storage, prefix) {
  try {
    return Object.keys(storage).filter((name) => name.startsWith(prefix)).sort();
  } catch {
    return [];
  }
}

function answerOf({ text, blocks }) {
  return blocks.length > 0 ? text.trim() : withoutThinking(text);
}
