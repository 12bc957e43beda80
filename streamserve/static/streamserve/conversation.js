// The conversation in the browser's storage, shared by the tabs of one browser. No DOM, no network.
//
//   KEY                 the id of the conversation that a new tab opens
//   KEY/left            of one tab: the id of the conversation that "New chat" has left
//   KEY/ID/TURN         one question and its answer; TURN sorts by time
//
// Invariant: a record is written by one tab only, which holds the lock of its name (locks.js). So tabs that ask at
// the same time add to one conversation, and none overwrites what another has stored. `revision` counts the writes.
// Invariant: `text`, `blocks`, `citations` and `lastId` of a turn are written together, so that a resume after `lastId` adds
// exactly what they lack.

const VERSION = 2;
const MAX_TURNS = 200;
const MAX_STORED_CHARS = 2_000_000;
const OLD_MS = 24 * 3600 * 1000; // a conversation that no tab shows is kept for a day: a reload may be under way

// waiting (not sent, or not accepted yet), then streaming, then one of done, stopped, failed
export function newTurn(question) {
  return {
    id: "",
    revision: 0,
    question,
    text: "",
    blocks: [], // of an answer that has more than text (blocks.js)
    citations: [],
    notes: [],
    steps: [], // of a pipeline, in words
    state: "waiting",
    isSent: false,
    streamId: null,
    lastId: "",
    finishReason: null,
    figures: null,
    error: null,
  };
}

export function isLive(turn) {
  return turn.state === "waiting" || turn.state === "streaming";
}

export class Conversation {
  /** `storage` is common to all tabs, `own` is this tab's. */
  constructor(key, storage = storageOf("localStorage"), own = storageOf("sessionStorage")) {
    this.key = key;
    this.storage = storage;
    this.own = own;
    this.turns = [];
    this.isStored = new WeakSet(); // turns that have a record
    this.id = this.pointed() ?? newId();
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
    return id !== null && namesIn(this.storage, `${this.nameFor(id)}/`).length > 0 ? id : null;
  }

  /** Open a conversation: `merge` brings its turns. */
  open(id) {
    this.id = id;
    this.turns = [];
    this.point();
  }

  /** Add a question at the end. */
  add(question) {
    const turn = newTurn(question);
    const last = this.turns.at(-1);
    turn.id = turnId(Math.max(Date.now(), last === undefined ? 0 : timeOf(last.id) + 1));
    this.turns.push(turn);
    this.point();
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

  /** Remove `turn` and everything after it, here and in the storage. Returns what was removed. */
  cut(turn) {
    const removed = this.turns.splice(this.turns.indexOf(turn));
    for (const one of removed) this.remove(this.nameOf(one));
    return removed;
  }

  /**
   * Take what other tabs have stored. Calls `added(turn)`, `changed(turn)` and `removed(turn)`; `isOurs(turn)` names the
   * turns that this tab writes itself, which stay as they are.
   */
  merge({ isOurs, added, changed, removed }) {
    if (this.turns.length === 0) this.id = this.pointed() ?? this.id;
    const names = namesIn(this.storage, `${this.name}/`);
    for (const turn of [...this.turns]) {
      if (names.includes(this.nameOf(turn)) || !this.isStored.has(turn) || isOurs(turn)) continue;
      this.turns.splice(this.turns.indexOf(turn), 1);
      removed(turn);
    }
    for (const name of names) {
      const known = this.turns.find((turn) => this.nameOf(turn) === name);
      if (known !== undefined && isOurs(known)) continue;
      const stored = this.read(name);
      if (stored === null) continue;
      if (known === undefined) added(this.insert(stored));
      else if (stored.revision > known.revision) changed(known, stored);
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
      if (version !== VERSION || typeof turn.question !== "string" || typeof turn.text !== "string") return null;
      return { ...newTurn(turn.question), ...turn, id: name.slice(name.lastIndexOf("/") + 1) };
    } catch {
      return null;
    }
  }

  /** Remove what is too much of this conversation, oldest first. */
  trim() {
    let chars = 0;
    namesIn(this.storage, `${this.name}/`)
      .reverse()
      .forEach((name, age) => {
        chars += this.get(this.storage, name)?.length ?? 0;
        if (age > 0 && (age >= MAX_TURNS || chars > MAX_STORED_CHARS)) this.remove(name);
      });
  }

  /** Remove the records of a conversation by its name. */
  forget(name) {
    for (const one of namesIn(this.storage, `${name}/`)) this.remove(one);
  }

  /** The names of other conversations of this chat that are old enough to be forgotten. */
  oldOnes() {
    const newest = new Map();
    for (const name of namesIn(this.storage, `${this.key}/`)) {
      const end = name.lastIndexOf("/");
      newest.set(name.slice(0, end), timeOf(name.slice(end + 1)));
    }
    newest.delete(this.name);
    return [...newest].filter(([, time]) => Date.now() - time > OLD_MS).map(([name]) => name);
  }

  /** The messages of a request: every earlier turn that has a whole answer, and the question of `turn`. */
  messagesFor(turn) {
    const messages = [];
    for (const earlier of this.turns.slice(0, this.turns.indexOf(turn))) {
      const answer = isLive(earlier) ? "" : answerOf(earlier);
      if (answer === "") continue; // failed turns are left out in pairs: templates want roles to alternate
      messages.push({ role: "user", content: earlier.question }, { role: "assistant", content: answer });
    }
    messages.push({ role: "user", content: turn.question });
    return messages;
  }

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

  remove(name) {
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

/** Thinking of an earlier answer is not part of the conversation. */
export function withoutThinking(text) {
  return text
    .replace(/^[^]*?<\/think>/, (head) => (head.includes("<think>") ? head : ""))
    .replace(/<think>[^]*?(<\/think>|$)/g, "")
    .trim();
}
