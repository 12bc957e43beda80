// One answer as DOM nodes: text, folded thoughts, tool calls, JSON, sources. What the model wrote is set by textContent only.
//
// An answer with blocks shows its blocks. An answer without blocks is a single text, where the tags of thoughts and calls of models
// whose format the server does not know are looked for.

import { isCall } from "./blocks.js";
import { isJson, mayBecomeJson, prettyJson } from "./json.js";
import { codeBox, element, reconcile, sourceUrl, updateBlocks } from "./render.js";
import { count, words } from "./words.js";

const TAGS = [
  { type: "think", open: "<think>", close: "</think>" },
  { type: "tool", open: "<tool_call>", close: "</tool_call>" },
];
const MAX_NAME_CHARS = 80;

/** `update` takes any answer at any time; its work shrinks with the length of the shared beginning. */
export class AnswerView {
  constructor(root) {
    this.root = root;
    this.parts = [];
  }

  update(text, isStreaming = false, blocks = []) {
    const parts = blocks.length > 0 ? partsOf(blocks, isStreaming) : withJson(splitParts(text, isStreaming), isStreaming);
    reconcile(this.root, this.parts, parts, (part, old) => {
      const view = old?.type === part.type ? old : new PART_VIEWS[part.type]();
      view.update(part, isStreaming && part === parts.at(-1));
      return view;
    });
  }
}

// --- parts of blocks -------------------------------------------------------------------------------------------------

function partsOf(blocks, isStreaming) {
  const shown = blocks.filter(({ kind, text }) => isCall(kind) || text.trim() !== "");
  const names = new Map(blocks.filter(({ kind }) => isCall(kind)).map(({ id, name }) => [id, name]));
  return withJson(shown.map((block) => partOf(block, names)), isStreaming);
}

function partOf({ kind, text, id, name, isOpen, seconds }, names) {
  if (kind === "thinking") return { ...newPart("think", text, !isOpen), seconds };
  if (isCall(kind)) return { ...newPart("tool", text, !isOpen), name };
  if (kind === "tool_result") return { ...newPart("tool", text, !isOpen), name: names.get(id) ?? "", isResult: true };
  return newPart("text", text, !isOpen); // unknown kinds too: nothing that was sent is dropped
}

/** An answer whose text is one JSON object or array is shown as that. */
function withJson(parts, isStreaming) {
  const texts = parts.filter(({ type }) => type === "text");
  if (texts.length !== 1) return parts;
  const [text] = texts;
  const isGrowing = isStreaming && text === parts.at(-1);
  if (isGrowing ? mayBecomeJson(text.source) : isJson(text.source)) text.type = "json";
  return parts;
}

// --- parts of a text: <think>…</think>, <tool_call>…</tool_call> -----------------------------------------------------

