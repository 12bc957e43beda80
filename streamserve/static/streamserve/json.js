// JSON text, formatted for reading: its own characters with other white space, so that no number changes. Pure.

const TOKEN = /"(?:[^"\\]|\\[^])*(?:"|$)|[{}[\],:]|[^\s{}[\],:"]+/g;
const MAX_INDENT = 24; // deeper levels are not indented further, so that the result stays linear in the text
const OBJECT_OR_ARRAY = /^\s*(?:\{\s*(?:["}]|$)|\[\s*(?:[{\]]|$))/;

/** Whether the whole text is one JSON object or array. */
export function isJson(text) {
  if (!/^\s*[{[]/.test(text)) return false;
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** Whether a text that is still growing looks like JSON. */
export function mayBecomeJson(text) {
  return OBJECT_OR_ARRAY.test(text);
}

/** Format JSON, or the beginning of it; any other text stays as it is. */
export function prettyJson(text) {
  if (!/^\s*[{[]/.test(text)) return text;
  const out = [];
  let depth = 0;
  let before = "";
  const line = () => out.push("\n", "  ".repeat(Math.min(depth, MAX_INDENT)));
  for (const [token] of text.matchAll(TOKEN)) {
    const closes = token === "}" || token === "]";
    if (closes) depth = Math.max(0, depth - 1);
    if (closes ? before !== "{" && before !== "[" : before === "{" || before === "[" || before === ",") line();
    else if (before === ":") out.push(" ");
    out.push(token);
    if (token === "{" || token === "[") depth += 1;
    before = token;
  }
  return out.join("");
}
