// A conversation as a Markdown file: the branch shown. The text is pure; `download` needs a page.

import { wholeOf, withoutThinking } from "./blocks.js";
import { words } from "./words.js";

/** Each question as a heading and a quote, its answer as the model wrote it, its sources as a list. */
export function markdownOf(path, title = "") {
  const parts = title === "" ? [] : [`# ${title}`];
  for (const turn of path) {
    const { text, blocks, citations } = wholeOf(turn);
    const answer = blocks.length > 0 ? text.trim() : withoutThinking(text);
    parts.push(`## ${words("You asked")}`, quoted(turn.question), `## ${words("Answer")}`, answer || "—");
    if (citations.length > 0) parts.push(citations.map(sourceLine).join("\n"));
  }
  return `${parts.join("\n\n")}\n`;
}

function quoted(text) {
  return text.split("\n").map((line) => `> ${line}`.trimEnd()).join("\n");
}

function sourceLine({ source, id, title, url }, index) {
  const label = String(title || id || source);
  return url ? `${index + 1}. [${label}](${url})` : `${index + 1}. ${label}`;
}

/** Give the browser a file to store: a text, or what is at an address of this site. */
export function download(name, { text = "", url = "" }) {
  const link = document.createElement("a");
  link.href = url || URL.createObjectURL(new Blob([text], { type: "text/markdown;charset=utf-8" }));
  link.download = name;
  link.click();
  if (url === "") setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // a slow disk may still read it
}
