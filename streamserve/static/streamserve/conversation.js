// The conversation in the browser's storage: turns, and the last seen event of each answer. No DOM, no network.
//
// Invariant: `text`, `otherBlocks` and `lastId` of a turn are written together, so that a resume after `lastId` adds
// exactly what `text` lacks.

const VERSION = 1;
const MAX_TURNS = 200;
const MAX_STORED_CHARS = 2_000_000;

// waiting (not sent, or not accepted yet), then streaming, then one of done, stopped, failed
export function newTurn(question) {
  return {
    question,
    text: "",
    otherBlocks: [], // indexes of the answer's blocks so far that are not text
    state: "waiting",
    isSent: false,
    streamId: null,
    lastId: "",
    finishReason: null,
    figures: null,
    error: null,
  };
}

export class Conversation {
  constructor(key, storage = window.localStorage) {
    this.key = key;
    this.storage = storage;
    this.clear();
  }

  clear() {
    this.id = crypto.getRandomValues(new Uint32Array(2)).join("-");
    this.turns = [];
  }

  /** Read the conversation that another visit (or tab) stored; an unreadable one is empty. */
  load() {
    const stored = this.peek();
    if (stored === null) return;
    this.id = stored.id;
    this.turns = stored.turns;
  }

  peek() {
    try {
      const stored = JSON.parse(this.storage.getItem(this.key) ?? "null");
      if (stored?.version !== VERSION || !Array.isArray(stored.turns)) return null;
      const turns = stored.turns
        .filter((turn) => typeof turn?.question === "string" && typeof turn?.text === "string")
        .map((turn) => ({ ...newTurn(turn.question), ...turn }));
      return { id: String(stored.id), turns };
    } catch {
      return null;
    }
  }

  /** Best effort: a full or forbidden storage does not break the chat. */
  save() {
    try {
      if (this.turns.length === 0) this.storage.removeItem(this.key);
      else this.storage.setItem(this.key, this.serialize());
    } catch {
      // private mode, or a quota used up by other pages of this site: the answer on screen is unaffected
    }
  }

  serialize() {
    let turns = this.turns.slice(-MAX_TURNS);
    let json = JSON.stringify({ version: VERSION, id: this.id, turns });
    while (json.length > MAX_STORED_CHARS && turns.length > 1) {
      turns = turns.slice(Math.ceil(turns.length / 2));
      json = JSON.stringify({ version: VERSION, id: this.id, turns });
    }
    return json;
  }

  /** The messages of a request: every earlier turn that has an answer, and the question of `turn`. */
  messagesFor(turn) {
    const messages = [];
    for (const earlier of this.turns.slice(0, this.turns.indexOf(turn))) {
      const answer = withoutThinking(earlier.text);
      if (answer === "") continue; // failed turns are left out in pairs: templates want roles to alternate
      messages.push({ role: "user", content: earlier.question }, { role: "assistant", content: answer });
    }
    messages.push({ role: "user", content: turn.question });
    return messages;
  }
}

/** Thinking of an earlier answer is not part of the conversation. */
export function withoutThinking(text) {
  return text
    .replace(/^[^]*?<\/think>/, (head) => (head.includes("<think>") ? head : ""))
    .replace(/<think>[^]*?(<\/think>|$)/g, "")
    .trim();
}
