// rating_view.js on parts that are no elements: what is sent, and what is shown when it was stored.
import assert from "node:assert/strict";
import { test } from "node:test";

import { RatingView } from "../../streamserve/static/streamserve/rating_view.js";

class Part extends EventTarget {
  constructor() {
    super();
    Object.assign(this, { hidden: false, value: "", textContent: "", attributes: {}, isFocused: false });
  }
  setAttribute(name, value) {
    this.attributes[name] = value;
  }
  focus() {
    this.isFocused = true;
  }
  scrollIntoView() {}
}

function view(rate) {
  const names = ["rating", "good", "bad", "remark", "remark-cancel", "comment", "rated"];
  const parts = Object.fromEntries(names.map((name) => [name, new Part()]));
  const turn = { state: "done", rating: null, comment: "" };
  return { parts, turn, view: new RatingView(parts, turn, { rate, canRate: () => true, announce() {} }) };
}

test("a thumb that is pressed while its rating is being stored is not taken back", async () => {
  const sent = [];
  let stored;
  const { parts, turn, view: rating } = view((_, value, comment) => {
    sent.push([value, comment]);
    return new Promise((resolve) => (stored = resolve));
  });
  const first = rating.press(-1);
  await rating.press(-1);
  assert.equal(sent.length, 1);
  stored();
  await first;
  assert.equal(turn.rating, -1);
  assert.equal(parts.bad.attributes["aria-pressed"], "true");
  parts.comment.value = "Too short ";
  const second = rating.comment();
  stored();
  await second;
  assert.deepEqual(sent, [[-1, ""], [-1, "Too short"]]);
  assert.equal(parts.remark.hidden, true);
});

test("after a rating that could not be stored the next one is sent", async () => {
  let isDown = true;
  const { parts, turn, view: rating } = view(() => (isDown ? Promise.reject(new Error("503")) : Promise.resolve()));
  await rating.press(1);
  assert.equal(turn.rating, null);
  assert.match(parts.rated.textContent, /could not be stored/);
  isDown = false;
  await rating.press(1);
  assert.equal(turn.rating, 1);
});
