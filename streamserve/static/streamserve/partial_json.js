// The value of JSON that is still being written: what is sure so far. Pure.
//
// Invariant: as the text grows, the value only grows: texts get longer, lists and objects get more. So a number at the end
// of the text, which may get more digits, is not there yet, nor is `tru`; half an escape or half a pair of surrogates is
// left out of its text.

const MAX_DEPTH = 512;
const SPACE = /[ \t\n\r]*/y;
const NUMBER = /-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?/y;
const PLAIN = /[^"\\]*/y;
const ESCAPE = /\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})/y;
const LITERALS = { true: true, false: false, null: null };

/**
 * Return the value that `text` has so far; undefined before there is one. Of a text that is no JSON, what stands before
 * the fault. `isWhole`: nothing follows, so that a number at its end is that number.
 */
export function partialJson(text, { isWhole = false } = {}) {
  return new Reader(text, isWhole).value(0);
}

class Reader {
  constructor(text, isWhole) {
    this.text = text;
    this.isWhole = isWhole;
    this.at = 0;
    this.isOver = false; // at the end, or at a fault
  }

  /** @returns {any} */
  value(depth) {
    this.match(SPACE);
    const first = this.text[this.at];
    if (first === '"') return this.string();
    if (depth < MAX_DEPTH && first === "{") return this.object(depth);
    if (depth < MAX_DEPTH && first === "[") return this.array(depth);
    return this.scalar();
  }

  object(depth) {
    const out = {};
    this.at += 1;
    while (this.opensNext("}", Object.keys(out).length > 0)) {
      if (this.text[this.at] !== '"') return this.end(out);
      const key = this.string();
      this.match(SPACE);
      if (this.isOver || !this.skip(":")) return this.end(out);
      const value = this.value(depth + 1);
      if (value !== undefined) Object.defineProperty(out, key, { value, configurable: true, enumerable: true, writable: true });
      if (this.isOver) return out;
    }
    return out;
  }

  array(depth) {
    const out = [];
    this.at += 1;
    while (this.opensNext("]", out.length > 0)) {
      const value = this.value(depth + 1);
      if (value !== undefined) out.push(value);
      if (this.isOver) return out;
    }
    return out;
  }

  /** Step to the next member; false behind the bracket that closes, and at the end. */
  opensNext(bracket, hasMembers) {
    this.match(SPACE);
    if (this.skip(bracket)) return false;
    if (hasMembers) {
      if (!this.skip(",")) this.end();
      this.match(SPACE);
    }
    if (this.at >= this.text.length) this.end();
    return !this.isOver;
  }

  /** @returns {string} */
  string() {
    /** @type {string[]} */
    const parts = [];
    this.at += 1;
    for (;;) {
      parts.push(this.match(PLAIN));
      if (this.skip('"')) return parts.join("");
      const escape = this.match(ESCAPE);
      if (escape === "") break;
      parts.push(JSON.parse(`"${escape}"`));
    }
    return this.end(parts.join("").replace(/[\ud800-\udbff]$/, ""));
  }

  scalar() {
    const { text } = this;
    for (const [name, value] of Object.entries(LITERALS)) {
      if (text.startsWith(name, this.at)) {
        this.at += name.length;
        return value;
      }
    }
    const number = this.match(NUMBER);
    const mayGrow = !this.isWhole && /^[0-9.eE+-]*$/.test(text.slice(this.at, this.at + 400));
    if (number === "" || mayGrow) return this.end();
    return Number(number);
  }

  match(pattern) {
    pattern.lastIndex = this.at;
    const found = pattern.exec(this.text)?.[0] ?? "";
    this.at += found.length;
    return found;
  }

  skip(char) {
    if (this.text[this.at] !== char) return false;
    this.at += 1;
    return true;
  }

  /**
   * @template [T=undefined]
   * @param {T} [value]
   * @returns {T}
   */
  end(value) {
    this.isOver = true;
    return /** @type {T} */ (value);
  }
}
