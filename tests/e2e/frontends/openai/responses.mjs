// The official Node client at our site: node responses.mjs URL KEY MODEL; prints what it has read, as JSON.
import OpenAI from "openai";

const [url, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const asked = { model, input: "How is the weather?", max_output_tokens: 12, seed: 7 };

const whole = await client.responses.create(asked);
const types = [];
const stream = client.responses.stream(asked);
for await (const event of stream) types.push(event.type);
const last = await stream.finalResponse();
const retrieved = await client.responses.retrieve(last.id);

// The connection is lost after the third event, and read on by its number.
const begun = await client.responses.create({ ...asked, stream: true });
let id = "";
let seen = 0;
let text = "";
for await (const event of begun) {
  seen = event.sequence_number;
  if (event.type === "response.created") id = event.response.id;
  if (event.type === "response.output_text.delta") {
    text += event.delta;
    break;
  }
}
for await (const event of await client.responses.retrieve(id, { stream: true, starting_after: seen }))
  if (event.type === "response.output_text.delta") text += event.delta;

const then = await client.responses.create({ ...asked, previous_response_id: whole.id, input: "And then?" });
let items = 0;
for await (const item of client.responses.inputItems.list(whole.id)) items += item.type === "message";
let background = await client.responses.create({ ...asked, background: true });
while (["queued", "in_progress"].includes(background.status)) {
  await new Promise((resolve) => setTimeout(resolve, 20));
  background = await client.responses.retrieve(background.id);
}
await client.responses.delete(whole.id);
const gone = await client.responses.retrieve(whole.id).catch((error) => error.status);

console.log(
  JSON.stringify({
    types: [...new Set(types)],
    isWhole: last.output_text === retrieved.output_text && last.output[0].id === retrieved.output[0].id,
    isRest: text === (await client.responses.retrieve(id)).output_text,
    previous: then.previous_response_id === whole.id,
    items,
    background: background.status,
    gone,
  }),
);
