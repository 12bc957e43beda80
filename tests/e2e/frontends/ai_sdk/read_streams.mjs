// Reads streams with the package's own parser, schema and reader; prints the message that each makes, as JSON.
//
//   node read_streams.mjs FILE     a JSON array of {body, message?}: the bytes of a response, and what it continues
import { readFile } from "node:fs/promises";
import { parseJsonEventStream } from "@ai-sdk/provider-utils";
import { readUIMessageStream, uiMessageChunkSchema } from "ai";

async function read({ body, message }) {
  const chunks = [];
  const parsed = parseJsonEventStream({ stream: new Blob([body]).stream(), schema: uiMessageChunkSchema });
  for await (const one of parsed) {
    if (!one.success) throw new Error(`${one.error.message}: ${JSON.stringify(one.rawValue)}`);
    chunks.push(one.value);
  }
  const errors = [];
  const stream = new ReadableStream({
    start(controller) {
      for (const chunk of chunks) controller.enqueue(chunk);
      controller.close();
    },
  });
  let last = message;
  const messages = readUIMessageStream({ stream, message, onError: (error) => errors.push(error.message) });
  for await (const one of messages) last = one;
  return { message: last, errors, numChunks: chunks.length };
}

const found = [];
for (const one of JSON.parse(await readFile(process.argv[2], "utf8"))) found.push(await read(one));
const escaped = (text) => text.replace(/[^\x20-\x7e]/g, (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`);
console.log(escaped(JSON.stringify(found))); // one line of any reader's
