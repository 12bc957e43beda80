// What is known of a list of conversations: the pages that were loaded, and what has changed since. Pure.
//
// The server's order: the pinned before the others, then the newest first, then by id.
// Invariant: `shown` has no gap. A conversation that stands behind the last loaded page is known, but not shown, until its
// page is loaded.

const DAY_MS = 24 * 3600 * 1000;

export class ConversationIndex {
  constructor() {
    this.known = new Map(); // id → conversation
    this.hasMore = true;
    this.end = null; // the last conversation of the last page, as it was then
  }

  /** Take the first page, again or for the first time. What is missing from it was deleted elsewhere. */
  takeFirst(conversations, hasMore) {
    const last = conversations.at(-1) ?? null;
    const ids = new Set(conversations.map(({ id }) => id));
    for (const one of this.known.values()) {
      if (!ids.has(one.id) && (!hasMore || inOrder(one, last) < 0)) this.known.delete(one.id);
    }
    for (const one of conversations) this.put(one);
    if (this.end !== null && hasMore && inOrder(this.end, last) >= 0) return; // further pages are loaded already
    this.end = last;
    this.hasMore = hasMore;
  }

  /** Take the page after `cursor`. */
  takeNext(conversations, hasMore) {
    for (const one of conversations) this.put(one);
    this.end = conversations.at(-1) ?? this.end;
    this.hasMore = hasMore;
  }

  /** Take one conversation as the server has it now. */
  put(conversation) {
    this.known.set(conversation.id, { ...this.known.get(conversation.id), ...conversation });
  }

  remove(id) {
    this.known.delete(id);
  }

  get(id) {
    return this.known.get(id) ?? null;
  }

  /** The conversations from the first to the end of the last page, in order. Those without a message are not shown. */
  get shown() {
    const all = [...this.known.values()].filter(({ leaf }) => leaf !== null).sort(inOrder);
    return this.hasMore ? all.filter((one) => this.end !== null && inOrder(one, this.end) <= 0) : all;
  }

  /** The id after which the next page begins. */
  get cursor() {
    return this.shown.at(-1)?.id ?? null;
  }
}

/** Negative if `a` stands before `b` in the list. */
export function inOrder(a, b) {
  if (a.pinned !== b.pinned) return a.pinned ? -1 : 1;
  if (a.updated !== b.updated) return b.updated - a.updated;
  return a.id < b.id ? 1 : a.id > b.id ? -1 : 0;
}

/**
 * Cut a sorted list into groups: [{name, conversations}]. A name is "pinned", "today", "yesterday", "week", "month", or
 * the first day of an older month in milliseconds.
 */
export function groupsOf(conversations, now = Date.now()) {
  const groups = [];
  for (const one of conversations) {
    const name = one.pinned ? "pinned" : ageOf(one.updated * 1000, now);
    if (groups.at(-1)?.name !== name) groups.push({ name, conversations: [] });
    groups.at(-1).conversations.push(one);
  }
  return groups;
}

/** By days of the visitor's calendar, and not by hours. */
function ageOf(ms, now) {
  const days = Math.round((midnight(now) - midnight(ms)) / DAY_MS); // a day of a clock change has 23 or 25 hours
  if (days <= 0) return "today";
  if (days === 1) return "yesterday";
  if (days <= 7) return "week";
  if (days <= 30) return "month";
  const date = new Date(ms);
  return new Date(date.getFullYear(), date.getMonth(), 1).getTime();
}

function midnight(ms) {
  return new Date(ms).setHours(0, 0, 0, 0);
}
