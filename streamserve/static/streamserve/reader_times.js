// What a reader saw of an answer, and when: from sending the question to the last paint, by its own monotonic clock. And
// the one report of it, which the server joins to its own phases (docs/monitoring.md, "From GPU to glass"). Times only, no text.
//
// What comes while the page renders counts as come when that rendering began: the page kept it waiting, not the network.

const MAX_GAPS = 10_000; // of a longer answer, a sample of as many
const [JUST_SECONDS, JUST_SHARE] = [0.002, 0.1]; // what comes so soon after a rendering has waited for it

/** Gaps between moments; of many, a fair sample. */
class Gaps {
  constructor(random) {
    this.random = random;
    /** @type {number[]} */
    this.kept = [];
    this.num = 0;
    /** @type {number | null} */
    this.at = null;
  }

  /** The next moment. The same one again is no gap. */
  add(at) {
    if (this.at === at) return;
    if (this.at !== null) this.keep(at - this.at);
    this.at = at;
  }

  keep(gap) {
    this.num += 1;
    if (this.kept.length < MAX_GAPS) this.kept.push(gap);
    else {
      const place = Math.floor(this.random() * this.num);
      if (place < MAX_GAPS) this.kept[place] = gap;
    }
  }

  /** The gap that `share` of all do not exceed, between its neighbours; null without a gap. */
  quantile(share) {
    if (this.kept.length === 0) return null;
    const sorted = [...this.kept].sort((one, other) => one - other);
    const place = share * (sorted.length - 1);
    const below = Math.floor(place);
    return sorted[below] + ((sorted[below + 1] ?? sorted[below]) - sorted[below]) * (place - below);
  }
}

/** The moments of one answer. Told what happens when it happens; `now` gives seconds that never go back. */
export class ReaderTimes {
  constructor(now = () => performance.now() / 1000, random = Math.random) {
    this.now = now;
    /** @type {number | null} */
    this.sentAt = null;
    /** @type {number | null} */
    this.headersAt = null;
    /** @type {number | null} */
    this.firstByteAt = null;
    /** @type {number | null} */
    this.firstDeltaAt = null;
    /** @type {number | null} */
    this.firstPaintAt = null;
    /** @type {number | null} */
    this.endedAt = null;
    this.cameAt = -Infinity; // the last bytes
    this.paintedAt = -Infinity;
    /** @type {number | null} */
    this.shownAt = null; // the newest delta on the screen
    this.gaps = new Gaps(random);
    this.paintGaps = new Gaps(random);
    this.render = 0;
    this.numRendering = 0;
    this.busy = { from: -Infinity, to: -Infinity }; // the last rendering
    this.numConnections = 0;
    this.isHidden = false;
    this.isStopped = false;
  }

  /** The question was refused: another try counts from its own sending. */
  forget() {
    this.sentAt = null;
  }

  /** The question is sent; sent again without an answer to the first, it counts from there. */
  sent() {
    this.sentAt ??= this.now();
  }

  /** A response has begun. */
  connected() {
    this.numConnections += 1;
    this.headersAt ??= this.came();
  }

  /** Bytes were read. */
  bytes() {
    this.cameAt = this.came();
    this.firstByteAt ??= this.cameAt;
  }

  /** There is text among them. */
  delta() {
    this.firstDeltaAt ??= this.cameAt;
    this.gaps.add(this.cameAt);
  }

  /** The last event is among them. */
  ended() {
    this.endedAt ??= this.cameAt;
  }

  /** The user has stopped the answer: when it ends is no longer waited for. */
  stopped() {
    this.isStopped = true;
  }

  /** The page begins to render, or to work on what has come; `rendered` is the end of it. */
  rendering() {
    if (this.numRendering === 0) this.busy = { from: this.now(), to: Infinity };
    this.numRendering += 1;
  }

  rendered() {
    this.numRendering -= 1;
    if (this.numRendering > 0) return;
    this.busy.to = this.now();
    this.render += this.busy.to - this.busy.from;
  }

