// Parses text/event-stream from a fetch body by the WHATWG HTML standard (9.2.5, 9.2.6). Knows nothing of streamserve's
// events: bytes in, {type, data, id} out.

// Far above any frame of streamserve: bounds the memory that an endless line can take.
const MAX_LINE_CHARS = 8 * 1024 * 1024;

export class EventParser {
  /** `onEvent({type, data, id})` is called for every dispatched event, in order. */
  constructor(onEvent) {
    this.onEvent = onEvent;
    this.lastEventId = "";
    this.retryMs = null;
    this.hasStarted = false;
    this.skipLf = false; // the last read ended in CR: an LF that opens the next one belongs to it
    this.line = "";
    this.data = [];
    this.type = "";
  }

  feed(chunk) {
    if (chunk === "") return;
    let start = 0;
    if (!this.hasStarted) {
      this.hasStarted = true;
      if (chunk.charCodeAt(0) === 0xfeff) start = 1;
    }
    if (this.skipLf && start < chunk.length) {
      this.skipLf = false;
      if (chunk[start] === "\n") start += 1;
    }
    const lineEnd = /[\r\n]/g;
    for (;;) {
      lineEnd.lastIndex = start;
      const match = lineEnd.exec(chunk);
      if (match === null) break;
      const line = this.line + chunk.slice(start, match.index);
      this.line = "";
      start = match.index + 1;
      if (match[0] === "\r") {
        if (start === chunk.length) this.skipLf = true;
        else if (chunk[start] === "\n") start += 1;
      }
      this.takeLine(line);
    }
    this.line += chunk.slice(start);
    if (this.line.length > MAX_LINE_CHARS) throw new RangeError("event stream line too long");
  }

  takeLine(line) {
    if (line === "") return this.dispatch();
    const colon = line.indexOf(":");
    if (colon === 0) return undefined; // a comment
    const field = colon === -1 ? line : line.slice(0, colon);
    let value = colon === -1 ? "" : line.slice(colon + 1);
    if (value.startsWith(" ")) value = value.slice(1);
    if (field === "data") this.data.push(value);
    else if (field === "event") this.type = value;
    else if (field === "id" && !value.includes("\0")) this.lastEventId = value;
    else if (field === "retry" && /^[0-9]+$/.test(value)) this.retryMs = Number(value);
    return undefined;
  }

  dispatch() {
    const { data, type } = this;
    this.data = [];
    this.type = "";
    if (data.length > 0) this.onEvent({ type: type || "message", data: data.join("\n"), id: this.lastEventId });
  }
}

/** Yield the events of `body`; `onBytes` is called for every read. An incomplete last event is dropped. */
export async function* readEvents(body, onBytes = () => {}) {
  const reader = body.getReader();
  const decoder = new TextDecoder("utf-8", { ignoreBOM: true }); // the parser strips a leading BOM itself
  let ready = [];
  const parser = new EventParser((event) => ready.push(event));
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      onBytes();
      parser.feed(decoder.decode(value, { stream: true }));
      const events = ready;
      ready = [];
      yield* events;
    }
  } finally {
    reader.cancel().catch(() => {}); // the body may be aborted already
  }
}
