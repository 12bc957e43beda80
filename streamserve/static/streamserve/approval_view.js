// What a run asks its user: a card for each call, with its arguments, Allow and Refuse. What the model wrote is set by
// textContent only. The answers go together, once every card has one.

import { prettyJson } from "./json.js";
import { isAsking } from "./parts.js";
import { element } from "./render.js";
import { words } from "./words.js";

const MAX_WHY_CHARS = 2000;

export class ApprovalView {
  /** `approve(turn, approvals)` continues the run; false where that is not possible now. */
  constructor(root, turn, approve) {
    this.root = root;
    this.turn = turn;
    this.approve = approve;
    this.shownOf = ""; // the stream whose questions are shown
    this.answers = new Map(); // call id → {id, allow, message}
  }

  show() {
    const isShown = isAsking(this.turn);
    this.root.hidden = !isShown;
    const { streamId, approvals } = this.turn;
    if (!isShown) {
      this.shownOf = "";
      this.root.replaceChildren();
    } else if (this.shownOf !== streamId) {
      this.shownOf = streamId;
      this.answers.clear();
      this.root.replaceChildren(...approvals.map((asked) => this.card(asked)));
    }
  }

  card(asked) {
    const question = questionOf(asked);
    const why = element("input", { type: "text", maxlength: MAX_WHY_CHARS, dir: "auto", autocomplete: "off", "aria-label": words("Why, if you like"), placeholder: words("Why, if you like") });
    const refuse = element("button", { type: "button", class: "ss-refuse", "aria-pressed": "false" }, words("Refuse"));
    const allow = element("button", { type: "button", class: "ss-allow", "aria-pressed": "false" }, words("Allow"));
    for (const button of [refuse, allow]) {
      button.addEventListener("click", () => {
        for (const one of [refuse, allow]) one.setAttribute("aria-pressed", String(one === button));
        this.answer(asked.id, { id: asked.id, allow: button === allow, ...(why.value.trim() && { message: why.value.trim() }) });
      });
    }
    const bar = element("div", { class: "ss-approval-bar" }, why, element("span", {}, refuse, allow));
    const title = element("p", { class: "ss-approval-question", dir: "auto" }, question);
    const tool = element("p", { class: "ss-approval-tool" }, element("code", { dir: "ltr" }, asked.name));
    return element("div", { class: "ss-approval", role: "group", "aria-label": question }, title, tool, argumentsNode(asked.arguments), bar);
  }

  answer(id, answer) {
    this.answers.set(id, answer);
    const { approvals } = this.turn;
    if (approvals.every((asked) => this.answers.has(asked.id))) this.approve(this.turn, approvals.map((asked) => this.answers.get(asked.id)));
  }
}

/** What a call asks, in words. */
export function questionOf({ name, message }) {
  return message || words("Allow {name}?", { name });
}

/** The arguments: a line for each of a flat object, JSON for anything else. */
function argumentsNode(text) {
  const entries = entriesOf(text);
  if (entries === null) return element("pre", { dir: "auto" }, prettyJson(text));
  const rows = entries.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", { dir: "auto" }, String(value))));
  const list = element("dl", {}, ...rows);
  list.hidden = rows.length === 0;
  return list;
}

function entriesOf(text) {
  try {
    const values = JSON.parse(text);
    if (typeof values !== "object" || values === null || Array.isArray(values)) return null;
    const entries = Object.entries(values);
    const isExact = entries.every(([, value]) => typeof value === "string" || typeof value === "boolean" || Number.isSafeInteger(value));
    return isExact ? entries : null; // JSON shows large numbers, lists and objects as they were written
  } catch {
    return null;
  }
}
