// Runs an agent of a site with `HttpAgent`; prints what its page has after each run, as JSON.
//
//   node agent.mjs PLAN     {url, runs: [{say?, runId?, approve?, result?, stop?}], tools?, state?, durable?: a module}
//
// A run adds the user's words, or answers the interrupts (`approve`) or the pending calls (`result`) of the run before.
// `stop`: the thread is stopped after the first text.
import { randomUUID } from "node:crypto";
import { HttpAgent } from "@ag-ui/client";

const plan = JSON.parse(process.argv[2]);
const headers = { Authorization: `Bearer ${process.env.KEY}` };
const { durableFetch } = plan.durable ? await import(plan.durable) : {};
const agent = new HttpAgent({ url: plan.url, headers, fetch: durableFetch, initialState: plan.state });
const out = [];
console.error = () => {}; // the client writes what it throws

for (const run of plan.runs) {
  const seen = { types: [], customs: [], steps: [], end: null, error: null, streamId: "" };
  const stop = () => fetch(`${plan.url}/${agent.threadId}/stop`, { method: "POST", headers });
  if (run.say) agent.addMessage({ id: randomUUID(), role: "user", content: run.say });
  if (run.result) {
    const calls = agent.messages.at(-1).toolCalls;
    for (const { id } of calls) agent.addMessage({ id: randomUUID(), role: "tool", toolCallId: id, content: run.result });
  }
  const answer = { status: "resolved", payload: { approved: run.approve } };
  const resume = run.approve === undefined ? undefined : agent.pendingInterrupts.map(({ id }) => ({ interruptId: id, ...answer }));
  try {
    await agent.runAgent(
      { runId: run.runId, tools: plan.tools ?? [], resume, forwardedProps: { max_tokens: 200, ...run.props } },
      {
        onEvent: ({ event }) => void seen.types.push(event.type),
        onRunStartedEvent: ({ event }) => void (seen.streamId = event.metadata.streamId),
        onTextMessageContentEvent: () => void (run.stop && (run.stop = void stop())),
        onCustomEvent: ({ event }) => void seen.customs.push([event.name, event.value]),
        onStepStartedEvent: ({ event }) => void seen.steps.push(event.stepName),
        onRunFinishedEvent: ({ event }) => void (seen.end = event),
        onRunErrorEvent: ({ event }) => void (seen.end = event),
      },
    );
  } catch (error) {
    seen.error = { status: error.status, payload: error.payload, message: error.message };
  }
  out.push({ ...seen, messages: structuredClone(agent.messages), state: structuredClone(agent.state) });
}
console.log(JSON.stringify({ threadId: agent.threadId, runs: out }));
