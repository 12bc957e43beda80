// The files of the next question: a button, drop and paste, and a chip for each file, until the question is asked. Where the
// server keeps the conversation; the routes are in docs/conversations.md#attachments.

import { element } from "./render.js";
import { count, decimal, words } from "./words.js";

const TITLE_CHARS = 200;

export class Attachments {
  /**
   * `root` is the chat; `config` has `url`, `accept` (".txt,.md"), `maxFiles`, `maxBytes`, and `headers()`.
   * `on.changed()`: a file has come, gone or failed; `on.announce(text)` tells a screen reader.
   */
  constructor(root, config, on) {
    this.config = config;
    this.on = on;
    this.files = []; // {file, view, state: "sending" | "ready" | "failed", stored, request}
    this.parts = Object.fromEntries(["attach", "files", "picker", "input"].map((name) => [name, root.querySelector(`[data-ss="${name}"]`)]));
    this.listen(root);
  }

  get isSending() {
    return this.files.some(({ state }) => state === "sending");
  }

  /** Take what is ready away, for the question that is asked now. */
  take() {
    const ready = this.files.filter(({ state }) => state === "ready").map(({ stored }) => stored);
    for (const one of this.files) one.view.node.remove();
    this.files = [];
    this.changed();
    return ready;
  }

  /** Say why the question is not asked yet. */
  wait() {
    this.on.announce(words("Wait until your files are here."));
  }

  /** @param {Iterable<File>} files */
  add(files) {
    for (const file of files) {
      const one = { file, state: "sending", stored: null, request: null, view: new Chip(file.name) };
      one.view.remove.addEventListener("click", () => this.remove(one));
      this.files.push(one);
      this.parts.files.append(one.view.node);
      const refusal = this.refusalOf(file);
      if (refusal === "") this.send(one);
      else this.fail(one, refusal);
    }
    this.changed();
  }

  /** What the server would refuse is not sent. */
  refusalOf(file) {
    const { accept, maxFiles, maxBytes } = this.config;
    const kinds = accept.split(",");
    if (!kinds.some((ending) => file.name.toLowerCase().endsWith(ending))) {
      return words("Files of this kind cannot be attached: {kinds} can.", { kinds: kinds.join(" ") });
    }
    if (file.size > maxBytes) return words("The file is over the limit of {size}.", { size: sizeOf(maxBytes) });
    if (file.size === 0) return words("The file is empty.");
    const others = this.files.filter(({ state }) => state !== "failed").length;
    return others > maxFiles ? words("A question brings {count} files at most.", { count: count(maxFiles) }) : "";
  }

  /** Upload a file. XMLHttpRequest, because fetch does not tell how far it is. */
  send(one) {
    const request = new XMLHttpRequest();
    one.request = request;
    request.open("POST", this.config.url);
    for (const [name, value] of Object.entries(this.config.headers())) request.setRequestHeader(name, value);
    request.upload.addEventListener("progress", ({ loaded, total }) => one.view.progress(loaded / total));
    request.addEventListener("load", () => this.loaded(one, request));
    request.addEventListener("error", () => this.fail(one, words("The server could not be reached.")));
    const form = new FormData();
    form.append("file", one.file, one.file.name);
    request.send(form);
    one.view.progress(0);
  }

  loaded(one, request) {
    const body = jsonOf(request.responseText);
    if (request.status !== 201) {
      return this.fail(one, body.error?.message ?? words("The server answered {status}.", { status: request.status }));
    }
    Object.assign(one, { state: "ready", stored: body });
    one.view.ready(sizeOf(body.bytes));
    this.on.announce(words("{name} is attached.", { name: one.file.name }));
    return this.changed();
  }

  fail(one, why) {
    one.state = "failed";
    one.view.failed(why);
    this.on.announce(`${one.file.name}: ${why}`);
    this.changed();
  }

  /** Take a file back; the server forgets it, too. */
  remove(one) {
    const at = this.files.indexOf(one);
    if (at === -1) return;
    this.drop(one);
    this.on.announce(words("{name} was removed.", { name: one.file.name }));
    this.changed();
    const next = this.files[Math.min(at, this.files.length - 1)];
    (next?.view.remove ?? this.parts.attach).focus();
  }

