// export.js: a branch as Markdown.
import assert from "node:assert/strict";
import { test } from "node:test";

import { newTurn } from "../../streamserve/static/streamserve/turn_tree.js";
import { markdownOf } from "../../streamserve/static/streamserve/export.js";

test("each question is a quote, and its answer stands as the model wrote it", () => {
  const citations = [{ source: "fees.md", title: "Fees", url: "/fees" }, { source: "notes.md" }];
  const first = { ...newTurn("Why?\n\nTell me."), text: "<think>hm</think>So **that**.", citations };
  const second = { ...newTurn("And?"), earlier: [{ text: "Half ", blocks: [], citations: [] }], text: "whole" };
  assert.equal(
    markdownOf([first, second], "Chat"),
    "# Chat\n\n## You asked\n\n> Why?\n>\n> Tell me.\n\n## Answer\n\nSo **that**.\n\n1. [Fees](/fees)\n2. notes.md\n\n" +
      "## You asked\n\n> And?\n\n## Answer\n\nHalf whole\n",
  );
});

test("an answer without text is a dash", () => {
  assert.equal(markdownOf([newTurn("Why?")]), "## You asked\n\n> Why?\n\n## Answer\n\n—\n");
});
