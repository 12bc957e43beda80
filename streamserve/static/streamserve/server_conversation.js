// A conversation that the server keeps: the same for the chat as the browser's own (conversation.js), over the routes of
// docs/conversations.md. Nothing of its answers is kept in this browser. No DOM.
//
// Invariant: a turn that this page is sending is in no load: its ids come with the response, and then it is the server's.

import { newId } from "./conversation.js";
import { turnsOf } from "./server_turns.js";
import { TurnTree, isLive, newTurn } from "./turn_tree.js";

const PAGE = 100;

export class ServerConversation extends TurnTree {
  /** `source`: what a new conversation says it was begun by. `on.created(conversation)`, `on.chosen()`: of the branch shown. */
  constructor(routes, { key, source, on }) {
    super();
    this.routes = routes;
    this.key = key;
    this.source = source;
    this.on = on;
    this.messages = new Map();
    this.numRatings = 0;
    this.open(null);
  }

  /** Open a conversation, null for a new one: `load` and `merge` bring its turns. */
  open(id) {
    this.clear();
    this.id = id;
    this.localName = newId(); // of a new conversation, until the server names it
    this.messages = new Map();
    this.isLoaded = id === null;
    this.creating = null;
  }

  renew() {
    this.open(null);
  }

  // --- the server ----------------------------------------------------------------------------------------------------

  /** Load what is new; at first all. Resolves to false if another conversation was opened meanwhile. */
  async load() {
    const { id } = this;
    let after = this.settledUntil();
    for (let hasMore = true; hasMore; ) {
      const { numRatings } = this;
      const { messages, has_more: isMore } = await this.routes.messages(id, { limit: PAGE, after });
      if (this.id !== id) return false;
      if (this.numRatings !== numRatings) continue; // these may be from before
      for (const message of messages) this.messages.set(message.id, message);
      after = messages.at(-1)?.id ?? null;
      hasMore = isMore && after !== null;
    }
    this.isLoaded = true;
    return true;
  }

  /** The last of the first messages that have all ended: those after it are asked for again. */
  settledUntil() {
    let last = null;
    for (const { id, state } of this.messages.values()) {
      if (state === "running") break;
      last = id;
    }
    return last;
  }

  /** Take what was loaded: calls `changed(turn, stored)` and `removed(turn)`; turns that are `isOurs` stay as they are. */
  merge({ isOurs, changed, removed }) {
    if (this.turns.some((turn) => isLive(turn) && turn.isSent && turn.streamId === null)) return undefined;
    const wasEmpty = this.turns.length === 0;
    const added = [];
    for (const stored of turnsOf([...this.messages.values()])) {
      const continued = this.continuedBy(stored);
      if (continued !== undefined) {
        this.renamed(continued, stored.id);
        changed(continued, stored);
        continue;
      }
      const known = this.turns.find(({ id }) => id === stored.id);
      if (known === undefined) added.push(this.insert(stored));
      else if (!isOurs(known) && isNews(known, stored)) changed(known, { ...stored, figures: known.figures ?? stored.figures });
    }
    for (const turn of [...this.turns]) {
      if (turn.state !== "failed" || turn.questionId !== "") continue; // not one of those that never came to the server …
      if (!added.some(({ parent, question }) => parent === turn.parent && question === turn.question)) continue;
      this.remove(turn); // … and yet it has come
      removed(turn);
    }
    if (!wasEmpty) return this.follow(added);
    const end = this.turns.find(({ id }) => id === this.leaf);
    if (end !== undefined) super.show(end);
    return undefined;
  }

  /** The turn here whose answer another device has continued, which the server has as the turn `stored`. */
  continuedBy({ id: last, earlier }) {
    if (earlier.length === 0 || this.turns.some(({ id }) => id === last)) return undefined;
    const isFollowed = (id) => this.turns.some(({ parent }) => parent === id); // then it stays, and the continuation is its sibling
    return this.turns.find(({ id }) => earlier.some(({ answerId }) => answerId === id) && !isFollowed(id));
  }

  /** Show what another device has asked, where it follows the branch shown, or runs while nothing runs there. */
  follow(added) {
    for (const turn of added) {
      const isNewer = isLive(turn) && !isLive(this.path.at(-1));
      if (turn.parent === this.leaf || isNewer) super.show(turn); // it is the server's branch already
    }
  }

