// The ways in which the same answer may reach a reader. Pure: what came goes in, and what is to be shown now comes out.

/** Holds what came until `isDue(now, {isFrame, isOver})`. `now` is in seconds. */
export class Delivery {
  constructor(isDue) {
    this.isDue = isDue;
    this.waiting = [];
  }

  put(piece) {
    this.waiting.push(piece);
  }

  /** Return what is to be shown now. `isFrame`: the browser is about to draw; `isOver`: nothing more comes. */
  take(now, moment) {
    if (this.waiting.length === 0 || !this.isDue(now, moment)) return [];
    return this.waiting.splice(0);
  }
}

/** A response without a stream: nothing before the end. */
export const whole = () => new Delivery((_now, { isOver }) => isOver);

/** Each token is written as it comes. */
export const streamed = () => new Delivery(() => true);

/** What came in time for a frame is written once, when that frame is drawn. */
export const flushed = () => new Delivery((_now, { isFrame }) => isFrame);

const HOLD_SECONDS = [0.3, 1.3];

/** What came is held for a while, each while of another length: the same lengths in every run. */
export function janky(random = seeded(7)) {
  const [least, most] = HOLD_SECONDS;
  let until = null;
  const hold = (now) => {
    until = now + least + random() * (most - least);
  };
  return new Delivery((now, { isOver }) => {
    if (until === null) hold(now);
    if (!isOver && now < until) return false;
    hold(now);
    return true;
  });
}

/** Numbers from 0 to 1, the same for the same seed (mulberry32). */
export function seeded(seed) {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 2 ** 32;
  };
}
