// Thumbs and a comment on a finished answer, where the server keeps its conversation.

import { isLive } from "./turn_tree.js";
import { words } from "./words.js";

const GOOD = 1;
const BAD = -1;

export class RatingView {
  /**
   * `parts` and `turn` are those of the TurnView. `on.rate(turn, rating, comment)` stores a rating (1, -1, or null: none) and
   * rejects where that fails; `on.canRate(turn)`: whether it can; `on.announce(text)`.
   */
  constructor(parts, turn, on) {
    this.parts = parts;
    this.turn = turn;
    this.on = on;
    this.isStoring = false;
    parts.good.addEventListener("click", () => this.press(GOOD));
    parts.bad.addEventListener("click", () => this.press(BAD));
    parts["remark-cancel"].addEventListener("click", () => this.leave());
    parts.remark.addEventListener("submit", (event) => {
      event.preventDefault();
      void this.comment();
    });
    parts.remark.addEventListener("keydown", (event) => {
      if (event.isComposing || event.keyCode === 229) return;
      if (event.key === "Escape") {
        event.preventDefault();
        event.stopPropagation(); // it closes no floating chat
        this.leave();
      } else if (event.key === "Enter" && !event.shiftKey && event.target === parts.comment) {
        event.preventDefault();
        void this.comment();
      }
    });
  }

  show() {
    const { turn, parts } = this;
    parts.rating.hidden = isLive(turn) || !this.on.canRate(turn);
    parts.good.setAttribute("aria-pressed", String(turn.rating === GOOD));
    parts.bad.setAttribute("aria-pressed", String(turn.rating === BAD));
    if (parts.rating.hidden) parts.remark.hidden = true;
  }

  /** A thumb that is pressed again is taken back. */
  async press(thumb) {
    const rating = this.turn.rating === thumb ? null : thumb;
    if (!(await this.store(rating, rating === null ? "" : (this.turn.comment ?? "")))) return;
    this.parts.remark.hidden = rating === null;
    if (rating === null) return;
    this.parts.comment.value = this.turn.comment ?? "";
    this.parts.comment.focus();
    this.parts.remark.scrollIntoView({ block: "nearest" });
  }

  async comment() {
    if (await this.store(this.turn.rating, this.parts.comment.value.trim())) this.leave();
  }

  leave() {
    this.parts.remark.hidden = true;
    (this.turn.rating === BAD ? this.parts.bad : this.parts.good).focus();
  }

  /** Store it; return whether that was done. While one is being stored, another is not: it would come of what is about to change. */
  async store(rating, comment) {
    if (this.isStoring) return false;
    this.isStoring = true;
    try {
      await this.on.rate(this.turn, rating, comment);
    } catch {
      this.tell(words("Your rating could not be stored. Try again."));
      return false;
    } finally {
      this.isStoring = false;
    }
    Object.assign(this.turn, { rating, comment });
    this.show();
    this.tell(rating === null ? "" : words("Your rating was stored. Thank you."));
    return true;
  }

  tell(text) {
    this.parts.rated.textContent = text;
    this.on.announce(text);
  }
}