  /** What has come is on the screen. */
  painted() {
    if (this.isHidden || this.firstDeltaAt === null) return;
    this.paintedAt = this.now();
    this.firstPaintAt ??= this.paintedAt;
    if (this.gaps.at !== this.shownAt) this.paintGaps.add(this.paintedAt);
    this.shownAt = this.gaps.at;
  }

  /** The tab is in the background, where nothing is painted. */
  hidden() {
    this.isHidden = true;
  }

  /** When what is read now came: while the page rendered, at the beginning of that. */
  came() {
    const now = this.now();
    const { from, to } = this.busy;
    const hasWaited = now - to <= JUST_SECONDS + JUST_SHARE * (to - from);
    return hasWaited ? Math.max(from, this.cameAt, this.sentAt ?? -Infinity) : now;
  }

  /** Seconds from sending the question until the first text was painted; null where it was not. */
  get firstPaint() {
    return this.since(this.firstPaintAt);
  }

  /** The body of the report; null for an answer that was not asked for here, or has not begun. */
  report() {
    if (this.sentAt === null || this.headersAt === null) return null;
    const endedAt = this.isStopped ? null : this.endedAt;
    const isWhole = endedAt !== null && !this.isHidden && this.paintedAt >= endedAt;
    return {
      headers: this.since(this.headersAt),
      first_byte: this.since(this.firstByteAt),
      first_delta: this.since(this.firstDeltaAt),
      first_paint: this.firstPaint,
      ended: this.since(endedAt),
      last_paint: isWhole ? this.since(this.paintedAt) : null,
      gap_p95: rounded(this.gaps.quantile(0.95)),
      paint_gap_p95: this.isHidden ? null : rounded(this.paintGaps.quantile(0.95)),
      render: rounded(this.render),
      reconnects: Math.max(0, this.numConnections - 1),
      hidden: this.isHidden,
    };
  }

  since(at) {
    return at === null || this.sentAt === null ? null : rounded(at - this.sentAt);
  }
}

function rounded(seconds) {
  return seconds === null ? null : Math.round(seconds * 10_000) / 10_000;
}

/**
 * Report what a reader saw of an answer; nothing waits for it, and nothing is wrong if it is lost. As a beacon, which
 * outlives the page, where no header is needed: Django's CSRF token is not.
 */
export function reportTimings(streamId, times, { streamsUrl = "/streams", headers = {} } = {}) {
  const url = `${streamsUrl}/${encodeURIComponent(streamId)}/timings`;
  const body = JSON.stringify(times);
  const needsHeaders = Object.keys(headers).some((name) => name.toLowerCase() !== "x-csrftoken");
  if (!needsHeaders && isOfThisPage(url)) {
    if (navigator.sendBeacon?.(url, new Blob([body], { type: "application/json" }))) return;
  }
  const request = { method: "POST", headers: { "Content-Type": "application/json", ...headers }, body, keepalive: true };
  fetch(url, request).then((response) => response.text()).catch(() => {});
}

function isOfThisPage(url) {
  return typeof document !== "undefined" && new URL(url, location.href).origin === location.origin;
}

// --- frames ----------------------------------------------------------------------------------------------------------

/** From an animation frame's callback: call when that frame's layout and paint are done. */
export function afterFrame(call) {
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = () => {
    port1.close();
    call();
  };
  port2.postMessage(null); // a task of its own, so after the frame
}

/** Call `call(true)` when the next frame is painted; `call(false)` where none will be: in the background, and on Node. */
export function afterPaint(call) {
  if (typeof requestAnimationFrame === "undefined" || document.hidden) return call(false);
  let isOver = false;
  const end = (isPainted) => {
    if (isOver) return;
    isOver = true;
    document.removeEventListener("visibilitychange", hide);
    call(isPainted);
  };
  const hide = () => document.hidden && end(false);
  document.addEventListener("visibilitychange", hide);
  requestAnimationFrame(() => afterFrame(() => end(true)));
  return undefined;
}
