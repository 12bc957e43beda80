// What this page shows of an answer, acknowledged to the server: the engine serves first who runs out of text first, and
// last who does not look. About one small request a second, one at a time; none once the server does not count them.
// Knows no DOM and no connection: `send({reader, seq, away})` resolves to whether it counted, to null where another web
// process must count it, and rejects if nothing came.

const EVERY_SECONDS = 1;
const SOON_SECONDS = 0.25; // after the one before, for a tab that is hidden or shown again
const EVERY_EVENTS = 64; // of a fast answer, so that the engine does not wait for the page

export class Acks {
  constructor(send, now = () => performance.now() / 1000) {
    this.send = send;
    this.now = now;
    this.isAway = false;
    this.timer = 0;
    /** @type {string | null} */
    this.reader = null;
    this.seq = -1; // shown
    this.acked = { seq: -1, isAway: false, at: -Infinity };
    this.isSending = false;
  }

  /** A connection has begun; `reader` is its id, null where the server gives none. */
  begin(reader) {
    this.end();
    this.reader = reader;
  }

  /** The connection is over, or its acknowledgements do not count. */
  end() {
    clearTimeout(this.timer);
    this.reader = null;
    this.seq = -1;
    this.acked = { seq: -1, isAway: false, at: -Infinity };
    this.isSending = false;
  }

  /** Everything up to event `seq` is shown. */
  shown(seq) {
    this.seq = Math.max(this.seq, seq);
    this.sendWhenDue();
  }

  /** The tab is hidden, or shown again. */
  lookAway(isAway) {
    this.isAway = isAway;
    this.sendWhenDue();
  }

  sendWhenDue() {
    if (this.reader === null || this.seq < 0 || this.isSending) return;
    const hasTurned = this.isAway !== this.acked.isAway;
    if (!hasTurned && this.seq <= this.acked.seq) return;
    const isSoon = hasTurned || this.seq - this.acked.seq >= EVERY_EVENTS;
    const left = this.acked.at + (isSoon ? SOON_SECONDS : EVERY_SECONDS) - this.now();
    clearTimeout(this.timer);
    if (left > 0) this.timer = setTimeout(() => this.sendWhenDue(), left * 1000);
    else void this.sendNow();
  }

  async sendNow() {
    const { reader, seq, isAway } = this;
    this.isSending = true;
    this.acked = { seq, isAway, at: this.now() };
    /** @type {boolean | null} */
    let isCounted = true; // the next acknowledgement makes up for a lost one
    try {
      isCounted = await this.send({ reader, seq, away: isAway });
    } catch {
      this.acked.seq = -1;
    }
    if (this.reader !== reader) return; // another connection meanwhile
    this.isSending = false;
    this.acked.at = this.now(); // the server took it by now: the pause begins here, however long it was under way
    if (isCounted === null) this.acked.seq = -1; // sent again, over another connection
    if (isCounted !== false) this.sendWhenDue();
    else this.end();
  }
}
