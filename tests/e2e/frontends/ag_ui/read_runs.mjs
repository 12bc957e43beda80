// Reads runs with `HttpAgent`, and so with the package's schemas and verifier; prints what each makes, as JSON.
//
//   node read_runs.mjs FILE     a JSON array of the bytes of responses
import { readFile } from "node:fs/promises";
import { HttpAgent } from "@ag-ui/client";

async function read(body) {
  const warnings = [];
  console.warn = (text) => warnings.push(String(text));
  const agent = new HttpAgent({ url: "http://127.0.0.1/", fetch: async () => new Response(body) });
  const seen = { types: [], customs: [], steps: [], end: null };
  await agent.runAgent(
    { runId: "run-1" },
    {
      onEvent: ({ event }) => void seen.types.push(event.type),
      onCustomEvent: ({ event }) => void seen.customs.push([event.name, event.value]),
      onStepStartedEvent: ({ event }) => void seen.steps.push(event.stepName),
      onRunFinishedEvent: ({ event }) => void (seen.end = event),
      onRunErrorEvent: ({ event }) => void (seen.end = event),
    },
  );
  return { ...seen, messages: agent.messages, state: agent.state, interrupts: agent.pendingInterrupts, warnings };
}

const found = [];
for (const body of JSON.parse(await readFile(process.argv[2], "utf8"))) found.push(await read(body));
const escaped = (text) => text.replace(/[^\x20-\x7e]/g, (unit) => `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`);
console.log(escaped(JSON.stringify(found))); // one line of any reader's
