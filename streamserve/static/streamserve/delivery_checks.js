// What a probe (web/probe.py) shows of the way from the site to this browser. The same judgements as
// streamserve/doctor/checks.py, of what a browser can see. Pure: values in, verdicts out; no clock, no page.

export const HELD_SECONDS = 0.35; // as in checks.py

/** By how much each event came later than the fastest, in seconds. An event: `{sent, at}`, of two clocks. */
export function delays(events) {
  const lags = events.map(({ sent, at }) => at - sent);
  const least = Math.min(...lags);
  return lags.map((lag) => lag - least);
}

function median(values) {
  const sorted = values.toSorted((a, b) => a - b);
  const middle = Math.floor(sorted.length / 2);
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

const ok = (check, said) => ({ check, state: "ok", said, fault: "" });
const found = (check, fault, said) => ({ check, state: "found", said, fault });

export function buffering(events) {
  if (events.length < 3) return { check: "buffering", state: "could not tell", said: "Too few events arrived.", fault: "" };
  const late = delays(events);
  const over = (name) => (events.at(-1)[name] - events[0][name]).toFixed(1);
  if (median(late) < HELD_SECONDS) return ok("buffering", `${events.length} events arrived as they were sent.`);
  return found(
    "buffering",
    "buffered",
    `Events are held back: ${events.length} events sent over ${over("sent")} s arrived within ${over("at")} s, ` +
      `up to ${Math.max(...late).toFixed(1)} s late.`,
  );
}

export function compression(coding) {
  if (!coding || coding === "identity") return ok("compression", "The stream is not compressed.");
  return found("compression", "compressed", `The stream is compressed on the way (${coding}).`);
}

/** `protocol`: by which this browser asked, as Resource Timing has it: "h2", "http/1.1"; "" where it does not say. */
export function http(protocol, inner, isTls) {
  if (inner === "1.0") return found("http", "http10", "The proxy asks the web process by HTTP/1.0.");
  if (isTls && protocol === "http/1.1") {
    return found("http", "no_http2", "This browser is not offered HTTP/2: it opens six connections to this site at most.");
  }
  return ok("http", `This browser asks by ${protocol || "HTTP"}, and the web process is asked by HTTP/${inner}.`);
}

/** `seen`: the request as Django got it; `here`: the page's location. */
export function request(seen, here) {
  if (seen.host.toLowerCase() !== here.host.toLowerCase()) {
    return found("request", "host_changed", `Django takes its host for ${seen.host}, not ${here.host}.`);
  }
  if (`${seen.scheme}:` !== here.protocol) {
    return found("request", "scheme_unknown", `Django takes the request for ${seen.scheme}, not ${here.protocol.slice(0, -1)}.`);
  }
  return ok("request", `Host and scheme arrive. The site counts this browser as ${seen.client}.`);
}

/** `header(name)` returns a response header, or null. */
export function response(header) {
  const [kind, cache] = [header("content-type") ?? "nothing", header("cache-control") ?? "nothing"];
  if (!kind.startsWith("text/event-stream")) {
    return found("response", "content_type_changed", `The Content-Type text/event-stream arrives as ${kind}.`);
  }
  if (!/no-cache|no-store/i.test(cache)) return found("response", "cacheable", `Cache-Control arrives as ${cache}.`);
  if (!header("x-stream-id")) return found("response", "stream_id_lost", "The X-Stream-Id header does not arrive.");
  return ok("response", "Content-Type, Cache-Control and X-Stream-Id arrive.");
}
