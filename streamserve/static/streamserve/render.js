// A model's markdown as DOM nodes, made by createElement and textContent only: its text can never become HTML.
// Anything else than the markdown below (raw HTML, remote images, odd links) appears as its characters. So does LaTeX,
// between \(…\), \[…\], $$…$$ or $…$: nothing in it is markdown.
//
// `updateBlocks` gets the whole text so far, at most once a frame; only blocks whose source changed are rebuilt.
// Work is linear in the text: failed searches are not repeated, nesting is bounded.

import { colourCode } from "./code_colours.js";
import { words } from "./words.js";

const MAX_DEPTH = 10;

export function element(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

/** Make `root`'s children the nodes of `views`, one for each of `items`; change only those that differ. */
export function reconcile(root, views, items, makeOrKeep) {
  const added = document.createDocumentFragment();
  items.forEach((item, index) => {
    const old = views[index];
    const view = makeOrKeep(item, old);
    if (view === old) return;
    if (old) old.node.replaceWith(view.node);
    else added.append(view.node);
    views[index] = view;
  });
  root.append(added);
  for (const extra of views.splice(items.length)) extra.node.remove();
}

// --- blocks ----------------------------------------------------------------------------------------------------------

/** Show the markdown `source` in `root`; `views` is the caller's, and starts empty. */
export function updateBlocks(root, views, source, isTail) {
  const blocks = parseBlocks(source);
  reconcile(root, views, blocks, (block, old) => {
    const isOpen = isTail && block === blocks.at(-1);
    if (old && old.key === block.key && old.isOpen === isOpen) return old;
    if (old?.grow && old.kind === kindOf(block)) {
      old.grow(block, isOpen); // in place: a selection and the focus survive, and a long list costs one item
      return Object.assign(old, { key: block.key, isOpen });
    }
    return { key: block.key, isOpen, kind: kindOf(block), ...makeBlock(block, 0, isOpen) };
  });
}

function kindOf({ type, isOrdered, start, head, sides }) {
  if (type === "list") return `list ${isOrdered} ${isOrdered ? start : ""}`;
  return type === "table" ? `table ${JSON.stringify([head, sides])}` : type;
}

function appendBlocks(root, source, depth, isOpen) {
  const blocks = parseBlocks(source, depth);
  for (const block of blocks) root.append(makeBlock(block, depth, isOpen && block === blocks.at(-1)).node);
}

/** Cut markdown into blocks `{type, key, …}`; `key` is the block's own source. */
export function parseBlocks(source, depth = 0) {
  const lines = source.split("\n");
  const readers = depth < MAX_DEPTH ? [readFence, readHeading, readRule, readQuote, readList, readTable] : [];
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    /** @type {any} */
    let block = null;
    for (const read of readers) if ((block = read(lines, at))) break;
    block ??= readParagraph(lines, at, readers.length > 0);
    block.key = `${block.type}\n${lines.slice(at, block.end).join("\n")}`;
    blocks.push(block);
    at = block.end;
  }
  return blocks;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^`\s]{0,40})[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}(?:(?:-[ \t]*){3,}|(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^([ \t]*)([-*+•]|[0-9]{1,9}[.)])[ \t]+(.*)$/;
const TASK = /^\[([ xX])\][ \t]+/;
const MAX_MATH_LINES = 100;
const TABLE_RULE = /^[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

function readFence(lines, at) {
  const open = FENCE.exec(lines[at]);
  if (open === null) return null;
  const close = new RegExp(`^ {0,3}${open[1][0]}{${open[1].length},}[ \\t]*$`);
  let end = at + 1;
  while (end < lines.length && !close.test(lines[end])) end += 1;
  const text = lines.slice(at + 1, end).join("\n");
  return { type: "code", language: open[2], text, isClosed: end < lines.length, end: Math.min(end + 1, lines.length) };
}

function readHeading(lines, at) {
  const match = HEADING.exec(lines[at]);
  return match && { type: "heading", level: match[1].length, text: match[2].replace(/[ \t]#+[ \t]*$/, ""), end: at + 1 };
}

function readRule(lines, at) {
  return RULE.test(lines[at]) ? { type: "rule", end: at + 1 } : null;
}

function readQuote(lines, at) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  if (end === at) return null;
  return { type: "quote", text: lines.slice(at, end).map((line) => line.replace(QUOTE, "")).join("\n"), end };
}

function readList(lines, at) {
  const first = ITEM.exec(lines[at]);
  if (first === null) return null;
  const level = indentOf(lines[at]) + 1; // a marker indented further opens a nested list
  const isOrdered = isNumber(first[2]);
  const items = [];
  let end = at;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    const item = indentOf(line) <= level ? ITEM.exec(line) : null;
    if (item && isNumber(item[2]) === isOrdered && !RULE.test(line)) items.push([item[3]]);
    else if (item) break;
    else if (line.trim() === "") {
      if (!listGoesOn(lines, end, level, isOrdered)) break;
      items.at(-1).push("");
    } else if (indentOf(line) > level) items.at(-1).push(dedent(line, level + 1));
    else if (lines[end - 1].trim() !== "" && !startsBlock(line)) items.at(-1).push(line.trim());
    else break;
  }
  return { type: "list", isOrdered, start: Number.parseInt(first[2], 10), items: items.map((item) => item.join("\n").trimEnd()), end };
}

function listGoesOn(lines, at, level, isOrdered) {
  const next = lines.slice(at, at + 4).find((line) => line.trim() !== "");
  if (next === undefined) return false;
  const item = ITEM.exec(next);
  return indentOf(next) > level || (item !== null && isNumber(item[2]) === isOrdered && !RULE.test(next));
}

function readTable(lines, at) {
  const rule = lines[at + 1];
  if (!lines[at].includes("|") || !rule?.includes("|") || rule.length > 2000 || !TABLE_RULE.test(rule)) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  return { type: "table", head: cells(lines[at]), sides: cells(rule).map(sideOf), rows: lines.slice(at + 2, end).map(cells), end };
}

function readParagraph(lines, at, mayStop) {
  let end = mathEnd(lines, at);
  while (end < lines.length && lines[end].trim() !== "" && !(mayStop && startsBlock(lines[end]))) end = mathEnd(lines, end);
  return { type: "paragraph", text: lines.slice(at, end).map((line) => line.trim()).join("\n"), end };
}

/** The line after `at`, or after the display formula that begins in it: "- b" in a formula begins no list. */
function mathEnd(lines, at) {
  const line = lines[at].replace(/`[^`]*`/g, "");
  const close = line.lastIndexOf("\\[") > line.lastIndexOf("\\]") ? "\\]" : line.split("$$").length % 2 === 0 ? "$$" : null;
  if (close === null) return at + 1;
  for (let end = at + 1; end < Math.min(lines.length, at + MAX_MATH_LINES); end += 1) {
    if (lines[end].trim() === "" || lines[end].includes("`")) break;
    if (lines[end].includes(close)) return end + 1;
  }
  return at + 1;
}

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || RULE.test(line) || ITEM.test(line);
}

