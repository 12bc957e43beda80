// What a delivery was worth to its reader, from what was on the glass at which time. Pure.
//
// The reader reads `pace` words a second, and no word before it came: the model of the benchmarks (benchmarks/qoe/readers.py).
// The score: of the time from the question until the last word came, the share in which the reader had something to read.

export const PACE = 4; // words a second: 240 a minute

/**
 * `glass`: [seconds since the question, words on the glass], each time that more were there.
 * Returns null for nothing; times in seconds, the score from 0 to 100.
 */
export function reading(glass, pace = PACE) {
  if (glass.length === 0) return null;
  const firstSeconds = glass[0][0];
  const lastSeconds = glass[glass.length - 1][0];
  let words = 0;
  let doneSeconds = firstSeconds; // when the reader has read all words so far
  let laterSeconds = 0; // waits after the first word
  for (const [at, count] of glass) {
    laterSeconds += Math.max(0, at - doneSeconds);
    doneSeconds = Math.max(at, doneSeconds) + (count - words) / pace;
    words = count;
  }
  const busySeconds = lastSeconds - firstSeconds - laterSeconds;
  return {
    words,
    firstSeconds,
    lastSeconds,
    stillSeconds: longestStill(glass),
    laterSeconds,
    busySeconds, // with something to read, until the last word came
    doneSeconds,
    score: lastSeconds > 0 ? Math.round((100 * busySeconds) / lastSeconds) : 100,
  };
}

/** The longest time in which the glass did not change, between the first word and the last. */
function longestStill(glass) {
  return glass.slice(1).reduce((most, [at], index) => Math.max(most, at - glass[index][0]), 0);
}

/** How many words were on the glass at `seconds`. */
export function wordsAt(glass, seconds) {
  return glass.reduce((words, [at, count]) => (at <= seconds ? count : words), 0);
}
