// The question of a turn: its bubble, folded if it is long, the editor that takes its place, and the way to its siblings.

import { showFiles } from "./attachments.js";
import { words } from "./words.js";

const FOLDED_CHARS = 900;
const FOLDED_LINES = 12;

export class QuestionView {
  /** `parts` and `on` are those of the TurnView. */
  constructor(parts, turn, on) {
    this.parts = parts;
    this.turn = turn;
    this.on = on;
    parts.question.textContent = turn.question;
    if (parts["asked-files"] !== undefined) showFiles(parts["asked-files"], turn.attachments ?? [], on.fileUrl);
    const isLong = turn.question.length > FOLDED_CHARS || turn.question.split("\n").length > FOLDED_LINES;
    parts.fold.hidden = !isLong;
    this.fold(isLong);
    parts.fold.addEventListener("click", () => this.fold(parts.fold.getAttribute("aria-expanded") === "true"));
    parts.change.addEventListener("click", () => this.edit());
    parts.before.addEventListener("click", () => this.step(-1));
    parts.after.addEventListener("click", () => this.step(1));
    this.listenToEditor();
  }

  fold(isFolded) {
    const { question, fold } = this.parts;
    question.classList.toggle("is-folded", isFolded);
    fold.setAttribute("aria-expanded", String(!isFolded));
    fold.textContent = isFolded ? words("Show more") : words("Show less");
  }

  /** Show the place among its siblings, which other tabs may have added. */
  show() {
    const siblings = this.on.siblings(this.turn);
    const at = siblings.indexOf(this.turn);
    const { siblings: bar, before, after, place } = this.parts;
    bar.hidden = siblings.length < 2;
    before.disabled = at <= 0;
    after.disabled = at === siblings.length - 1;
    place.textContent = `${at + 1}/${siblings.length}`;
    bar.setAttribute("aria-label", words("Version {number} of {of}", { number: at + 1, of: siblings.length }));
  }

  step(by) {
    const siblings = this.on.siblings(this.turn);
    const other = siblings[siblings.indexOf(this.turn) + by];
    if (other !== undefined) this.on.show(other, by);
  }

  /** Give the focus to the button of a direction, or to the other, at the end of the row. */
  focusStep(by) {
    const { before, after } = this.parts;
    const [wanted, other] = by < 0 ? [before, after] : [after, before];
    (wanted.disabled ? other : wanted).focus({ preventScroll: true });
    this.parts.place.closest("article")?.scrollIntoView({ block: "nearest" });
  }

  // --- the editor ----------------------------------------------------------------------------------------------------

  get isEdited() {
    return !this.parts.editor.hidden;
  }

  edit() {
    const { editor, draft } = this.parts;
    if (!this.isEdited) draft.value = this.turn.question;
    this.toggle(true);
    this.resize();
    draft.focus();
    draft.setSelectionRange(draft.value.length, draft.value.length);
    editor.scrollIntoView({ block: "nearest" });
  }

  toggle(isEdited) {
    this.parts.editor.hidden = !isEdited;
    this.parts.bubble.hidden = isEdited;
  }

  /** Leave the editor; the question is as it was. */
  leave() {
    this.toggle(false);
    this.parts.change.focus();
  }

  send() {
    const text = this.parts.draft.value.trim();
    if (text === "") return;
    if (text === this.turn.question) this.leave();
    else if (this.on.change(this.turn, text)) this.toggle(false);
  }

  resize() {
    const { draft } = this.parts;
    draft.style.height = "auto";
    draft.style.height = `${Math.min(draft.scrollHeight, window.innerHeight * 0.4)}px`;
  }

  listenToEditor() {
    const { editor, draft, cancel } = this.parts;
    editor.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    cancel.addEventListener("click", () => this.leave());
    draft.addEventListener("input", () => this.resize());
    editor.addEventListener("keydown", (event) => {
      if (event.isComposing || event.keyCode === 229) return;
      if (event.key === "Escape") {
        event.preventDefault();
        event.stopPropagation(); // it stops no answer, and closes no floating chat
        this.leave();
      } else if (event.key === "Enter" && !event.shiftKey && event.target === draft) {
        event.preventDefault();
        this.send();
      }
    });
  }
}
