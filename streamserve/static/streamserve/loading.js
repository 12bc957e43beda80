// Texts about a model that cannot answer now, for the chat page and the live page. Pure.

import { words } from "./words.js";

/**
 * "weights 42 % · 227 of 540 MB · 3 s": the parts that are known.
 * @param {{stage?: string, fraction?: number | null, loadedBytes?: number, totalBytes?: number, elapsedSeconds?: number}} model
 */
export function loadingFigures({ stage, fraction, loadedBytes = 0, totalBytes = 0, elapsedSeconds = 0 }) {
  const percent = fraction == null ? "" : `${Math.floor(fraction * 100)} %`;
  const parts = [`${(stage ?? "").replaceAll("_", " ")} ${percent}`.trim()];
  if (totalBytes > 0) parts.push(megabytes(loadedBytes, totalBytes));
  if (elapsedSeconds >= 1) parts.push(`${Math.floor(elapsedSeconds)} s`);
  return parts.filter(Boolean).join(" · ");
}

/**
 * The text above the conversation on the chat page.
 * @param {{state?: string, message?: string, [figure: string]: any}} model
 */
export function loadingWords({ state, message = "", ...figures }) {
  if (state === "failed") return `${words("The model cannot answer.")} ${message}`.trim();
  if (state === "paused") return words("The model is paused. Answers go on when it is resumed.");
  if (state === "draining") return words("The model is about to be restarted. New answers wait until it is back.");
  return [words("The model is loading"), loadingFigures(figures), message].filter(Boolean).join(" · ");
}

function megabytes(loaded, total) {
  const inMegabytes = (bytes) => Math.round(bytes / 1e6).toLocaleString("en");
  return loaded < total
    ? words("{loaded} of {total} MB", { loaded: inMegabytes(loaded), total: inMegabytes(total) })
    : `${inMegabytes(total)} MB`;
}
