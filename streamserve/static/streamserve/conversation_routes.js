// The server's routes of conversations (docs/conversations.md). Each call resolves to the JSON of its answer, and throws
// `RequestFailed`, or `TypeError` without a response. Knows no DOM.

import { RequestFailed } from "./client.js";

export class ConversationRoutes {
  /** `url`: the address of the list. `headers()` gives what an unsafe method needs (the CSRF token). */
  constructor(url, headers) {
    this.url = url;
    this.headers = headers;
    this.polled = new Map(); // address → {etag, body}: the server says when nothing has changed
  }

  of(id) {
    return `${this.url}/${encodeURIComponent(id)}`;
  }

  /** A page of the list: {conversations, has_more, last_id}. */
  list({ limit, source = "", after = null, q = "" }) {
    const query = new URLSearchParams({ limit: String(limit) });
    if (source !== "") query.set("source", source);
    if (after !== null) query.set("after", after);
    if (q !== "") query.set("q", q);
    const url = `${this.url}?${query}`;
    return after === null && q === "" ? this.poll(url) : this.get(url);
  }

  one(id) {
    return this.get(this.of(id));
  }

  /** A page of messages, all branches, the oldest first: {messages, has_more, last_id}. */
  messages(id, { limit, after = null }) {
    const query = new URLSearchParams({ limit: String(limit) });
    if (after !== null) query.set("after", after);
    return this.get(`${this.of(id)}/messages?${query}`);
  }

  create(fields) {
    return this.send("POST", this.url, fields);
  }

  /** Rename, pin, choose the branch shown, or undo a deletion: {title, pinned, leaf, deleted}. */
  change(id, fields) {
    return this.send("POST", this.of(id), fields);
  }

  remove(id) {
    return this.send("DELETE", this.of(id));
  }

  rate(id, messageId, fields) {
    return this.send("POST", `${this.of(id)}/messages/${encodeURIComponent(messageId)}`, fields);
  }

  /** Make a link by which anyone reads the branch shown: {id, url}. The address is told once. */
  share(id) {
    return this.send("POST", `${this.of(id)}/shares`, {});
  }

  unshare(id, shareId) {
    return this.send("DELETE", `${this.of(id)}/shares/${encodeURIComponent(shareId)}`);
  }

  exportUrl(id) {
    return `${this.of(id)}/export?format=markdown`;
  }

  get(url) {
    return read(fetch(url, { headers: { Accept: "application/json" }, cache: "no-store" }));
  }

  async poll(url) {
    const known = this.polled.get(url);
    const headers = { Accept: "application/json", ...(known && { "If-None-Match": known.etag }) };
    const response = await fetch(url, { headers, cache: "no-store" });
    if (response.status === 304 && known !== undefined) return known.body;
    const body = await read(response);
    const etag = response.headers.get("ETag");
    if (etag !== null) this.polled.set(url, { etag, body });
    return body;
  }

  send(method, url, fields) {
    const headers = { Accept: "application/json", "Content-Type": "application/json", ...this.headers() };
    return read(fetch(url, { method, headers, body: fields && JSON.stringify(fields), cache: "no-store" }));
  }
}

async function read(answer) {
  const response = await answer;
  if (!response.ok) throw await RequestFailed.from(response);
  return response.status === 204 ? {} : response.json();
}
