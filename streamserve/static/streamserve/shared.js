// The page of a share link: the answers' markdown as nodes. Without scripts the page shows its characters.

import { updateBlocks } from "./render.js";

for (const node of document.querySelectorAll("[data-markdown]")) {
  const source = node.textContent;
  node.replaceChildren();
  updateBlocks(node, [], source, false);
  node.removeAttribute("data-markdown");
}
