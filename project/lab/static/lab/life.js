// Where a token was when, and where the time to the first token went. Pure: moments in, named spans out, in milliseconds.

/** The stages of a token, in order: key, and between which two moments. */
const STAGES = [
  ["handover", "left", "came"],
  ["log", "came", "logged"],
  ["socket", "logged", "written"],
  ["network", "written", "read"],
  ["parse", "read", "parsed"],
  ["paint", "parsed", "painted"],
];

/**
 * The spans of one token by stage. `server`: left, came, logged, written and `step`, of the lab's report; `browser`:
 * read, parsed, painted. All on the same wall clock: two clocks of one machine may differ by a little, so none is below 0.
 * What is not known is null.
 */
export function stagesOf(server, browser) {
  const at = { ...server, ...browser };
  at.written = Math.min(at.written, at.read); // on a busy machine the browser has it before the server can note that
  const span = (from, to) => (at[from] === null ? null : Math.max(0, at[to] - at[from]));
  const spans = Object.fromEntries(STAGES.map(([key, from, to]) => [key, span(from, to)]));
  return { step: server.step, ...spans, all: span("left", "painted") };
}

/** The middle of some numbers; null for none. */
export function median(numbers) {
  const sorted = numbers.filter((number) => number !== null && number !== undefined).sort((one, other) => one - other);
  if (sorted.length === 0) return null;
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

const SERVER_PHASES = ["auth", "intake", "loading", "queue", "prefill"];

/**
 * What lies between the click and the first token on the glass. `done` is the answer's last event, `glass` the browser's
 * moments in milliseconds: asked, read, parsed, painted of the first token.
 * Returns {server, glass, parts: [{key, ms, isServer}]}: the parts add up to `glass`, those of the server to `server`.
 * Null where the server did not see its first token.
 */
export function firstTokenParts(done, glass) {
  const { phases = {}, breakdown = {} } = done;
  if (breakdown.ttft === undefined) return null;
  const server = 1000 * breakdown.ttft;
  const whole = glass.painted - glass.asked;
  const parse = glass.parsed - glass.read;
  const paint = glass.painted - glass.parsed;
  const ways = Math.max(0, whole - parse - paint - server); // to the server, and back
  const out = phases.network_in === undefined ? null : Math.min(ways, 1000 * phases.network_in);
  const inside = SERVER_PHASES.filter((name) => phases[name] !== undefined).map((name) => [name, 1000 * phases[name]]);
  // An answer that paused has no queue and prefill of its own: then the server's time is one part.
  const isKnown = phases.prefill !== undefined;
  const known = isKnown ? cut(inside, server) : [];
  const parts = [
    ...(out === null ? [] : [{ key: "way_in", ms: out, isServer: false }]),
    ...known.map(([key, ms]) => ({ key, ms, isServer: true })),
    { key: isKnown ? "commit" : "server", ms: server - known.reduce((sum, [, ms]) => sum + ms, 0), isServer: true },
    { key: out === null ? "ways" : "way_out", ms: ways - (out ?? 0), isServer: false },
    { key: "parse", ms: parse, isServer: false },
    { key: "paint", ms: paint, isServer: false },
  ];
  return { server, glass: whole, parts };
}

/** As much of the spans as fits into `ms`, in their order: two processes have measured them. */
function cut(spans, ms) {
  let left = ms;
  return spans.map(([key, span]) => {
    const taken = Math.min(span, left);
    left -= taken;
    return [key, taken];
  });
}
