// One question and its answer on the page, cloned from the template in chat.html.

import { isLive } from "./turn_tree.js";
import { copyFrom, element } from "./render.js";
import { ApprovalView } from "./approval_view.js";
import { AnswerView, linkMarkers, sourceItems } from "./answer_view.js";
import { hasContent, wholeOf } from "./blocks.js";
import { typeset } from "./formulas.js";
import { canContinue } from "./parts.js";
import { QuestionView } from "./question_view.js";
import { RatingView } from "./rating_view.js";
import { count, decimal, words } from "./words.js";

export class TurnView {
  /**
   * `on.again(turn)`: answer this question again; `on.proceed(turn)`: continue the answer; `on.change(turn, question)`:
   * ask something else in its place, false if that is not possible now; `on.siblings(turn)` are the turns at its place,
   * and `on.show(turn)` goes to such a turn; `on.approve(turn, approvals)` continues a run that has asked; `on.canContinue(turn)`: whether its model can.
   * For ratings see RatingView.
   */
  constructor(template, turn, on, { showsFigures = false, budgets = {}, hasMath = false } = {}) {
    this.turn = turn;
    this.on = on;
    this.showsFigures = showsFigures;
    this.budgets = budgets;
    this.hasMath = hasMath;
    this.node = template.content.firstElementChild.cloneNode(true);
    this.parts = Object.fromEntries([...this.node.querySelectorAll("[data-ss]")].map((part) => [part.dataset.ss, part]));
    this.answer = new AnswerView(this.parts.body);
    this.isHeldUp = false;
    this.isStep = false;
    this.question = new QuestionView(this.parts, turn, on);
    this.rating = new RatingView(this.parts, turn, on);
    this.approvals = new ApprovalView(this.parts.approvals, turn, on.approve);
    this.parts.retry.addEventListener("click", () => on.again(turn));
    this.parts.again.addEventListener("click", () => on.again(turn));
    this.parts.edit.addEventListener("click", () => this.question.edit());
    this.parts.continue.addEventListener("click", () => on.proceed(turn));
    this.parts.made.addEventListener("toggle", () => this.parts.made.open && this.parts.made.scrollIntoView({ block: "nearest" }));
    this.parts.copy.addEventListener("click", () => copyFrom(this.parts.copy, () => wholeOf(turn).text.trim()));
    this.show();
    this.paint();
  }

  get isLive() {
    return isLive(this.turn);
  }

  /** Show the text so far, on an animation frame. */
  paint() {
    const { text, blocks, citations } = wholeOf(this.turn);
    this.answer.update(text, this.isLive, blocks);
    linkMarkers(this.parts.body, citations);
    if (this.hasMath) typeset(this.parts.body);
    this.showSources(citations);
    this.showTyping();
  }

  /** Both only grow, until a snapshot replaces them. */
  showSources(citations) {
    const { notes } = this.turn;
    const { sources, "source-list": list } = this.parts;
    this.parts.notes.hidden = notes.length === 0;
    if (this.parts.notes.childElementCount !== notes.length) {
      this.parts.notes.replaceChildren(...notes.map((text) => element("p", { dir: "auto" }, text)));
    }
    sources.hidden = citations.length === 0;
    if (list.childElementCount !== citations.length) list.replaceChildren(...sourceItems(citations));
  }

  /** Show dots until there is text, and below the text during a step and while the answer waits for its model. */
  showTyping() {
    this.parts.typing.hidden = !this.isLive || (hasContent(this.turn) && !this.isHeldUp && !this.isStep);
    this.parts.skeleton.hidden = !this.isLive || hasContent(wholeOf(this.turn));
    this.node.classList.toggle("is-held-up", this.isHeldUp);
  }

  /** Show a text beside the dots: the queue, the countdown, a pipeline's step. */
  showStatus(text, { isStep = false } = {}) {
    this.parts.progress.textContent = text;
    this.isStep = isStep;
    this.showTyping();
  }

  /** Show why the answer waits for its model; "" when it continues. */
  holdUp(why) {
    this.isHeldUp = why !== "";
    this.showStatus(why);
    this.showTyping();
  }

  /** Show the state around the text. */
  show() {
    const { turn, parts } = this;
    parts.answer.setAttribute("aria-busy", String(this.isLive));
    this.node.classList.toggle("is-live", this.isLive);
    this.showTyping();
    const notice = noticeOf(turn);
    parts.notice.hidden = notice === "" || this.isLive;
    parts.notice.classList.toggle("is-error", turn.state === "failed" || turn.error !== null);
    parts.words.textContent = notice;
    const isTooLong = turn.error?.isTooLong ?? false; // sending it again cannot help
    parts.retry.hidden = turn.state !== "failed" || isTooLong;
    parts.edit.hidden = turn.state !== "failed" || !isTooLong;
    const whole = wholeOf(turn);
    parts.foot.hidden = this.isLive || !hasContent(whole);
    parts.copy.hidden = whole.text.trim() === "";
    parts.again.hidden = turn.state === "failed";
    parts.continue.hidden = !canContinue(turn) || !this.on.canContinue(turn);
    this.question.show();
    this.rating.show();
    this.approvals.show();
    this.showMaking();
  }

