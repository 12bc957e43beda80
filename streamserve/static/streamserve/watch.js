// The answer of another owner, live: on the admin's watch page, and on its stream's page after a click on the button.
// Text from the model is inserted as text.
// EventSource reconnects by itself with the last event's id, and stops at the server's 204.

const root = /** @type {HTMLElement} */ (document.querySelector("[data-streamserve-watch]"));
const state = /** @type {HTMLElement} */ (root.querySelector("[data-ss=state]"));
const text = /** @type {HTMLElement} */ (root.querySelector("[data-ss=text]"));
const button = /** @type {HTMLElement | null} */ (root.querySelector("[data-ss=show]"));

function watch() {
  const source = new EventSource(root.dataset.eventsUrl ?? "");

  const showStatus = (words) => {
    state.textContent = words;
  };

  const end = (words) => {
    source.close();
    showStatus(words);
  };

  source.addEventListener("open", () => showStatus("Watching. This is recorded."));
  source.addEventListener("status", (event) => showStatus(JSON.parse(event.data).message ?? "Watching. This is recorded."));
  const otherBlocks = new Set(); // thinking and tool calls of the first choice: not its text

  function noteBlocks(blocks) {
    for (const { kind, index } of blocks) if (kind !== "text") otherBlocks.add(index);
  }

  source.addEventListener("block_start", (event) => {
    const block = JSON.parse(event.data);
    if (block.choice === 0) noteBlocks([block]);
  });
  source.addEventListener("token", (event) => {
    const token = JSON.parse(event.data);
    if (token.choice === 0 && !otherBlocks.has(token.index)) text.append(token.text);
  });
  source.addEventListener("snapshot", (event) => {
    const snapshot = JSON.parse(event.data);
    noteBlocks(snapshot.blocks ?? snapshot.choices?.[0].blocks ?? []);
    text.textContent = snapshot.text; // replaces all text before it
  });
  source.addEventListener("done", (event) => end(`Ended: ${JSON.parse(event.data).finish_reason}.`));
  source.addEventListener("error", (event) => {
    // Two events have this name: the server's, with data, and the browser's own about the connection.
    if (event instanceof MessageEvent) end(`Ended: ${JSON.parse(event.data).message}`);
    else if (source.readyState === EventSource.CLOSED) showStatus("There is nothing to watch here.");
    else showStatus("Connecting again…");
  });
}

if (button === null) watch();
else {
  button.addEventListener("click", () => {
    button.hidden = true;
    watch();
  });
}