  /** Another conversation is opened: these files were for this one. */
  clear() {
    for (const one of [...this.files]) this.drop(one);
    this.changed();
  }

  drop(one) {
    this.files.splice(this.files.indexOf(one), 1);
    one.view.node.remove();
    one.request?.abort();
    if (one.stored === null) return;
    const url = `${this.config.url}/${encodeURIComponent(one.stored.id)}`;
    fetch(url, { method: "DELETE", headers: this.config.headers() }).catch((error) => console.info("attachments:", error));
  }

  changed() {
    this.parts.files.hidden = this.files.length === 0;
    this.on.changed();
  }

  listen(root) {
    const { attach, picker, input } = this.parts;
    picker.accept = this.config.accept;
    attach.addEventListener("click", () => picker.click());
    picker.addEventListener("change", () => {
      this.add([...picker.files]);
      picker.value = ""; // so that the same file can be chosen again
      input.focus();
    });
    input.addEventListener("paste", (event) => {
      const { files } = event.clipboardData;
      if (files.length === 0 || event.clipboardData.types.includes("text/plain")) return; // a table is pasted as its text
      event.preventDefault();
      this.add([...files]);
    });
    this.listenToDrops(root);
  }

  listenToDrops(root) {
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files") ?? false;
    root.addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      root.classList.add("is-dropping");
    });
    root.addEventListener("dragleave", (event) => {
      if (!root.contains(event.relatedTarget)) root.classList.remove("is-dropping");
    });
    root.addEventListener("drop", (event) => {
      root.classList.remove("is-dropping");
      if (!hasFiles(event)) return;
      event.preventDefault(); // else the browser opens it
      this.add([...event.dataTransfer.files]);
      this.parts.input.focus();
    });
  }
}

/** A file of the next question: its name, size, progress or what is wrong with it, and a button that takes it back. */
class Chip {
  constructor(name) {
    this.words = element("small", {});
    this.bar = element("progress", { max: "1", "aria-hidden": "true" });
    this.remove = element("button", { type: "button", "aria-label": words("Remove {name}", { name }), title: words("Remove {name}", { name }) }, "×");
    const label = element("span", { dir: "auto", title: name.slice(0, TITLE_CHARS) }, name);
    this.node = element("li", { class: "ss-chip is-sending" }, label, this.words, this.bar, this.remove);
  }

  progress(share) {
    if (!Number.isFinite(share)) return;
    this.bar.value = share;
    this.words.textContent = share < 1 ? words("{percent} %", { percent: count(Math.floor(100 * share)) }) : words("Reading");
  }

  ready(size) {
    this.words.textContent = size;
    this.node.classList.remove("is-sending");
  }

  failed(why) {
    this.words.textContent = why;
    this.node.classList.remove("is-sending");
    this.node.classList.add("is-error");
  }
}

/** Show the files of a question that was asked, as links; `urlOf(id)` is the address of a file. */
export function showFiles(list, files, urlOf) {
  list.hidden = files.length === 0;
  list.replaceChildren(
    ...files.map(({ id, name, bytes, characters, kept }) => {
      const link = element("a", { href: urlOf(id), download: "", dir: "auto", title: name.slice(0, TITLE_CHARS) }, name);
      const isCut = kept !== undefined && kept < characters;
      const percent = count(Math.floor((100 * (kept ?? 0)) / characters));
      const note = isCut ? words("the first {percent} % were read", { percent }) : sizeOf(bytes);
      return element("li", { class: "ss-chip" }, link, element("small", {}, note));
    }),
  );
}

/** "3 KB", "1.5 MB". */
export function sizeOf(bytes) {
  if (bytes < 1000) return `${count(bytes)} B`;
  if (bytes < 1_000_000) return `${count(Math.round(bytes / 1000))} KB`;
  return `${decimal(bytes / 1_000_000, 1)} MB`;
}

function jsonOf(text) {
  try {
    return JSON.parse(text) ?? {};
  } catch {
    return {};
  }
}