  /** Behind the turns that are the server's, before a question that this page has not sent yet. */
  insert(turn) {
    const at = this.turns.findIndex(({ questionId }) => questionId === "");
    this.turns.splice(at === -1 ? this.turns.length : at, 0, turn);
    return turn;
  }

  // --- asking --------------------------------------------------------------------------------------------------------

  /** Add a question after the turn `parent`, the last of the branch shown if none is named, and show it. */
  add(question, parent = this.path.at(-1)?.id ?? "") {
    const turn = { ...newTurn(question, parent), parent, id: `asked-${newId()}`, questionId: "", attachments: [] };
    this.turns.push(turn);
    super.show(turn);
    return turn;
  }

  /** The fields of the request for the answer of `turn`. The first question makes the conversation. */
  async fieldsFor(turn, model) {
    const conversation = this.id ?? (await this.create(model));
    if (turn.earlier.length > 0) return { conversation, continue: turn.id };
    const same = this.sameAs(turn);
    if (same !== undefined) return { conversation, parent: same.questionId }; // another answer to that question
    const attachments = turn.attachments.map(({ id }) => id);
    return { conversation, parent: turn.parent || null, prompt: turn.question, ...(attachments.length > 0 && { attachments }) };
  }

  /** A turn with the same question, and the same files, that the server has. */
  sameAs(turn) {
    const ids = ({ attachments }) => attachments.map(({ id }) => id).join();
    const isSame = (other) => other.question === turn.question && ids(other) === ids(turn);
    return this.siblings(turn).find((other) => other.questionId !== "" && isSame(other));
  }

  /** Make the conversation, once, however often its first question is sent. */
  async create(model) {
    const { localName } = this;
    this.creating ??= this.routes.create({ model, source: this.source });
    try {
      const conversation = await this.creating;
      if (this.localName !== localName || this.id !== null) return conversation.id;
      this.id = conversation.id;
      this.on.created(conversation);
      return conversation.id;
    } catch (error) {
      this.creating = null;
      throw error;
    }
  }

  /** The answer of `turn` has begun. */
  accepted(turn, headers) {
    const id = headers.get("X-Message-Id");
    if (id === null) return;
    turn.questionId = headers.get("X-Question-Id") ?? this.sameAs(turn)?.questionId ?? "";
    this.renamed(turn, id);
  }

  /** Rate an answer: 1, -1, or null for no rating. */
  async rate(turn, rating, comment) {
    const { id } = this;
    const message = await this.routes.rate(id, turn.id, { rating, comment });
    if (this.id !== id) return;
    this.messages.set(message.id, message); // what has ended is not loaded again
    this.numRatings += 1;
  }

  get exportUrl() {
    return this.id === null ? undefined : this.routes.exportUrl(this.id);
  }

  /** The branch through `turn` is shown, on all devices. */
  show(turn) {
    super.show(turn);
    const end = this.path.at(-1);
    if (this.id === null || end === undefined || end.questionId === "") return;
    this.routes.change(this.id, { leaf: end.id }).catch((error) => console.info("conversations:", error));
  }

  /** Remove a turn that the server does not have. */
  remove(turn) {
    const at = this.turns.indexOf(turn);
    if (at !== -1) this.turns.splice(at, 1);
  }

  /** Whether the question of `turn` is the larger part of its request. */
  isMostly(turn) {
    const chars = this.pathTo(turn).reduce((sum, { question, text }) => sum + question.length + text.length, 0);
    return 2 * turn.question.length > chars;
  }

  // --- what a conversation in the browser's storage needs ---------------------------------------------------------------

  get name() {
    return this.nameFor(this.id ?? this.localName);
  }

  nameFor(id) {
    return `${this.key}/${id}`;
  }

  nameOf(turn) {
    return `${this.name}/${turn.id}`;
  }

  stored(turn) {
    return turn;
  }

  get left() {
    return null;
  }

  oldOnes() {
    return [];
  }

  save() {}

  trim() {}

  forget() {}
}

/** Whether the server has more of a turn than this page shows. What has ended here may still run there for a moment. */
function isNews(known, stored) {
  if (stored.state === "streaming") return false;
  if (known.state === "failed" && stored.state === "failed") return false;
  return known.state !== stored.state || known.text !== stored.text || known.rating !== stored.rating;
}
