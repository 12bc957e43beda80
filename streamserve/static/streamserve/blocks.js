// A turn's answer as blocks: text, thoughts and tool calls, in the order they were written. No DOM, no network.
//
// Invariant: `turn.text` is the text of the text blocks. `turn.blocks` is [] while there is only the implied block.
// A block is {index, kind, text, isOpen}, a call has `id` and `name`, a result its call's `id`, a thought `startedAt` and `seconds` (browser's time).

/** Add an event of the answer to the turn. Return whether it was one: a token, the border of a block, a snapshot, a citation, an approval. */
export function addEvent(turn, type, data, now = Date.now()) {
  if (type === "snapshot") replaceAll(turn, data);
  else if (type === "citation") cite(turn, data);
  else if (type === "approval") ask(turn, data);
  else if (type === "token") grow(turn, data);
  else if (type === "block_start") begin(turn, data, now);
  else if (type === "block_stop") end(turn, data, now);
  else return false;
  return true;
}

function grow(turn, { choice = 0, index = 0, text }) {
  if (choice !== 0) return;
  const block = turn.blocks.find((one) => one.index === index);
  if (block !== undefined) block.text += text;
  else if (turn.blocks.length > 0) turn.blocks.push({ index, kind: "text", text, isOpen: true });
  if (block === undefined || block.kind === "text") turn.text += text;
}

function begin(turn, { choice, index, kind, id, name }, now) {
  if (choice !== 0) return;
  if (turn.blocks.length === 0 && turn.text !== "") turn.blocks.push({ index: 0, kind: "text", text: turn.text, isOpen: false });
  const block = { index, kind, text: "", isOpen: true };
  if (kind === "thinking") block.startedAt = now;
  if (isCall(kind)) Object.assign(block, { id, name });
  if (kind === "tool_result") block.id = id; // its call's
  turn.blocks.push(block);
}

function end(turn, { choice, index }, now) {
  const block = choice === 0 ? turn.blocks.find((one) => one.index === index) : undefined;
  if (block === undefined) return;
  block.isOpen = false;
  if (block.startedAt !== undefined) block.seconds = Math.round((now - block.startedAt) / 1000);
}

/** A replay brings a question again. */
function ask(turn, { id, name, arguments: given, message = "" }) {
  if (!turn.approvals.some((other) => other.id === id)) turn.approvals.push({ id, name, arguments: given, message });
}

function replaceAll(turn, { text, blocks, choices, citations, approvals }) {
  turn.text = text;
  turn.blocks = (blocks ?? choices?.[0].blocks ?? []).map(({ is_open: isOpen = false, ...block }) => ({ ...block, isOpen }));
  if (citations !== undefined) turn.citations = [];
  for (const citation of citations ?? []) cite(turn, citation);
  for (const approval of approvals ?? []) ask(turn, approval);
}

/** A source that is cited twice is listed once. */
function cite(turn, { choice = 0, source, id, title, url }) {
  if (choice !== 0 || turn.citations.some((other) => other.source === source && other.id === id)) return;
  turn.citations.push({ source, id, title, url });
}

/** A thought or call that was cut off stays as long as it is. */
export function endAll(turn, now = Date.now()) {
  for (const block of turn.blocks) if (block.isOpen) end(turn, { choice: 0, index: block.index }, now);
}

/** How much there is, for `cutTo`. */
export function extentOf(turn) {
  return { chars: turn.text.length, blocks: turn.blocks.map(({ text }) => text.length) };
}

/** Take back what came after `extent`. */
export function cutTo(turn, { chars, blocks }) {
  turn.text = turn.text.slice(0, chars);
  turn.blocks = turn.blocks.slice(0, blocks.length);
  for (const [at, block] of turn.blocks.entries()) block.text = block.text.slice(0, blocks[at]);
}

/** The answer with its earlier parts, which it continues: `text`, `blocks` and `citations`. */
export function wholeOf(turn) {
  if (turn.earlier.length === 0) return turn;
  const parts = [...turn.earlier, turn];
  /** @type {{text: string, blocks: any[], citations: any[]}} */
  const whole = { text: parts.map(({ text }) => text).join(""), blocks: [], citations: [] };
  for (const { citations } of parts) for (const citation of citations) cite(whole, citation);
  if (parts.every(({ blocks }) => blocks.length === 0)) return whole;
  for (const part of parts) {
    const implied = part.text === "" ? [] : [{ index: 0, kind: "text", text: part.text, isOpen: false }];
    const [first, ...rest] = part.blocks.length > 0 ? part.blocks : implied;
    const last = whole.blocks.at(-1);
    if (first === undefined) continue;
    if (last?.kind === "text" && first.kind === "text") whole.blocks.splice(-1, 1, { ...first, text: last.text + first.text });
    else whole.blocks.push(first);
    whole.blocks.push(...rest);
  }
  return whole;
}

/** Whether a block is a call of a tool: the client's, or a call that the server answers itself. */
export function isCall(kind) {
  return kind === "tool_use" || kind === "server_tool_use";
}

/** Whether anything of the answer can be seen. */
export function hasContent({ text, blocks }) {
  return text.trim() !== "" || blocks.some((block) => isCall(block.kind) || block.text.trim() !== "");
}

/** Thinking of an earlier answer is not part of the conversation. */
export function withoutThinking(text) {
  return spoken(text).trim();
}

/** A text without the thoughts that the model wrote into it. */
export function spoken(text) {
  return text
    .replace(/^[^]*?<\/think>/, (head) => (head.includes("<think>") ? head : ""))
    .replace(/<think>[^]*?(<\/think>|$)/g, "");
}