/** Cut `text` at thinking and tool calls, but not inside code. */
export function splitParts(text, isStreaming) {
  const parts = [];
  let start = leadingThoughtEnd(text, parts);
  const landmark = /(?:^|\n) {0,3}(`{3,}|~{3,})[^\n]*|`[^`\n]+`|<think>|<tool_call>/g;
  landmark.lastIndex = start;
  for (let match = landmark.exec(text); match !== null; match = landmark.exec(text)) {
    const tag = TAGS.find(({ open }) => open === match[0]);
    if (tag) {
      if (text.slice(start, match.index).trim()) parts.push(newPart("text", text.slice(start, match.index)));
      const from = match.index + tag.open.length;
      const end = text.indexOf(tag.close, from);
      parts.push(newPart(tag.type, text.slice(from, end === -1 ? text.length : end), end !== -1));
      start = end === -1 ? text.length : end + tag.close.length;
      landmark.lastIndex = start;
    } else if (match[1]) {
      const end = fenceEnd(match[1]);
      end.lastIndex = match.index + match[0].length;
      if (end.exec(text) === null) break; // still inside the code block
      landmark.lastIndex = end.lastIndex;
    }
  }
  if (text.slice(start).trim()) parts.push(newPart("text", text.slice(start), false));
  if (isStreaming && parts.length > 0) hideHalfTag(parts.at(-1));
  return parts;
}

function newPart(type, source, isClosed = true) {
  return { type, source, isClosed };
}

/** If the template opens the thought in the prompt, the answer has only its end. */
function leadingThoughtEnd(text, parts) {
  const { open, close } = TAGS[0];
  const end = text.indexOf(close);
  if (end === -1 || text.slice(0, end).includes(open) || /`/.test(text.slice(0, end))) return 0;
  if (text.slice(0, end).trim()) parts.push(newPart("think", text.slice(0, end)));
  return end + close.length;
}

function fenceEnd(fence) {
  return new RegExp(`\\n {0,3}${fence[0]}{${fence.length},}[ \\t]*(?=\\n|$)`, "g");
}

/** "<thi" at the end of a growing text may become a tag: it is shown once it cannot. */
function hideHalfTag(last) {
  if (last.isClosed) return;
  const at = last.source.lastIndexOf("<");
  if (at === -1) return;
  const tail = last.source.slice(at);
  if (TAGS.some(({ open, close }) => open.startsWith(tail) || close.startsWith(tail))) last.source = last.source.slice(0, at);
}

class TextPart {
  type = "text";
  node = element("div", { class: "ss-text" });
  blocks = [];

  update({ source }, isTail) {
    updateBlocks(this.node, this.blocks, source, isTail);
  }
}

class JsonPart {
  type = "json";

  constructor() {
    this.code = codeBox("json", "");
    this.code.node.classList.add("ss-json");
    this.node = this.code.node;
  }

  update({ source }) {
    this.code.update("json", prettyJson(source));
  }
}

class ThinkPart {
  type = "think";
  blocks = [];

  constructor() {
    this.label = element("span");
    this.body = element("div", { class: "ss-think-body" });
    this.node = element("details", { class: "ss-think" }, element("summary", {}, this.label), this.body);
  }

  update({ source, isClosed, seconds }, isTail) {
    const isThinking = isTail && !isClosed;
    const label = isThinking ? words("Thinking…") : thoughtLabel(seconds);
    if (this.label.textContent !== label) this.label.textContent = label;
    this.node.classList.toggle("is-thinking", isThinking);
    updateBlocks(this.body, this.blocks, source, isThinking);
  }
}

/** A thought that came at once, as a replay does, has no time that means something. */
function thoughtLabel(seconds = 0) {
  return seconds >= 1 ? words("Thought for {seconds} s", { seconds: count(seconds) }) : words("Thought");
}

class ToolPart {
  type = "tool";

  constructor() {
    this.code = codeBox(words("Tool call"), "");
    this.code.node.classList.add("ss-tool");
    this.node = this.code.node;
  }

  update(part, isTail) {
    const { name, text } = part.name === undefined ? readToolCall(part.source) : { name: part.name, text: prettyJson(part.source) };
    const isCalling = isTail && !part.isClosed;
    const kind = part.isResult ? words("Tool result") : words("Tool call");
    const label = name ? `${kind} · ${name.slice(0, MAX_NAME_CHARS)}` : kind;
    this.node.classList.toggle("is-calling", isCalling);
    this.code.update(label, text);
  }
}

const PART_VIEWS = { text: TextPart, think: ThinkPart, tool: ToolPart, json: JsonPart };

function readToolCall(source) {
  try {
    const { name } = JSON.parse(source) ?? {};
    return { name: typeof name === "string" ? name : "", text: prettyJson(source.trim()) };
  } catch {
    return { name: "", text: source.trim() };
  }
}

// --- sources ---------------------------------------------------------------------------------------------------------

const MARKER = /\[([1-9][0-9]?)\]/g;

/** Make each `[2]` of the text the second source: its number, with its title, as a link. Code and links stay. */
export function linkMarkers(root, citations) {
  if (citations.length === 0) return;
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) {
    const node = /** @type {Text} */ (walker.currentNode);
    if (node.data.includes("[") && !node.parentElement?.closest("a, pre, code, .ss-math")) found.push(node);
  }
  for (const node of found) replaceMarkers(node, citations);
}

function replaceMarkers(node, citations) {
  const pieces = [];
  let end = 0;
  for (const match of node.data.matchAll(MARKER)) {
    const source = citations[match[1] - 1];
    if (source === undefined) continue;
    pieces.push(node.data.slice(end, match.index).replace(/ $/, ""), markerNode(match[1], source));
    end = match.index + match[0].length;
  }
  if (pieces.length > 0) node.replaceWith(...pieces, node.data.slice(end));
}

function markerNode(number, { source, id, title, url }) {
  const address = typeof url === "string" ? sourceUrl(url) : null;
  const label = String(title || id || source);
  const attributes = { class: "ss-marker", title: label, "aria-label": words("Source {number}: {title}", { number, title: label }) };
  if (address === null) return element("sup", { ...attributes, role: "img" }, number);
  return element("a", { ...attributes, href: address.href, target: "_blank", rel: "noopener noreferrer nofollow" }, number);
}

/** A numbered list of the sources that the answer cites, each linked if its address is of the web or of this site. */
export function sourceItems(citations) {
  return citations.map(({ source, id, title, url }) => {
    const address = typeof url === "string" ? sourceUrl(url) : null;
    const label = String(title || id || source);
    const item = element("li", { dir: "auto" });
    if (address === null) item.append(label);
    else item.append(element("a", { href: address.href, target: "_blank", rel: "noopener noreferrer nofollow", title: address.href }, label));
    const where = address !== null && address.origin !== location.origin ? address.host : String(source);
    if (where !== label) item.append(" ", element("span", { class: "ss-source" }, where));
    return item;
  });
}
