// The admin's delivery page: asks the site for a probe by the way of its readers, and draws when each event was sent and
// when it arrived in this browser. delivery_checks.js judges.

import { buffering, compression, delays, http, request, response } from "./delivery_checks.js";
import { element } from "./live_chart.js";
import { readEvents } from "./client.js";

const NUM_EVENTS = 13; // of a probe: its request and twelve beats
const MIN_SECONDS = 3.5; // of the axis
const [LEFT, RIGHT, SENT_Y, ARRIVED_Y] = [8, 392, 14, 56];
const SOCKET_MS = 15_000;

const root = /** @type {HTMLElement} */ (document.querySelector("[data-streamserve-delivery]"));
const part = (name) => /** @type {HTMLElement} */ (root.querySelector(`[data-ss=${name}]`));
const button = /** @type {HTMLButtonElement} */ (part("measure"));

const now = () => (performance.timeOrigin + performance.now()) / 1000;

function svg(name, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

function draw(events) {
  const late = delays(events);
  const first = events[0].sent;
  const end = Math.max(MIN_SECONDS, ...events.map(({ sent }, at) => sent - first + late[at]));
  const x = (seconds) => LEFT + ((RIGHT - LEFT) * seconds) / end;
  const marks = events.flatMap(({ sent }, at) => {
    const [x1, x2] = [x(sent - first), x(sent - first + late[at])];
    return [
      svg("line", { x1, y1: SENT_Y, x2, y2: ARRIVED_Y, class: "ss-way" }),
      svg("circle", { cx: x1, cy: SENT_Y, r: 3, class: "ss-sent" }),
      svg("circle", { cx: x2, cy: ARRIVED_Y, r: 3, class: "ss-arrived" }),
    ];
  });
  part("drawing").replaceChildren(...marks);
  part("end").textContent = `${end.toFixed(1)} s`;
  const cells = (at) => [`${at + 1}`, `${(events[at].sent - first).toFixed(2)} s`, `${late[at].toFixed(2)} s`];
  part("rows").replaceChildren(...events.map((_, at) => element("tr", {}, ...cells(at).map((text) => element("td", {}, text)))));
}

function show(verdicts) {
  const rows = verdicts.map(({ check, state, said, fault }) => {
    const name = fault ? element("code", {}, fault) : "";
    const words = element("td", {}, said, ...(fault ? [" In docs/troubleshooting.md: ", name] : []));
    return element("tr", {}, element("td", {}, element("span", { class: `ss-verdict is-${state.split(" ")[0]}` }, state)), element("th", { scope: "row" }, check), words);
  });
  part("verdicts").replaceChildren(...rows);
  part("outcome").hidden = false;
  const numFound = verdicts.filter(({ state }) => state === "found").length;
  say(numFound ? `${numFound} found. To name the proxy and the line to change, run: manage.py streamserve_doctor ${location.origin}` : "Nothing found.");
}

function say(words) {
  part("state").textContent = words;
}

/** Whether a WebSocket opens and answers. */
async function websocket() {
  const url = new URL(root.dataset.socketUrl ?? "", location.href);
  url.protocol = url.protocol.replace("http", "ws");
  const socket = new WebSocket(url);
  const answered = new Promise((resolve) => {
    socket.addEventListener("open", () => socket.send('{"type": "ping"}'));
    socket.addEventListener("message", ({ data }) => JSON.parse(data).type === "pong" && resolve(true));
    socket.addEventListener("close", () => resolve(false));
    setTimeout(() => resolve(false), SOCKET_MS);
  });
  const isAnswered = await answered;
  socket.close();
  if (isAnswered) return { check: "websocket", state: "ok", said: "A WebSocket opens, and its messages are answered.", fault: "" };
  return { check: "websocket", state: "found", said: "No WebSocket opens, or its messages are not answered.", fault: "no_upgrade" };
}

async function measure() {
  say("Measuring…");
  const url = new URL(root.dataset.probeUrl ?? "", location.href);
  const socket = websocket();
  const answer = await fetch(url, { cache: "no-store" });
  if (!answer.ok || answer.body === null) {
    const body = await answer.json().catch(() => null);
    return say(body?.error?.message ?? `The site answered ${answer.status} instead of a probe.`);
  }
  const events = [];
  let [seen, isWhole, at] = [/** @type {any} */ (null), false, 0];
  for await (const { type, data } of readEvents(answer.body, () => (at = now()))) {
    const event = JSON.parse(data);
    if (type === "request") seen = event;
    if (type === "end") isWhole = true;
    if (type !== "request" && type !== "beat") continue;
    events.push({ sent: event.sent, at });
    draw(events);
    say(`Measuring: ${events.length} of ${NUM_EVENTS} events.`);
  }
  if (!isWhole || seen === null) return say("The probe broke before its end: a proxy has cut the connection.");
  const timing = /** @type {PerformanceResourceTiming | undefined} */ (performance.getEntriesByName(url.href).at(-1));
  const header = (name) => answer.headers.get(name);
  return show([
    buffering(events),
    compression(header("content-encoding")),
    http(timing?.nextHopProtocol ?? "", seen.http_version, location.protocol === "https:"),
    request(seen, location),
    response(header),
    await socket,
  ]);
}

button.addEventListener("click", async () => {
  button.disabled = true;
  part("outcome").hidden = true;
  try {
    await measure();
  } catch {
    say("The site does not answer, or the connection broke.");
  }
  button.textContent = "Measure again";
  button.disabled = false;
});
button.disabled = false;
