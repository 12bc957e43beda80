// A conversation as a tree: a turn is a question with its answer, and `parent` is the id of the turn before it, "" at the
// beginning. Turns with one parent are siblings: another answer has the same question, a changed question another. `path` is
// the branch shown, `turns` are all. Nothing of the tree is changed by going to another branch. Pure.

// waiting (not sent, or not accepted yet), then streaming, then one of done, stopped, failed
export function newTurn(question, parent = "") {
  return {
    id: "",
    parent,
    revision: 0,
    question,
    model: "",
    earlier: [], // parts of the answer, before it was continued (parts.js)
    text: "",
    blocks: [], // of an answer that has more than text (blocks.js)
    citations: [],
    approvals: [], // what a run asks its user: {id, name, arguments, message}
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

export class TurnTree {
  constructor() {
    this.turns = []; // oldest first
    this.chosen = new Map(); // id of a turn → id of the turn that was shown after it
    this.leaf = ""; // the last turn of the branch shown
  }

  clear() {
    this.turns = [];
    this.chosen = new Map();
    this.leaf = "";
  }

  /** The turns of the branch shown, from its first to its last. */
  get path() {
    const end = this.turns.find(({ id }) => id === this.leaf) ?? this.turns.at(-1);
    return end === undefined ? [] : this.pathTo(end);
  }

  pathTo(end) {
    const path = [end];
    for (let turn = end; turn !== undefined; ) {
      const { parent } = turn;
      turn = this.turns.find(({ id }) => id === parent);
      if (turn !== undefined) path.unshift(turn);
    }
    return path;
  }

  /** The turns that stand at the place of `turn`, itself too, oldest first. */
  siblings({ parent }) {
    return this.turns.filter((other) => other.parent === parent);
  }

  /** Show the branch through `turn`, to the end where it was left, else to its newest end. */
  show(turn) {
    let end = turn;
    for (let next = turn; next !== undefined; next = this.next(end)) end = next;
    this.leaf = end.id;
    for (const one of this.path) this.chosen.set(one.parent, one.id);
  }

  next({ id }) {
    const after = this.turns.filter(({ parent }) => parent === id);
    return after.find((turn) => turn.id === this.chosen.get(id)) ?? after.at(-1);
  }

  /** Give a turn that nothing follows another id. */
  renamed(turn, id) {
    if (this.leaf === turn.id) this.leaf = id;
    for (const [parent, child] of this.chosen) if (child === turn.id) this.chosen.set(parent, id);
    turn.id = id;
  }
}
