// The chat page: composer, transcript, and the running answer. Configured by data attributes (chat.html).

import { Answering } from "./answering.js";
import { Conversation, newTurn } from "./conversation.js";
import { loadingWords } from "./loading.js";
import { Readiness } from "./readiness.js";
import { TurnView } from "./turn_view.js";

const NEAR_BOTTOM_PX = 64;
const NO_BAR = ["failed", "paused", "draining"]; // states without progress
const LOST_BANNER_SECONDS = 0.8; // a reconnect that succeeds at once is not worth a banner

class Chat {
  constructor(root) {
    this.root = root;
    const part = (name) => root.querySelector(`[data-ss="${name}"]`);
    this.parts = Object.fromEntries(
      ["log", "scroll", "empty", "jump", "form", "input", "send", "stop", "new", "status", "loading", "loading-words",
        "loading-bar", "banner", "banner-words", "banner-now", "model", "turn"].map((name) => [name, part(name)]),
    );
    this.config = readConfig(root);
    this.conversation = new Conversation(this.config.storageKey);
    this.views = new Map();
    this.answering = null;
    this.isPinned = true;
    this.readiness = new Readiness({
      readyUrl: this.config.readyUrl,
      model: () => this.model,
      onChange: (state) => this.showLoading(state),
    });
    this.listen();
  }

  get model() {
    return this.parts.model?.value ?? this.config.model;
  }

  get isAnswering() {
    return this.answering !== null && this.answering.isLive;
  }

  open() {
    this.conversation.load();
    this.drawAll();
    void this.readiness.wait();
    this.takeUp();
    this.focus();
  }

  /** Resume an answer that the last visit left unfinished. */
  takeUp() {
    const turn = this.conversation.turns.at(-1);
    if (turn?.state === "streaming" || (turn?.state === "waiting" && !turn.isSent)) this.answer(turn);
    else if (turn?.state === "waiting") this.leftBehind(turn);
  }

  leftBehind(turn) {
    turn.state = "failed";
    turn.error = { code: "left", message: "The page was left before this answer began." };
    this.views.get(turn).show();
  }

  // --- asking --------------------------------------------------------------------------------------------------------

  ask(question) {
    const text = question.trim();
    if (text === "" || this.isAnswering) return;
    const turn = newTurn(text);
    this.conversation.turns.push(turn);
    this.draw(turn);
    this.parts.input.value = "";
    this.resize();
    this.answer(turn);
  }

  again(turn) {
    if (this.isAnswering) return;
    const { turns } = this.conversation;
    for (const later of turns.splice(turns.indexOf(turn))) {
      this.views.get(later).node.remove();
      this.views.delete(later);
    }
    this.ask(turn.question);
    this.focus();
  }

  answer(turn) {
    this.isPinned = true;
    this.answering = new Answering(this, turn, this.views.get(turn));
    this.changed(this.answering);
    this.painted();
    void this.answering.run();
  }

  requestFor(turn) {
    return { ...this.config.request, model: this.model, messages: this.conversation.messagesFor(turn) };
  }

  newChat() {
    this.answering?.stop();
    this.answering = null;
    this.conversation.clear();
    this.conversation.save();
    this.drawAll();
    this.announce("New chat");
    this.focus();
  }

  // --- callbacks of an Answering ---------------------------------------------------------------------------------------

  changed(answering) {
    if (answering !== this.answering) return;
    const { isLive } = answering;
    this.parts.send.hidden = isLive;
    this.parts.stop.hidden = !isLive;
    this.root.classList.toggle("is-answering", isLive);
    this.parts.send.disabled = this.parts.input.value.trim() === "";
    if (!isLive) this.announceEnd(answering.turn);
  }

  announceEnd(turn) {
    if (turn.state === "stopped") this.announce("Stopped");
    else if (turn.state === "failed") this.announce(turn.error?.message ?? "The answer failed");
    else this.announce("Answer complete");
  }

  announce(text) {
    if (this.parts.status.textContent !== text) this.parts.status.textContent = text;
  }

  link({ isLost, seconds = 0 }) {
    clearTimeout(this.bannerTimer);
    clearInterval(this.bannerClock);
    if (!isLost) {
      this.parts.banner.hidden = navigator.onLine !== false || !this.isAnswering;
      return;
    }
    const retryAt = performance.now() + seconds * 1000;
    const show = () => {
      const left = Math.ceil((retryAt - performance.now()) / 1000);
      this.parts["banner-words"].textContent =
        left > 0 ? `Connection lost. Trying again in ${left} s.` : "Connection lost. Trying again…";
      this.parts.banner.hidden = false;
    };
    if (this.parts.banner.hidden) this.bannerTimer = setTimeout(show, LOST_BANNER_SECONDS * 1000);
    else show();
    this.bannerClock = setInterval(() => this.parts.banner.hidden || show(), 500);
  }

  painted() {
    if (this.isPinned) this.parts.scroll.scrollTop = this.parts.scroll.scrollHeight;
    this.showJump();
  }

  // --- drawing -------------------------------------------------------------------------------------------------------

  drawAll() {
    this.views.clear();
    this.parts.log.replaceChildren();
    for (const turn of this.conversation.turns) this.draw(turn);
    this.showEmpty();
    this.isPinned = true;
    this.painted();
  }