function cells(line) {
  return line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|").slice(0, 32).map((cell) => cell.trim());
}

function sideOf(dashes) {
  if (!dashes.endsWith(":")) return "";
  return dashes.startsWith(":") ? "is-centred" : "is-right";
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

function dedent(line, columns) {
  return line.slice(Math.min(indentOf(line), columns));
}

function isNumber(marker) {
  return /[0-9]/.test(marker);
}

function makeBlock(block, depth, isOpen) {
  if (block.type === "code") return makeCode(block, isOpen);
  if (block.type === "list") return makeList(block, depth, isOpen);
  if (block.type === "table") return makeTable(block);
  return { node: BLOCK_NODES[block.type](block, depth, isOpen) };
}

const BLOCK_NODES = {
  paragraph: ({ text }, _depth, isOpen) => withInline(element("p"), text, isOpen),
  // h3 at most: the page has headings above the transcript
  heading: ({ level, text }, _depth, isOpen) => withInline(element(`h${Math.min(6, level + 2)}`), text, isOpen),
  rule: () => element("hr"),
  quote: ({ text }, depth, isOpen) => {
    const node = element("blockquote", { dir: directionOf(text) });
    appendBlocks(node, text, depth + 1, isOpen);
    return node;
  },
};

function makeTable({ head, sides, rows }) {
  const cell = (name) => (text, column) => {
    const node = element(name, sides[column] ? { class: sides[column] } : {});
    appendInline(node, text, { depth: 0, isOpen: false, mayLink: true });
    return node;
  };
  const row = (name, texts) => element("tr", {}, ...texts.map(cell(name)));
  const body = element("tbody");
  const node = element("div", { class: "ss-table", tabindex: "0" }, element("table", {}, element("thead", {}, row("th", head)), body));
  const views = [];
  const grow = (table) => {
    node.dir = directionOf(head.concat(...table.rows.slice(0, 9)).join(" "));
    reconcile(body, views, table.rows, (texts, old) => {
      const key = texts.join("\n");
      return old?.key === key ? old : { key, node: row("td", texts) };
    });
  };
  grow({ rows });
  return { node, grow };
}

function makeList({ isOrdered, start, items }, depth, isOpen) {
  const node = element(isOrdered ? "ol" : "ul", isOrdered && start !== 1 ? { start: String(start) } : {});
  const views = [];
  const grow = (list, isGrowing) => {
    const last = list.items.length - 1;
    node.dir = directionOf(list.items.slice(0, 9).join("\n"));
    const shown = list.items.map((text, index) => ({ text, isOpen: isGrowing && index === last }));
    reconcile(node, views, shown, (item, old) =>
      old?.text === item.text && old.isOpen === item.isOpen ? old : { ...item, node: listItem(item.text, depth, item.isOpen) },
    );
  };
  grow({ items }, isOpen);
  return { node, grow };
}

/** Without a direction of its own: its marker is on the list's side. */
function listItem(source, depth, isOpen) {
  const task = TASK.exec(source);
  const text = task ? `${task[1] === " " ? "☐" : "☑"} ${source.slice(task[0].length)}` : source;
  const node = element("li", task ? { class: "ss-task" } : {});
  if (text.includes("\n") || ITEM.test(text)) appendBlocks(node, text, depth + 1, isOpen);
  else appendInline(node, text, { depth: 0, isOpen, mayLink: true });
  return node;
}

/** Code, coloured as soon as it is whole. */
function makeCode(first, isFirstOpen) {
  const { node, code, update } = codeBox(first.language, first.text);
  const grow = ({ language, text, isClosed }, isOpen) => {
    update(language, text);
    if (isClosed || !isOpen) colourCode(code, language);
  };
  grow(first, isFirstOpen);
  return { node, grow };
}

/** A box of code with its label and a copy button. */
export function codeBox(label, text) {
  const title = element("span", { class: "ss-code-label" }, label || words("code"));
  const button = element("button", { type: "button", class: "ss-copy" }, words("Copy"));
  const code = element("code", {}, text);
  const node = element(
    "div",
    { class: "ss-code", dir: "ltr" },
    element("div", { class: "ss-code-bar" }, title, button),
    element("pre", { tabindex: "0" }, code),
  );
  button.addEventListener("click", () => copyFrom(button, () => code.textContent));
  const update = (newLabel, newText) => {
    title.textContent = newLabel || words("code");
    if (code.textContent !== newText) code.textContent = newText; // the same text keeps its colours
  };
  return { node, code, update };
}

// --- inline ----------------------------------------------------------------------------------------------------------

// Between single dollars LaTeX is told from prices by Pandoc's rule.
const INLINE =
  /(\\[([]|\$\$)|(?<!\\)\$(?=[^\s$])(?:[^$\\`\n]|\\.){1,400}?(?<!\s)\$(?![\d$])|\\([$\\`*_{}[\]()#+\-.!~|<>])|(`+)|(\*\*\*|\*\*|__|~~|\*|_)|(!?\[)|<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>|\b(https?:\/\/[^\s<>"'`*]{1,2000})|\n/g;
const LINK =
  /(!?)\[((?:[^[\]\\\n]|\\.){0,400})\]\([ \t]{0,4}<?([^\s<>()]{0,2000}(?:\([^\s<>()]{0,200}\)[^\s<>()]{0,200})?)>?(?:[ \t]+(?:"[^"\n]{0,300}"|'[^'\n]{0,300}'))?[ \t]{0,4}\)/y;
const HALF_LINK = /!?\[((?:[^[\]\\\n]|\\.){0,400})\]\([^)\n]{0,2000}$/y;
const MATH_CLOSE = { "\\(": "\\)", "\\[": "\\]", $$: "$$" };
const TICKS = /`+/g;
const RIGHT_TO_LEFT = /[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}\p{Script=Adlam}]/u;
const EMPHASIS = { "***": ["strong", "em"], "**": ["strong"], __: ["strong"], "*": ["em"], _: ["em"], "~~": ["del"] };

function withInline(node, text, isOpen = false) {
  appendInline(node, text, { depth: 0, isOpen, mayLink: true });
  return autoDirection(node);
}

/** The direction of a list, quote or table, by its first letter. Browsers' own rule skips what has a direction inside. */
function directionOf(text) {
  const [letter = ""] = /\p{L}/u.exec(text.slice(0, 2000).replace(/`[^`]*`|https?:\S+/g, "")) ?? [];
  return RIGHT_TO_LEFT.test(letter) ? "rtl" : "ltr";
}

/** Set each paragraph's direction by its script. Last, because browsers scan the text again at every append. */
function autoDirection(node) {
  node.dir = "auto";
  return node;
}

/** With `isOpen` the text is still growing: an emphasis or link without its end is rendered as if it had its end. */
function appendInline(parent, text, context) {
  const dead = new Set(); // delimiters without a closer in the rest of the text
  const find = finder(text);
  let start = 0;
  const flush = (end) => {
    if (end > start) parent.append(text.slice(start, end));
  };
  for (let at = 0; ; ) {
    const match = execFrom(INLINE, text, at);
    if (match === null) break;
    const made = inlineAt(text, match, context, dead, find);
    at = made?.end ?? match.index + match[0].length;
    if (made === null) continue;
    flush(match.index);
    parent.append(...made.nodes);
    start = made.end;
  }
  flush(text.length);
}

/** Where a text is next. For growing positions, each text is searched once over. */
function finder(text) {
  const known = new Map();
  return (needle, from) => {
    const at = known.get(needle);
    if (at === undefined || (at !== -1 && at < from)) known.set(needle, text.indexOf(needle, from));
    return known.get(needle);
  };
}

/** One compiled expression serves every level of nesting; the caller keeps its position. */
function execFrom(expression, text, at) {
  expression.lastIndex = at;
  return expression.exec(text);
}

/** The nodes of the element that `match` begins and its end, or null for plain characters. */
function inlineAt(text, match, context, dead, find) {
  const [all, math, escaped, ticks, mark, bracket, angled, bare] = match;
  const at = match.index;
  if (math) return mathAt(text, at, math, context, find);
  if (all[0] === "$") return { nodes: [mathNode(all)], end: at + all.length };
  if (all === "\n") return { nodes: [element("br")], end: at + 1 };
  if (escaped) return { nodes: [escaped], end: at + 2 };
  if (ticks) return codeAt(text, at, ticks, context, dead);
  if (context.depth >= MAX_DEPTH) return null;
  if (mark) return emphasisAt(text, at, mark, context, dead);
  if (!context.mayLink) return null;
  if (bracket) return linkAt(text, at, context);
  const target = angled ?? bare.replace(/[.,;:!?)\]]+$/, "");
  return { nodes: [link(target, target.replace(/^mailto:/i, ""))], end: at + (angled ? all.length : target.length) };
}

function codeAt(text, at, ticks, context, dead) {
  const from = at + ticks.length;
  const close = dead.has(ticks) ? -1 : findTicks(text, from, ticks.length);
  if (close === -1) dead.add(ticks);
  if (close === -1 && !(context.isOpen && ticks.length === 1)) return { nodes: [ticks], end: from };
  const inner = text.slice(from, close === -1 ? text.length : close).replace(/^ (.+) $/, "$1");
  return { nodes: inner ? [element("code", { dir: "ltr" }, inner)] : [], end: close === -1 ? text.length : close + ticks.length };
}

/** A formula with its delimiters. Without its end, or with code before it, only the delimiter is shown. */
function mathAt(text, at, open, context, find) {
  const from = at + open.length;
  const close = find(MATH_CLOSE[open], from);
  const end = close !== -1 ? close + open.length : context.isOpen ? text.length : -1;
  const tick = find("`", from);
  if (end === -1 || (tick !== -1 && tick < end)) return { nodes: [open], end: from };
  return { nodes: [mathNode(text.slice(at, end))], end };
}

function mathNode(source) {
  return element("span", { class: "ss-math", dir: "ltr" }, source);
}

function findTicks(text, from, length) {
  for (let match = execFrom(TICKS, text, from); match !== null; match = TICKS.exec(text)) {
    if (match[0].length === length) return match.index;
  }
  return -1;
}

function emphasisAt(text, at, mark, context, dead) {
  const from = at + mark.length;
  const isAtEnd = from === text.length;
  if (isAtEnd && context.isOpen) return { nodes: [], end: from }; // half a mark
  if (isAtEnd || /\s/.test(text[from]) || (mark[0] === "_" && isWord(text[at - 1]))) return { nodes: [mark], end: from };
  const close = dead.has(mark) ? -1 : findClose(text, from, mark);
  if (close === -1) dead.add(mark);
  if (close === -1 && !context.isOpen) return { nodes: [mark], end: from };
  const inner = text.slice(from, close === -1 ? text.length : close);
  const nodes = EMPHASIS[mark].map((name) => element(name));
  nodes.reduce((outer, node) => (outer.append(node), node));
  appendInline(nodes.at(-1), inner, { ...context, depth: context.depth + 1, isOpen: context.isOpen && close === -1 });
  return { nodes: [nodes[0]], end: close === -1 ? text.length : close + mark.length };
}

/** A mark's closer does not depend on its opener: a failed search is not repeated. */
function findClose(text, from, mark) {
  for (let at = text.indexOf(mark, from + 1); at !== -1; at = text.indexOf(mark, at + 1)) {
    const after = text[at + mark.length];
    if (/[\s\\]/.test(text[at - 1])) continue;
    if (mark.length === 1 && after === mark) at += 1; // half of a double mark
    else if (mark[0] !== "_" || !isWord(after)) return at;
  }
  return -1;
}

function isWord(character) {
  return character !== undefined && /[\p{L}\p{N}_]/u.test(character);
}

function linkAt(text, at, context) {
  const match = execFrom(LINK, text, at);
  if (match === null) return halfLinkAt(text, at, context);
  const [all, bang, label, target] = match;
  const text_ = label.replace(/\\(.)/g, "$1");
  return { nodes: [link(target, bang ? words("Image: {text}", { text: text_ || target }) : label, !bang)], end: at + all.length };
}

function halfLinkAt(text, at, context) {
  const half = context.isOpen ? execFrom(HALF_LINK, text, at) : null;
  return half && { nodes: [half[1]], end: text.length };
}

/** A link that opens in a new tab and sends no referrer; plain characters if the address is not allowed. */
function link(target, label, hasMarkup = false) {
  const url = safeUrl(target);
  if (url === null) return label === target || target === "" ? label : `${label} (${target})`;
  const node = element("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href });
  if (hasMarkup) appendInline(node, label, { depth: 1, isOpen: false, mayLink: false });
  else node.append(label);
  const claimed = safeUrl(label.trim());
  if (claimed !== null && claimed.host !== url.host) node.append(` (${url.host || url.pathname})`); // the text names another host than the link
  if (node.textContent.trim() === "") node.append(url.href);
  return node;
}

// eslint-disable-next-line no-control-regex -- these are what it looks for
const UNSEEN = /[\u0000-\u0020\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069]/; // characters that hide where a link goes

/** http, https and mailto, absolute, without a password in front of the host. */
export function safeUrl(target) {
  return /^(?:https?:\/\/|mailto:)/i.test(target) ? parseUrl(target) : null;
}

/** http and https, or relative and on this site. */
export function sourceUrl(target) {
  if (/^https?:\/\//i.test(target)) return parseUrl(target);
  if (target === "" || /^[a-z][a-z0-9+.-]*:/i.test(target)) return null;
  const url = parseUrl(target, location.href);
  return url !== null && url.origin === location.origin ? url : null;
}

function parseUrl(target, base) {
  if (UNSEEN.test(target)) return null;
  try {
    const url = new URL(target, base);
    return ["http:", "https:", "mailto:"].includes(url.protocol) && !url.username && !url.password ? url : null;
  } catch {
    return null;
  }
}

// --- copying ---------------------------------------------------------------------------------------------------------

/** Copy `read()` and confirm on the button for a moment. */
export async function copyFrom(button, read) {
  const label = button.dataset.label ?? button.textContent;
  button.dataset.label = label;
  const isCopied = await copyText(read());
  button.textContent = isCopied ? words("Copied") : words("Press Ctrl+C");
  setTimeout(() => {
    button.textContent = label;
  }, 1600);
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // plain http on a network address has no clipboard API
  }
}

function copyBySelection(text) {
  const focused = /** @type {HTMLElement | null} */ (document.activeElement);
  const area = element("textarea", { class: "ss-sr", "aria-hidden": "true", tabindex: "-1" });
  area.value = text;
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return isCopied;
}