  /** Tokens and times, the steps of a pipeline, and where the time went, folded. */
  showMaking() {
    const { turn, parts } = this;
    const phases = this.showsFigures ? Object.entries(turn.figures?.phases ?? {}) : [];
    const steps = turn.steps.filter(Boolean);
    const figures = this.showsFigures ? figureNodes(turn.figures, this.budgets) : [];
    parts.made.hidden = this.isLive || steps.length + phases.length + figures.length === 0;
    parts.figures.replaceChildren(...figures);
    parts["step-list"].replaceChildren(...steps.map((text) => element("li", { dir: "auto" }, text)));
    parts.phases.replaceChildren(...phaseNodes(phases));
  }
}

function noticeOf({ state, finishReason, error }) {
  if (state === "failed" || error !== null) return error?.message ?? words("The answer could not be finished.");
  if (state === "stopped") return words("Stopped");
  if (finishReason === "length") return words("Ended at the length limit");
  if (finishReason === "abandoned") return words("Ended, because it had no reader");
  if (finishReason === "content_filter") return words("Ended by a filter");
  return "";
}

/** A row a phase: its name, a bar as long as its share, its seconds. */
function phaseNodes(phases) {
  const longest = Math.max(...phases.map(([, seconds]) => seconds));
  return phases.map(([name, seconds]) => {
    const bar = element("span", { class: "ss-bar", "aria-hidden": "true" });
    bar.style.inlineSize = `${Math.max(1, Math.round((100 * seconds) / longest))}%`;
    const label = element("dt", {}, name.replaceAll("_", " "));
    return element("div", {}, label, element("dd", {}, bar, element("span", {}, time(seconds))));
  });
}

/** "128 tokens", "42 tok/s", "first token 210 ms here, 180 ms server", "64 cached", each with a longer title. */
function figureNodes(figures, budgets) {
  if (figures === null) return [];
  const tokens = { count: count(figures.tokens) };
  const out = [];
  if (figures.tokens > 0 || figures.total == null) {
    out.push(figure(figures.tokens === 1 ? words("{count} token", tokens) : words("{count} tokens", tokens), words("Tokens of this answer")));
  }
  if (figures.tokensPerSecond !== null) {
    out.push(figure(words("{rate} tok/s", { rate: rate(figures.tokensPerSecond) }), words("Speed after the first token")));
  }
  const first = [];
  if (figures.ttftSeen !== null) first.push(words("{time} here", { time: time(figures.ttftSeen) }));
  if (figures.ttftServer !== null) first.push(words("{time} server", { time: time(figures.ttftServer) }));
  if (first.length > 0) {
    const title = words("From sending the question to the first words on this screen, and as the server measured it");
    const node = figure(words("first token {times}", { times: first.join(", ") }), title);
    out.push(withBudget(node, figures.ttftServer ?? figures.ttftSeen, budgets.firstToken));
  }
  if (budgets.total && figures.total != null) {
    const node = figure(words("{time} in all", { time: time(figures.total) }), words("From the question's arrival at the server to the end"));
    out.push(withBudget(node, figures.total, budgets.total));
  }
  if (figures.cachedTokens > 0) {
    const title = words("Of {count} prompt tokens, taken from the prefix cache", { count: count(figures.promptTokens) });
    out.push(figure(words("{count} cached", { count: count(figures.cachedTokens) }), title));
  }
  return withDots(out);
}

/** "210 ms (≤ 500 ms)": what was measured, beside what it may be. */
function withBudget(node, seconds, budget) {
  if (!budget) return node;
  const limit = budget < 1 ? time(budget) : `${count(budget)} s`;
  node.append(" ", element("small", { title: words("The budget of this chat") }, `(≤ ${limit})`));
  node.classList.toggle("is-over", seconds > budget);
  return node;
}

/** A dot between two figures: outside of them, because their direction may be another than the line's. */
function withDots(nodes) {
  return nodes.flatMap((node, index) => (index === 0 ? [node] : [element("i", { "aria-hidden": "true" }, "·"), node]));
}

function figure(text, title) {
  const node = document.createElement("span");
  node.textContent = text;
  node.title = title;
  node.dir = "auto";
  return node;
}

function rate(perSecond) {
  return perSecond >= 100 ? count(Math.round(perSecond)) : decimal(perSecond, 1);
}

function time(seconds) {
  return seconds < 1 ? `${Math.max(1, Math.round(seconds * 1000))} ms` : `${decimal(seconds, 2)} s`;
}
