// A conversation's messages, as the server has them, become turns: a question with its answer, and what goes on with it. Pure.
//
// A turn's id is its answer's, of a continued answer the last continuation's; `parent` is the id of the answer that the
// question follows, "" at the beginning.

import { messageFor } from "./answering.js";
import { newTurn } from "./turn_tree.js";
import { words } from "./words.js";

/** Return the turns of messages that are sorted by time, in the order of their answers. */
export function turnsOf(messages) {
  const byId = new Map(messages.map((message) => [message.id, message]));
  const answers = messages.filter(({ role }) => role === "assistant");
  const asked = new Set(messages.filter(({ role }) => role === "user").map(({ parent }) => parent));
  const continued = new Set(answers.map(({ parent }) => parent));
  return answers.filter(({ id }) => !continued.has(id) || asked.has(id)).map((answer) => turnOf(answer, byId));
}

function turnOf(answer, byId) {
  const earlier = [];
  let question = byId.get(answer.parent);
  for (; question?.role === "assistant"; question = byId.get(question.parent)) earlier.unshift(question);
  return {
    ...newTurn(textOf(question?.blocks ?? [])),
    ...partOf(answer),
    id: answer.id,
    model: answer.model ?? "",
    earlier: earlier.map(partOf),
    parent: question?.parent ?? "",
    questionId: question?.id ?? "",
    attachments: question?.attachments ?? [],
    steps: answer.steps.map((step) => step.message ?? "").filter(Boolean),
    isSent: true,
    error: answer.state === "failed" ? errorOf(answer) : null,
    rating: answer.rating,
    comment: answer.comment,
  };
}

/** What a turn has of one of its answer's messages (parts.js). */
function partOf(answer) {
  const { blocks } = answer;
  return {
    answerId: answer.id,
    text: textOf(blocks),
    blocks: isPlain(blocks) ? [] : blocks.map((block) => ({ ...block, isOpen: false })),
    citations: answer.citations.map(({ source, id, title, url }) => ({ source, id, title, url })),
    approvals: (answer.approvals ?? []).map(({ id, name, arguments: given, message = "" }) => ({ id, name, arguments: given, message })),
    state: stateOf(answer),
    streamId: answer.stream,
    lastId: "",
    finishReason: answer.finish_reason,
    figures: figuresOf(answer),
  };
}

function textOf(blocks) {
  return blocks.reduce((text, block) => (block.kind === "text" ? text + block.text : text), "");
}

/** Whether an answer is one text, as most are. */
function isPlain(blocks) {
  return blocks.length === 0 || (blocks.length === 1 && blocks[0].kind === "text");
}

function stateOf({ state, finish_reason: finishReason }) {
  if (state === "running") return "streaming";
  if (state === "failed") return "failed";
  return finishReason === "cancelled" ? "stopped" : "done";
}

function errorOf({ error, blocks }) {
  const code = error ?? "";
  return { code, message: messageFor(code, { text: textOf(blocks) }, false) ?? words("The answer could not be finished.") };
}

/** The metrics that a message keeps: the counts. Times are those of the stream's end. */
function figuresOf({ state, usage }) {
  if (state === "running" || usage.completion_tokens === 0) return null;
  const { completion_tokens: tokens, cached_tokens: cachedTokens, prompt_tokens: promptTokens } = usage;
  const unknown = { tokensPerSecond: null, ttftServer: null, ttftSeen: null, total: null, phases: {} };
  return { tokens, cachedTokens, promptTokens, ...unknown };
}