  draw(turn) {
    const view = new TurnView(this.parts.turn, turn, { again: (which) => this.again(which) });
    this.views.set(turn, view);
    this.parts.log.append(view.node);
    this.showEmpty();
  }

  showEmpty() {
    const isEmpty = this.conversation.turns.length === 0;
    this.parts.empty.hidden = !isEmpty;
    this.parts.log.hidden = isEmpty;
    this.parts.new.hidden = isEmpty;
    this.root.classList.toggle("is-empty", isEmpty);
  }

  showLoading({ isReady, ...model }) {
    const { state, fraction } = model;
    this.parts.loading.hidden = isReady;
    this.parts["loading-words"].textContent = loadingWords(model);
    this.parts.loading.classList.toggle("is-error", state === "failed");
    const bar = this.parts["loading-bar"];
    bar.hidden = NO_BAR.includes(state);
    if (fraction === null) bar.removeAttribute("value");
    else bar.value = fraction;
  }

  showJump() {
    this.parts.jump.hidden = this.isPinned || this.distanceToBottom() < NEAR_BOTTOM_PX;
  }

  distanceToBottom() {
    const { scrollHeight, scrollTop, clientHeight } = this.parts.scroll;
    return scrollHeight - scrollTop - clientHeight;
  }

  resize() {
    const { input } = this.parts;
    input.style.height = "auto";
    input.style.height = `${Math.min(input.scrollHeight, window.innerHeight * 0.4)}px`;
    this.parts.send.disabled = input.value.trim() === "";
  }

  /** Not on a touch screen, where the keyboard would cover the answer. */
  focus() {
    if (window.matchMedia("(pointer: fine)").matches) this.parts.input.focus({ preventScroll: true });
  }

  // --- listening -----------------------------------------------------------------------------------------------------

  listen() {
    const { form, input, stop, jump, scroll, empty } = this.parts;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask(input.value);
      this.focus();
    });
    input.addEventListener("input", () => this.resize());
    input.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
      event.preventDefault();
      this.ask(input.value);
    });
    stop.addEventListener("click", () => this.stop());
    this.root.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.isComposing) this.stop();
    });
    this.parts.new.addEventListener("click", () => this.newChat());
    this.parts["banner-now"].addEventListener("click", () => this.answering?.stream.nudge());
    empty.addEventListener("click", (event) => {
      const question = event.target.closest("[data-question]")?.dataset.question;
      if (question === undefined) return;
      this.ask(question);
      this.focus();
    });
    jump.addEventListener("click", () => {
      this.isPinned = true;
      this.painted();
      this.focus();
    });
    this.listenToScroll(scroll);
    this.listenToWindow();
  }

  stop() {
    if (!this.isAnswering) return;
    this.answering.stop();
    this.focus();
  }

  /** Scrolling up stops following the end; scrolling back near it follows again. */
  listenToScroll(scroll) {
    let lastTop = 0;
    scroll.addEventListener(
      "scroll",
      () => {
        const wentUp = scroll.scrollTop < lastTop;
        lastTop = scroll.scrollTop;
        this.isPinned = this.distanceToBottom() < (wentUp ? 4 : NEAR_BOTTOM_PX);
        this.showJump();
      },
      { passive: true },
    );
    new ResizeObserver(() => this.painted()).observe(scroll); // a phone's keyboard opened or closed
  }

  listenToWindow() {
    const wake = () => {
      if (document.visibilityState !== "visible") return;
      this.answering?.stream.nudge();
      this.readiness.sleep.wake();
    };
    for (const name of ["online", "pageshow", "focus"]) window.addEventListener(name, wake);
    document.addEventListener("visibilitychange", wake);
    window.addEventListener("offline", () => this.link({ isLost: this.isAnswering, seconds: 0 }));
    // Only changes are saved, so that an old tab does not overwrite what a newer one has stored.
    window.addEventListener("pagehide", () => this.isAnswering && this.conversation.save());
    window.addEventListener("storage", ({ key }) => {
      if (key === this.config.storageKey) this.adopt();
    });
  }

  /** Another tab changed the conversation or began a new one. */
  adopt() {
    const theirs = this.conversation.peek();
    const isOurs = theirs?.id === this.conversation.id && theirs.turns.length === this.conversation.turns.length;
    if (this.isAnswering || theirs === null || isOurs) return;
    this.answering?.detach();
    this.answering = null;
    this.conversation.load();
    this.drawAll();
    this.takeUp();
  }
}

function readConfig(root) {
  const { streamsUrl, readyUrl, model, storageKey, keepaliveSeconds, request, csrfCookie } = root.dataset;
  const token = () => cookie(csrfCookie) ?? root.querySelector("input[name=csrfmiddlewaretoken]")?.value ?? "";
  return {
    streamsUrl,
    readyUrl,
    model,
    storageKey: storageKey || "streamserve.chat",
    keepaliveSeconds: Number(keepaliveSeconds) || 15,
    request: JSON.parse(request || "{}"),
    headers: () => ({ "X-CSRFToken": token() }),
  };
}

/** The CSRF token: the cookie follows a login in another tab; the form's token serves if scripts cannot read it. */
function cookie(name) {
  const pair = document.cookie.split("; ").find((text) => text.startsWith(`${name}=`));
  return pair && decodeURIComponent(pair.slice(name.length + 1));
}

for (const root of document.querySelectorAll("[data-streamserve-chat]")) new Chat(root).open();
