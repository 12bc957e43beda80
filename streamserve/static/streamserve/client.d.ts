/** The client of streamserve for pages without a framework; docs/client.md has the examples. */

/** An event of a stream: `type` and `data` as docs/events.md has them. `seq` is 0, and `id` "", where it is not in the log. */
export interface StreamEvent {
  type: string;
  seq: number;
  id: string;
  data: any;
}

/** A part of an answer: text, thoughts, a call of a tool, a result. */
export interface Block {
  index: number;
  kind: string;
  text: string;
  isOpen: boolean;
  id?: string;
  name?: string;
  seconds?: number;
}

export interface Citation {
  source: string;
  id?: string;
  title?: string;
  url?: string;
}

/** What a run asks its user before it calls a tool. */
export interface Approval {
  id: string;
  name: string;
  /** The call's arguments, as JSON. */
  arguments: string;
  message: string | null;
}

/** The data of `done`. */
export interface Done {
  finish_reason: string;
  totalTokens: number;
  usage?: { prompt_tokens: number; completion_tokens: number };
  [name: string]: any;
}

export interface AnswerOptions {
  /** The address that starts answers; "/streams" by default, "/pipelines/NAME", or "/conversations/ID/messages". */
  url?: string;
  /** Where the streams are that it starts; by default "/streams" beside these. */
  streamsUrl?: string;
  /** What is asked: the fields of POST /streams. */
  body?: Record<string, any>;
  /** Of the question: sent again with the same key, it is answered once. A new one by default. */
  key?: string;
  /** Further headers of requests; by default the CSRF token of Django's cookie. */
  headers?: Record<string, string> | (() => Record<string, string>);
  /** KEEPALIVE_SECONDS of the site: a connection that is silent for two and a half times as long is dead. */
  keepaliveSeconds?: number;
  /** Report once what this reader saw of the answer, times only (docs/monitoring.md); true by default. */
  reportsTimings?: boolean;
  /** The id of the answer is known: keep it for `resume`, so that a reload comes back. */
  onStarted?: (streamId: string) => void;
  /** The connection is lost, until the next try in so many seconds, or there. */
  onConnection?: (state: { isLost: boolean; seconds: number }) => void;
}

export interface ResumeOptions extends Omit<AnswerOptions, "body" | "key"> {
  /** The last event that is there; "" is from the beginning. */
  lastId?: string;
}

export function ask(url: string, body: Record<string, any>): Answer;
export function ask(options: AnswerOptions): Answer;
export function resume(streamId: string, options?: ResumeOptions): Answer;

export class Answer implements AsyncIterable<StreamEvent> {
  constructor(options: AnswerOptions & ResumeOptions & { streamId?: string });
  text: string;
  blocks: Block[];
  citations: Citation[];
  approvals: Approval[];
  /** The newest `status` event's data. */
  status: { status: string; step?: number; of?: number; message?: string } | null;
  done: Done | null;
  isStopped: boolean;
  readonly streamId: string;
  readonly lastId: string;
  readonly partial: any;
  /** Whether the server has taken the stop. */
  stop(): Promise<boolean>;
  /** Answer the approvals, by the ids of their calls: the rest of the run. */
  approve(allowed: Record<string, boolean>): Answer;
  close(): void;
  [Symbol.asyncIterator](): AsyncGenerator<StreamEvent, void, undefined>;
}

/** The request was refused, or what it asks for is no longer kept. */
export class RequestFailed extends Error {
  constructor(message: string, details?: { status?: number; code?: string; retryAfterSeconds?: number | null });
  static from(response: Response): Promise<RequestFailed>;
  status: number;
  code: string;
  retryAfterSeconds: number | null;
}

export class AnswerFailed extends Error {
  constructor(data: { code?: string; message?: string; retryable?: boolean });
  code: string;
  isRetryable: boolean;
}

/** The value of JSON that is still being written; undefined before there is one. It only grows with the text. */
export function partialJson(text: string, options?: { isWhole?: boolean }): any;

/** Add an event to what an answer has so far; return whether it was one that adds. */
export function addEvent(
  turn: { text: string; blocks: any[]; citations: any[]; approvals: any[] }, type: string, data: any, now?: number,
): boolean;

/** The events of any text/event-stream. */
export function readEvents(
  body: ReadableStream<Uint8Array> | null, onBytes?: () => void,
): AsyncGenerator<{ type: string; data: string; id: string }, void, undefined>;

/** The number in an event's id; 0 when there is none. */
export function seqOf(id: string): number;

/** The body of a report: seconds from sending the question, by this reader's clock; null where it did not come to that. */
export interface Timings {
  headers: number | null;
  first_byte: number | null;
  first_delta: number | null;
  first_paint: number | null;
  ended: number | null;
  last_paint: number | null;
  gap_p95: number | null;
  paint_gap_p95: number | null;
  render: number | null;
  reconnects: number;
  hidden: boolean;
}

/** Measures an answer that another client reads: tell it what happens when it happens, and report the result. */
export class ReaderTimes {
  constructor(now?: () => number, random?: () => number);
  sent(): void;
  connected(): void;
  bytes(): void;
  delta(): void;
  ended(): void;
  stopped(): void;
  rendering(): void;
  rendered(): void;
  painted(): void;
  hidden(): void;
  forget(): void;
  /** Seconds until the first text was painted; null where it was not. */
  readonly firstPaint: number | null;
  report(): Timings | null;
}

/** Report what a reader saw of an answer, once. Nothing waits for it. */
export function reportTimings(
  streamId: string, times: Partial<Timings>, options?: { streamsUrl?: string; headers?: Record<string, string> },
): void;

/** The connection alone, for pages that keep the answer themselves and acknowledge what they paint: the chat page. */
export class AnswerStream {
  constructor(options: {
    streamsUrl: string;
    headers: () => Record<string, string>;
    keepaliveSeconds?: number;
    on: {
      started: (streamId: string, headers: Headers) => void;
      connected: () => void;
      lost: (seconds: number) => void;
    };
  });
  streamId: string | null;
  lastId: string;
  seq: number;
  isClosed: boolean;
  isFinished: boolean;
  /** When the last byte came, by performance.now(). */
  heardAt: number;
  backoff: Backoff;
  abort: AbortController;
  times: ReaderTimes;
  acks: { shown(seq: number): void; lookAway(isAway: boolean): void };
  start(request: any, key: string, url?: string): AsyncGenerator<StreamEvent, void, undefined>;
  resume(streamId: string, lastId: string): AsyncGenerator<StreamEvent, void, undefined>;
  nudge(): void;
  stop(seenSeq: number): Promise<boolean>;
  /** Report what `times` has, once, of an answer that was started here. */
  report(): void;
  close(): void;
}

/** Waits before retries, longer each time, at random. */
export class Backoff {
  constructor(bounds?: { first: number; most: number }, random?: () => number);
  attempt: number;
  reset(): void;
  nextSeconds(): number;
}

/** A wait that `wake()` ends early. */
export class Sleep {
  wait(seconds: number): Promise<void>;
  wake(): void;
}

/** A timer that `feed()` pushes back. */
export class Watchdog {
  constructor(seconds: number, onSilence: () => void);
  fedAt: number;
  feed(): void;
  end(): void;
}
