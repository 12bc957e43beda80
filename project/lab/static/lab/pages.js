// What the lab's pages have in common: their parts by name, what a POST needs, seconds in words.

/** The elements that carry `data-lab-part`, by its value. */
export function partsOf(root) {
  return Object.fromEntries([...root.querySelectorAll("[data-lab-part]")].map((part) => [part.dataset.labPart, part]));
}

/** The header that Django's CSRF check asks for. */
export function csrfHeaders(cookieName) {
  const name = `${cookieName}=`;
  const cookie = document.cookie.split("; ").find((each) => each.startsWith(name)) ?? name;
  return { "X-CSRFToken": cookie.slice(name.length) };
}

/** "0.62 s", "12.4 s" */
export function secondsWords(seconds) {
  return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

/** "0.21 ms", "3.4 ms", "120 ms" */
export function msWords(ms) {
  return `${ms.toFixed(ms < 1 ? 2 : ms < 10 ? 1 : 0)} ms`;
}
