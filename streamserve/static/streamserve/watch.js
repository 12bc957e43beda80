// The admin's watch page: another's answer as it comes, for as long as the page is open. Model text goes in as text.
// EventSource comes back by itself with the last event's id, and stops at the server's 204.

const root = document.querySelector("[data-streamserve-watch]");
const state = root.querySelector("[data-ss=state]");
const text = root.querySelector("[data-ss=text]");
const source = new EventSource(root.dataset.eventsUrl);

const say = (words) => {
  state.textContent = words;
};

const end = (words) => {
  source.close();
  say(words);
};

source.addEventListener("open", () => say("Watching. This is written down."));
source.addEventListener("status", (event) => say(JSON.parse(event.data).message ?? "Watching. This is written down."));
source.addEventListener("token", (event) => {
  const token = JSON.parse(event.data);
  if (token.choice === 0) text.append(token.text);
});
source.addEventListener("snapshot", (event) => {
  text.textContent = JSON.parse(event.data).text; // in place of all that came before it
});
source.addEventListener("done", (event) => end(`Ended: ${JSON.parse(event.data).finish_reason}.`));
source.addEventListener("error", (event) => {
  if (event.data !== undefined) end(`Ended: ${JSON.parse(event.data).message}`);
  else if (source.readyState === EventSource.CLOSED) say("There is nothing to watch here.");
  else say("Connecting again…");
});
