// What a delivery was worth to its reader, from what was on the glass at which time. Pure.
//
// The reader reads `pace` words a second, and no word before it came: the model of the benchmarks (benchmarks/qoe/readers.py).
// Reading without a wait takes words ÷ pace. The score is that time as a share of the time until the reader is done.

export const PACE = 4; // words a second: 240 a minute

/**
 * `glass`: [seconds since the question, words on the glass], each time that more were there.
 * Returns null for nothing; times in seconds, the score from 0 to 100.
 */
export function reading(glass, pace = PACE) {
  if (glass.length === 0) return null;
  let words = 0;
  let readAt = -Infinity; // when the last word begins to be read
  for (const [at, count] of glass) {
    for (; words < count; words += 1) readAt = Math.max(at, readAt + 1 / pace);
  }
  const readSeconds = words / pace;
  const doneSeconds = readAt + 1 / pace;
  const firstSeconds = glass[0][0];
  return {
    words,
    firstSeconds,
    lastSeconds: glass[glass.length - 1][0],
    stillSeconds: longestStill(glass),
    readSeconds,
    laterSeconds: Math.max(0, doneSeconds - readSeconds - firstSeconds), // waits after the first word
    doneSeconds,
    score: Math.round((100 * readSeconds) / doneSeconds),
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
