// A consumer of the client's types: compiled by `npm run types`, never run.
import { Answer, AnswerFailed, RequestFailed, ask, partialJson, resume, type StreamEvent } from "../../../streamserve/static/streamserve/client.js";

const answer: Answer = ask("/streams", { prompt: "hi" });
const other = ask({ url: "/pipelines/billing", body: { prompt: "hi" }, headers: { Authorization: "Bearer k" }, onStarted: (id: string) => id });
for await (const event of answer) {
  const { type, seq }: StreamEvent = event;
  const text: string = answer.text + type + seq.toFixed();
  if (text.length > 100) await answer.stop();
}
try {
  for await (const { data } of resume(other.streamId, { lastId: other.lastId })) console.log(data.text, other.done?.finish_reason);
} catch (error) {
  if (error instanceof RequestFailed) console.log(error.status, error.retryAfterSeconds);
  if (error instanceof AnswerFailed) console.log(error.code, error.isRetryable);
}
const weather: { city?: string } | undefined = partialJson('{"city": "Os');
console.log(weather?.city, answer.partial);

// @ts-expect-error  a question needs a body
ask("/streams");
// @ts-expect-error  no such option
ask({ body: {}, colour: "red" });
// @ts-expect-error  what it has read is not a number
answer.text = 3;
