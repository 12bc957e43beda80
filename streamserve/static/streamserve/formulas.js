// Typesets LaTeX as MathML by Temml (vendor/temml), where the site asks for it (`math=True`). The library, its style sheet
// and its font are loaded with the first whole formula. What it cannot read stays as it was written.
//
// A formula is a model's text: commands that make links, load images or name styles are off, macros and sizes bounded.

const DELIMITERS = { "\\(": ["\\)", false], "\\[": ["\\]", true], $$: ["$$", true], $: ["$", false] };
const MAX_CHARS = 2_000;
const MAX_KNOWN = 200; // a paragraph is made anew while it grows: its formulas are not typeset again
const OPTIONS = { trust: false, strict: false, throwOnError: true, maxSize: [20, 20], maxExpand: 200 };
const known = new Map(); // source → its MathML, or null where it cannot be read
let temml;
let loading;

/** Typeset the whole formulas in `root`; those found before the library is there, when it is there. */
export function typeset(root) {
  const found = [...root.querySelectorAll(".ss-math:not(.is-set)")].filter(({ textContent }) => cut(textContent) !== null);
  if (found.length === 0) return;
  if (temml === undefined) void load().then(() => typeset(root)).catch(() => {}); // without the library they stay as written
  else for (const node of found) show(node, node.textContent);
}

/**
 * The LaTeX between its delimiters, and whether it stands alone; null if a delimiter is missing.
 * @returns {{tex: string, isDisplay: boolean} | null}
 */
export function cut(source) {
  const open = Object.keys(DELIMITERS).find((each) => source.startsWith(each));
  if (open === undefined || source.length > MAX_CHARS) return null;
  const [close, isDisplay] = DELIMITERS[open];
  if (source.length < open.length + close.length || !source.endsWith(close)) return null;
  return { tex: source.slice(open.length, -close.length), isDisplay };
}

function show(node, source) {
  node.classList.add("is-set");
  if (!known.has(source)) known.set(source, mathOf(/** @type {any} */ (cut(source))));
  if (known.size > MAX_KNOWN) known.delete(known.keys().next().value);
  const math = known.get(source);
  if (math === null) return;
  node.classList.add("is-math");
  node.classList.toggle("is-display", math.getAttribute("display") === "block");
  node.replaceChildren(math.cloneNode(true));
}

function mathOf({ tex, isDisplay }) {
  try {
    const tree = temml.__renderToMathMLTree(tex, { ...OPTIONS, displayMode: isDisplay });
    withoutInlineStyle(tree);
    return tree.toNode();
  } catch {
    return null; // not LaTeX, or more than it may be
  }
}

/** A `style` attribute is refused by a Content-Security-Policy; a property that a script sets is not. */
function withoutInlineStyle(node) {
  for (const rule of (node.attributes?.style ?? "").split(";").filter(Boolean)) {
    const [name, value] = rule.split(":");
    node.style[name.trim()] = value.trim();
  }
  delete node.attributes?.style;
  for (const child of node.children ?? []) withoutInlineStyle(child);
}

function load() {
  loading ??= new Promise((resolve, reject) => {
    const style = document.createElement("link");
    Object.assign(style, { rel: "stylesheet", href: addressOf("Temml-Local.css") });
    const script = document.createElement("script");
    Object.assign(script, { src: addressOf("temml.min.js"), onload: resolve, onerror: reject });
    document.head.append(style, script);
  }).then(() => {
    temml = /** @type {any} */ (window).temml;
  });
  return loading;
}

function addressOf(file) {
  return new URL(`./vendor/temml/${file}`, import.meta.url).href;
}
