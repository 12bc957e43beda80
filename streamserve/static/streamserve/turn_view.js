// One question and its answer on the page, cloned from the template in chat.html.

import { AnswerView, copyFrom } from "./render.js";

export class TurnView {
  /** `on.again(turn)` is called to answer this question again. */
  constructor(template, turn, on) {
    this.turn = turn;
    this.node = template.content.firstElementChild.cloneNode(true);
    this.parts = Object.fromEntries([...this.node.querySelectorAll("[data-ss]")].map((part) => [part.dataset.ss, part]));
    this.answer = new AnswerView(this.parts.body);
    this.isHeldUp = false;
    this.parts.question.textContent = turn.question;
    this.parts.retry.addEventListener("click", () => on.again(turn));
    this.parts.again.addEventListener("click", () => on.again(turn));
    this.parts.copy.addEventListener("click", () => copyFrom(this.parts.copy, () => turn.text.trim()));
    this.show();
    this.paint();
  }

  get isLive() {
    return this.turn.state === "waiting" || this.turn.state === "streaming";
  }

  /** Show the text so far, on an animation frame. */
  paint() {
    this.answer.update(this.turn.text, this.isLive);
    this.showTyping();
  }

  /** Show dots until there is text, and below the text while the answer waits for its model. */
  showTyping() {
    this.parts.typing.hidden = !this.isLive || (this.turn.text.trim() !== "" && !this.isHeldUp);
    this.node.classList.toggle("is-held-up", this.isHeldUp);
  }

  /** Show a text beside the dots: the queue, the countdown. */
  showStatus(text) {
    this.parts.progress.textContent = text;
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
    parts.notice.classList.toggle("is-error", turn.state === "failed");
    parts.words.textContent = notice;
    parts.retry.hidden = turn.state !== "failed";
    parts.foot.hidden = this.isLive || turn.text.trim() === "";
    parts.again.hidden = turn.state === "failed";
    parts.figures.replaceChildren(...figureNodes(turn.figures));
  }
}

function noticeOf({ state, finishReason, error }) {
  if (state === "failed") return error?.message ?? "The answer could not be finished.";
  if (state === "stopped") return "Stopped";
  if (finishReason === "length") return "Ended at the length limit";
  if (finishReason === "abandoned") return "Ended, because it had no reader";
  if (finishReason === "content_filter") return "Ended by a filter";
  return "";
}

/** "128 tokens", "42 tok/s", "first token 210 ms here, 180 ms server", "64 cached", each with a longer title. */
function figureNodes(figures) {
  if (figures === null) return [];
  const out = [figure(`${count(figures.tokens)} token${figures.tokens === 1 ? "" : "s"}`, "Tokens of this answer")];
  if (figures.tokensPerSecond !== null) out.push(figure(`${rate(figures.tokensPerSecond)} tok/s`, "Speed after the first token"));
  const first = [];
  if (figures.ttftSeen !== null) first.push(`${time(figures.ttftSeen)} here`);
  if (figures.ttftServer !== null) first.push(`${time(figures.ttftServer)} server`);
  if (first.length > 0) {
    out.push(figure(`first token ${first.join(", ")}`, "From sending the question to the first words on this screen, and as the server measured it"));
  }
  if (figures.cachedTokens > 0) {
    out.push(figure(`${count(figures.cachedTokens)} cached`, `Of ${count(figures.promptTokens)} prompt tokens, taken from the prefix cache`));
  }
  return out;
}

function figure(text, title) {
  const node = document.createElement("span");
  node.textContent = text;
  node.title = title;
  return node;
}

function count(number) {
  return number.toLocaleString("en");
}

function rate(perSecond) {
  return perSecond >= 100 ? count(Math.round(perSecond)) : perSecond.toFixed(1);
}

function time(seconds) {
  return seconds < 1 ? `${Math.max(1, Math.round(seconds * 1000))} ms` : `${seconds.toFixed(2)} s`;
}
