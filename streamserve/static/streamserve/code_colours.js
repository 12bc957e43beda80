// Colours whole code blocks by highlight.js (vendor/highlight), which is loaded with the first block that names its
// language. Its tokens become nodes by createElement and textContent, never HTML; the block's text stays as it is.
//
// Blocks wait their turn between frames, so that a page full of code stays responsive.

const MAX_CHARS = 20_000; // longer code would hold the page up, and stays plain
const MAX_KNOWN = 40; // a list item is made anew while it grows: its code must not lose its colours for a frame
const known = new Map(); // language and text → the coloured nodes
let library;
let turn = Promise.resolve();

/** Colour `code`, an element whose text is code in `language`, now if it was coloured before, else soon. */
export function colourCode(code, language) {
  const text = code.textContent;
  if (language === "" || text === "" || text.length > MAX_CHARS || code.childElementCount > 0) return;
  const before = known.get(keyOf(language, text));
  if (before !== undefined) code.replaceChildren(before.cloneNode(true));
  else turn = turn.then(() => colour(code, language, text)).catch(() => {}); // without the library code is plain
}

async function colour(code, language, text) {
  library ??= import(new URL("./vendor/highlight/highlight.min.js", import.meta.url).href);
  const { default: highlighter } = await library;
  if (highlighter.getLanguage(language) === undefined) return;
  await idle();
  if (code.textContent !== text || !code.isConnected || isSelected(code)) return;
  const tree = highlighter.highlight(text, { language, ignoreIllegals: true })._emitter.rootNode;
  const nodes = document.createDocumentFragment();
  nodes.append(...tree.children.map(nodeOf));
  known.set(keyOf(language, text), nodes.cloneNode(true));
  if (known.size > MAX_KNOWN) known.delete(known.keys().next().value);
  code.replaceChildren(nodes);
}

function keyOf(language, text) {
  return `${language}\n${text}`;
}

/** A token is a text, or has a scope ("title.function_") and tokens. */
function nodeOf(token) {
  if (typeof token === "string") return document.createTextNode(token);
  const node = document.createElement("span");
  if (token.scope) node.className = classOf(token.scope);
  node.append(...token.children.map(nodeOf));
  return node;
}

/** "title.function_" → "ss-hl-title" */
export function classOf(scope) {
  return `ss-hl-${scope.split(/[.:]/, 1)[0]}`;
}

function idle() {
  return new Promise((resolve) => {
    if (window.requestIdleCallback === undefined) setTimeout(resolve, 50); // Safari
    else requestIdleCallback(resolve, { timeout: 1000 });
  });
}

/** A selection would be lost with the nodes that it is in. */
function isSelected(code) {
  const selection = document.getSelection();
  return selection !== null && !selection.isCollapsed && selection.containsNode(code, true);
}
