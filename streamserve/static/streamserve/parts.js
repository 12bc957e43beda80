// An answer that is continued: what there was each time is an earlier part of it, in `turn.earlier`. Pure.
//
// A part has the fields of the turn that belong to one stream; `wholeOf` (blocks.js) is the answer of all parts.

import { hasContent, spoken, wholeOf } from "./blocks.js";
import { newTurn } from "./turn_tree.js";

/** Whether the answer was cut short, and its end is text, which the model can continue. */
export function canContinue(turn) {
  const isCut = turn.state === "stopped" || (turn.state === "done" && turn.finishReason === "length");
  return isCut && !turn.error?.isFinal && beginningOf(turn).trim() !== "";
}

/** The text that a continuation goes on from; "" if the answer does not end with text. */
export function beginningOf(turn) {
  const { text, blocks } = wholeOf(turn);
  if (blocks.length === 0) return spoken(text).trimStart();
  return blocks.at(-1).kind === "text" ? text.trimStart() : "";
}

/** Whether the run has ended with questions to its user, and nothing has answered them. */
export function isAsking({ state, finishReason, approvals, error }) {
  return state === "done" && finishReason === "interrupt" && approvals.length > 0 && !ANSWERED.includes(error?.code);
}

/** The answers to an interrupted run that the turn waits to send: its stream, and one for each call; null for none. */
export function answersOf(turn) {
  const { answers = null } = turn;
  return answers !== null && answers.streamId === turn.earlier.at(-1)?.streamId ? answers : null;
}

const ANSWERED = ["approval_answered", "approval_expired"];
const OF_A_PART = ["text", "blocks", "citations", "approvals", "state", "finishReason", "figures", "streamId", "lastId"];

/** Make room for a continuation: what there is becomes an earlier part of the answer. */
export function beginPart(turn) {
  const part = Object.fromEntries(OF_A_PART.map((name) => [name, turn[name]]));
  if (hasContent(turn)) turn.earlier = [...turn.earlier, part];
  const { text, blocks, citations, approvals, finishReason, figures, streamId, lastId, error } = newTurn("");
  Object.assign(turn, { text, blocks, citations, approvals, finishReason, figures, streamId, lastId, error, state: "waiting", isSent: false });
}

/** Undo `beginPart`, where the continuation has brought nothing. Return whether there was an earlier part. */
export function endPart(turn) {
  const before = turn.earlier.at(-1);
  if (before === undefined || hasContent(turn)) return false;
  Object.assign(turn, before, { earlier: turn.earlier.slice(0, -1) });
  return true;
}
