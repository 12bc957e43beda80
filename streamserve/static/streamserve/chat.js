// The chat: composer, transcript, and the running answers. Configured by data attributes (chat.html).

import { Answering } from "./answering.js";
import { Attachments } from "./attachments.js";
import { Banner } from "./banner.js";
import { hasContent } from "./blocks.js";
import { Corner } from "./corner.js";
import { download, markdownOf } from "./export.js";
import { Conversation, forgetOtherUsers } from "./conversation.js";
import { Heartbeat } from "./heartbeat.js";
import { Library } from "./library.js";
import { loadingWords } from "./loading.js";
import { makeLocks } from "./locks.js";
import { questionOf } from "./approval_view.js";
import { beginPart, canContinue, isAsking } from "./parts.js";
import { Readiness } from "./readiness.js";
import { isLive } from "./turn_tree.js";
import { TurnView } from "./turn_view.js";
import { useWords, words } from "./words.js";

const NEAR_BOTTOM_PX = 64;
const NO_BAR = ["failed", "paused", "draining"]; // states without progress
const PARTS = [
  "log", "scroll", "empty", "jump", "form", "input", "send", "stop", "new", "back", "export", "status", "loading", "loading-words",
  "loading-bar", "banner", "banner-words", "banner-now", "model", "turn", "sign-in",
];

class Chat {
  constructor(root, config, locks) {
    this.root = root;
    this.parts = Object.fromEntries(PARTS.map((name) => [name, root.querySelector(`[data-ss="${name}"]`)]));
    this.config = config;
    this.locks = locks;
    /** @type {Library | null} */
    this.library = config.conversationsUrl === "" ? null : new Library(this);
    /** @type {any} */ // one of two classes with the same methods
    this.conversation = this.library?.conversation ?? new Conversation(config.storageKey);
    this.views = new Map();
    this.answers = new Map(); // turn → its Answering, while that runs
    this.isPinned = true;
    this.banner = new Banner(this.parts.banner, this.parts["banner-words"]);
    this.onLost = () => {};
    /** @type {Corner | null} */
    this.corner = null; // the floating form
    this.readiness = new Readiness({
      readyUrl: this.config.readyUrl,
      model: () => this.model,
      onChange: (state) => this.showLoading(state),
    });
    /** @type {Attachments | null} */
    this.attachments = null; // of the next question, where the server keeps the conversation
    if (this.library !== null) {
      const on = { changed: () => this.showSend(), announce: (text) => this.announce(text) };
      this.attachments = new Attachments(root, { ...config.attachments, headers: config.headers }, on);
    }
    this.listen();
  }

  get model() {
    return this.parts.model?.value ?? this.config.model;
  }

  get isAnswering() {
    return [...this.answers.values()].some((answering) => answering.isLive);
  }

  /** When the server last sent something, in milliseconds. */
  get heardAt() {
    return Math.max(-Infinity, ...[...this.answers.values()].map(({ stream }) => stream.heardAt));
  }

  open(isFirst) {
    this.merge();
    this.conversation.trim();
    this.drawAll();
    void this.share();
    for (const name of this.conversation.oldOnes()) void this.forget(name);
    if (this.parts.form.hidden) return; // the visitor has to sign in first
    this.resize(); // for what was typed before this script had loaded
    void this.readiness.wait();
    this.library?.begin();
    this.openCorner();
    if (isFirst && this.root.closest(".ss-page") !== null) this.focus(); // in another page the focus is that page's
  }

  openCorner() {
    if (this.root.parentElement?.matches(".ss-corner") !== true) return;
    this.corner = new Corner(this.root, this.config.storageKey, {
      focus: () => this.focus(),
      onToggle: () => {
        this.resize(); // what is hidden has no height
        for (const answering of this.answers.values()) answering.look();
      },
    });
  }

  /** Whether the visitor sees nothing of the chat. */
  get isAway() {
    return document.hidden || this.root.hidden;
  }

  // --- other tabs ----------------------------------------------------------------------------------------------------

  /** Show what other tabs have stored, and follow or take over what is unfinished. */
  merge() {
    const { name } = this.conversation;
    this.conversation.merge({
      isOurs: (turn) => this.answers.get(turn)?.isOurs ?? false,
      changed: (turn, stored) => {
        const answering = this.answers.get(turn);
        if (answering !== undefined) return answering.adopt(stored);
        // What has ended here is read on elsewhere, unless it is the beginning of a continuation.
        if (isLive(stored) && !isLive(turn) && stored.streamId === turn.streamId) return undefined;
        Object.assign(turn, stored);
        this.views.get(turn)?.paint();
        return this.views.get(turn)?.show();
      },
      removed: (turn) => this.drop(turn),
    });
    this.drawPath();
    if (name !== this.conversation.name) void this.share();
  }

  /** Hold this conversation's name, and no other, so that no tab forgets what this one shows. */
  share() {
    const before = this.shared;
    this.shared = this.locks.share(this.conversation.name);
    return before?.then((release) => release?.());
  }

  /** Remove a conversation from the storage, unless a tab shows it. */
  async forget(name) {
    const release = await this.locks.take(name);
    if (release === null) return;
    this.conversation.forget(name);
    release();
  }

  drop(turn) {
    this.answers.get(turn)?.detach();
    this.answers.delete(turn);
    this.views.get(turn)?.node.remove();
    this.views.delete(turn);
    this.showEmpty();
    this.showAnswering();
  }

  // --- asking --------------------------------------------------------------------------------------------------------

  ask(question) {
    const text = question.trim();
    if (text === "") return;
    if (this.attachments?.isSending) return this.attachments.wait();
    if (this.library?.isOpening) return this.library.askLater();
    this.merge();
    if (this.isAnswering) return;
    this.library?.asked(text);
    const { left } = this.conversation;
    if (left !== null && this.conversation.turns.length === 0) void this.forget(this.conversation.nameFor(left));
    this.parts.input.value = "";
    this.resize();
    this.begin(text, undefined, this.attachments?.take());
  }

  /** Ask after the turn `parent`, the last of the branch shown if none is named. */
  begin(question, parent, attachments = []) {
    const turn = this.conversation.add(question, parent);
    if (attachments.length > 0) turn.attachments = attachments;
    turn.model = this.model;
    this.drawPath({ isAsked: true });
  }

  /** Another answer to the same question. A turn that has failed without any text is replaced. */
  again(turn) {
    this.merge();
    if (this.isAnswering) return;
    this.replace(turn, turn.question);
    this.focus();
  }

  replace(turn, question) {
    if (turn.state === "failed" && !hasContent(turn) && this.conversation.path.at(-1) === turn) {
      this.conversation.remove(turn);
      this.drop(turn);
    }
    this.begin(question, turn.parent, turn.attachments);
  }

  /** Ask another question in the place of `turn`: both are kept. Return whether it was asked. */
  change(turn, question) {
    this.merge();
    if (this.isAnswering) return false;
    this.replace(turn, question);
    this.focus();
    return true;
  }

  /** Continue an answer that was cut short, in its place. */
  proceed(turn) {
    this.merge();
    if (this.isAnswering || !canContinue(turn)) return;
    const release = this.answers.get(turn)?.handOver() ?? null; // after a stop it still waits for its metrics
    beginPart(turn);
    this.answer(turn, { isAsked: true, release });
    this.focus();
  }

  /** Continue a run with its user's answers, in its place. */
  approve(turn, approvals) {
    this.merge();
    if (this.isAnswering || !isAsking(turn)) return;
    const { streamId } = turn;
    const release = this.answers.get(turn)?.handOver() ?? null;
    beginPart(turn);
    turn.answers = { streamId, approvals };
    this.answer(turn, { isAsked: true, release });
    this.focus();
  }

  /** Whether the model of an answer continues its own text. A pipeline makes each answer anew. */
  canContinue({ model }) {
    return !this.config.pipelines.includes(model || this.model);
  }

  /** Go to the branch through `turn`; `by` is the direction, whose button keeps the focus. */
  goTo(turn, by) {
    if (this.isAnswering) return;
    this.conversation.show(turn);
    this.isPinned = false;
    this.drawPath();
    this.views.get(turn).question.focusStep(by);
    this.showJump();
  }

  answer(turn, options = {}) {
    this.isPinned = true;
    const answering = new Answering(this, turn, this.views.get(turn), options);
    this.answers.set(turn, answering);
    this.changed(answering);
    this.painted();
    void answering.run().finally(() => {
      if (this.answers.get(turn) === answering) this.answers.delete(turn);
    });
  }

  async requestFor(turn) {
    const model = turn.model || this.model;
    return { ...this.config.request, model, ...(await this.conversation.fieldsFor(turn, model)) };
  }

  /** Begin another conversation. The old one is forgotten with the first question of the new one, unless a tab shows it. */
  newChat() {
    if (this.library !== null) return this.library.open(null);
    for (const answering of this.answers.values()) {
      if (answering.isOurs) answering.giveUp();
      else answering.detach();
    }
    this.answers.clear();
    this.conversation.renew();
    this.drawAll();
    this.showAnswering();
    this.announce(words("New chat. The last one can be brought back."));
    this.focus();
    return void this.share();
  }

  /** Show the conversation that was opened. Answers that run in the old one go on without this page. */
  show() {
    for (const answering of this.answers.values()) answering.detach();
    this.answers.clear();
    this.attachments?.clear();
    this.drawAll();
    this.showAnswering();
    this.link({ isLost: false });
    void this.share();
  }

  /** Put a text that was not sent yet into the composer. */
  draft(text) {
    this.parts.input.value = text;
    this.resize();
  }

  useModel(model) {
    const { model: select } = this.parts;
    if (select != null && [...select.options].some(({ value }) => value === model)) select.value = model;
  }

  /** Undo "New chat". */
  back() {
    const { left } = this.conversation;
    if (left === null) return this.showEmpty(); // another tab has removed it
    this.conversation.open(left);
    this.merge();
    this.drawAll();
    this.announce(words("The last chat is back."));
    this.focus();
    return void this.share();
  }

  // --- callbacks of an Answering ---------------------------------------------------------------------------------------

  changed(answering) {
    if (this.answers.get(answering.turn) !== answering) return;
    this.showAnswering();
    this.library?.changed({ isAccepted: answering.turn.streamId !== null, isLive: answering.isLive });
    if (answering.isLive) return;
    this.announceEnd(answering.turn);
    this.corner?.ended();
  }

  showAnswering() {
    const { isAnswering } = this;
    this.parts.send.hidden = isAnswering;
    this.parts.stop.hidden = !isAnswering;
    this.root.classList.toggle("is-answering", isAnswering);
    this.showSend();
  }

  /** A question can be sent once there is one, and its files are here. */
  showSend() {
    this.parts.send.disabled = this.parts.input.value.trim() === "" || (this.attachments?.isSending ?? false);
  }

  announceEnd(turn) {
    if (turn.state === "stopped" && turn.error === null) this.announce(words("Stopped"));
    else if (turn.state === "failed" || turn.error !== null) this.announce(turn.error?.message ?? words("The answer failed"));
    else if (isAsking(turn)) this.announce(words("Your answer is needed: {question}", { question: turn.approvals.map(questionOf).join(" ") }));
    else this.announce(words("Answer complete"));
  }

  announce(text) {
    if (this.parts.status.textContent !== text) this.parts.status.textContent = text;
  }

  /** A connection is lost and tried again in `seconds`, or works again. */
  link({ isLost, seconds = 0 }) {
    this.banner.lost(isLost ? seconds : null);
    if (isLost) this.onLost();
  }

  /** The server does not answer any more, or answers again. */
  gone(isGone) {
    this.banner.gone(isGone);
    if (isGone) return this.announce(this.banner.text());
    this.announce(this.isAnswering ? words("Generating") : words("The server is back."));
    this.nudge();
    if (this.parts.form.hidden) return undefined;
    this.readiness.doubt(); // it may have been restarted, and load its model
    return void this.readiness.wait();
  }

  nudge() {
    for (const { stream } of this.answers.values()) stream.nudge();
  }

  /** The session has ended: show the way to the login. */
  signIn() {
    if (this.parts["sign-in"] !== null) this.parts["sign-in"].hidden = false;
  }

  painted() {
    if (this.isPinned) this.parts.scroll.scrollTop = this.parts.scroll.scrollHeight;
    this.showJump();
  }

  // --- drawing -------------------------------------------------------------------------------------------------------

  drawAll() {
    this.drawPath();
    this.isPinned = true;
    this.painted();
  }

  /** Show the branch, and follow what runs in it. Views of other branches stay for what has not ended in them: an answer, an edit. */
  drawPath(options = {}) {
    const { path } = this.conversation;
    for (const [turn, view] of this.views) {
      if (path.includes(turn)) continue;
      view.node.remove();
      if (!this.answers.has(turn) && !view.question.isEdited) this.views.delete(turn);
    }
    for (const [at, turn] of path.entries()) {
      if (!this.views.has(turn)) this.views.set(turn, this.makeView(turn));
      const { node } = this.views.get(turn);
      const there = this.parts.log.children[at] ?? null;
      if (there !== node) this.parts.log.insertBefore(node, there);
    }
    this.showEmpty();
    for (const turn of path) {
      if (isLive(turn) && !this.answers.has(turn)) this.answer(turn, options);
      else this.views.get(turn).question.show();
    }
  }

  makeView(turn) {
    const on = {
      again: (which) => this.again(which),
      proceed: (which) => this.proceed(which),
      approve: (which, approvals) => this.approve(which, approvals),
      change: (which, question) => this.change(which, question),
      show: (which, by) => this.goTo(which, by),
      siblings: (which) => this.conversation.siblings(which),
      canContinue: (which) => this.canContinue(which),
      canRate: ({ questionId = "" }) => this.conversation.rate !== undefined && questionId !== "",
      rate: (which, rating, comment) => this.conversation.rate(which, rating, comment),
      announce: (text) => this.announce(text),
      fileUrl: (id) => `${this.config.attachments.url}/${id}/content`,
    };
    return new TurnView(this.parts.turn, turn, on, this.config);
  }

  showEmpty() {
    const isEmpty = this.conversation.path.length === 0;
    this.parts.empty.hidden = !isEmpty || (this.library?.isOpening ?? false);
    this.parts.log.hidden = isEmpty;
    this.parts.new.hidden = isEmpty;
    this.parts.export.hidden = isEmpty;
    this.parts.back.hidden = !isEmpty || this.conversation.left === null;
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
    this.showSend();
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
      if (event.isComposing || event.keyCode === 229) return;
      if (event.key === "ArrowUp" && input.value === "") this.editLast(event);
      if (event.key !== "Enter" || event.shiftKey) return;
      event.preventDefault();
      this.ask(input.value);
    });
    stop.addEventListener("click", () => this.stop());
    this.root.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || event.isComposing || !this.isAnswering) return;
      event.preventDefault(); // and so closes no floating chat
      this.stop();
    });
    this.parts.new.addEventListener("click", () => this.newChat());
    this.parts.back.addEventListener("click", () => this.back());
    this.parts.export.addEventListener("click", () => this.export());
    this.parts["banner-now"].addEventListener("click", () => {
      this.onLost();
      this.nudge();
    });
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

  /** ArrowUp in the empty composer edits the last question. */
  editLast(event) {
    const last = this.conversation.path.at(-1);
    if (last === undefined || this.isAnswering) return;
    event.preventDefault();
    this.views.get(last).question.edit();
  }

  /** The branch shown as a file. */
  export() {
    const { exportUrl, path } = this.conversation;
    if (exportUrl !== undefined) return download("chat.md", { url: exportUrl });
    return download("chat.md", { text: markdownOf(path, this.root.getAttribute("aria-label") ?? "") });
  }

  stop() {
    if (!this.isAnswering) return;
    for (const answering of this.answers.values()) answering.stop();
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
      this.nudge();
      this.readiness.sleep.wake();
    };
    for (const name of ["online", "pageshow", "focus"]) window.addEventListener(name, wake);
    for (const name of ["online", "offline"]) window.addEventListener(name, () => this.banner.show());
    document.addEventListener("visibilitychange", wake);
    window.addEventListener("pagehide", () => this.leave());
    window.addEventListener("pageshow", ({ persisted }) => {
      if (!persisted) return;
      this.merge(); // the user may have signed out on another page
      void this.share();
    });
    window.addEventListener("storage", ({ key }) => {
      if (key === null || key.startsWith(this.config.storageKey)) this.merge();
    });
  }

  /** Store what is on screen, and hold nothing: a held lock keeps a page out of the browser's back cache. */
  leave() {
    for (const answering of this.answers.values()) {
      answering.report(); // what is known by now
      if (answering.isLive) answering.save();
    }
    void this.shared?.then((release) => release?.());
  }
}

/** Make a chat of each element of the page that asks for one. They share one heartbeat. */
function openAll(roots) {
  const locks = makeLocks();
  const chats = [...roots].map((root) => {
    useWords(JSON.parse(root.dataset.words || "{}"), root.closest("[lang]")?.lang);
    return [root, readConfig(root)];
  });
  const used = new Set();
  for (const [root, config] of chats) {
    while (used.has(config.storageKey)) config.storageKey += ".2"; // two widgets are two conversations
    used.add(config.storageKey);
    root.dataset.storageKey = config.storageKey;
  }
  for (const [, config] of chats) forgetOtherUsers(config.storageKey);
  const opened = chats.map(([root, config]) => new Chat(root, config, locks));
  for (const [index, chat] of opened.entries()) chat.open(index === 0);
  if (opened.length > 0) watchServer(opened);
}

function watchServer(chats) {
  const heartbeat = new Heartbeat({
    url: chats[0].config.liveUrl,
    onChange: (isGone) => chats.forEach((chat) => chat.gone(isGone)),
    isBusy: () => chats.some((chat) => chat.isAnswering),
    heardAt: () => Math.max(...chats.map((chat) => chat.heardAt)),
  });
  for (const chat of chats) chat.onLost = () => heartbeat.doubt();
  heartbeat.start();
}

function readConfig(root) {
  const { streamsUrl, readyUrl, liveUrl, model, storageKey, keepaliveSeconds, request, csrfCookie } = root.dataset;
  const { conversationsUrl = "", attachments, source = "", address } = root.dataset;
  const { figures, timings, firstTokenBudget, totalBudget, math, pipelines } = root.dataset;
  const token = () => cookie(csrfCookie) ?? root.querySelector("input[name=csrfmiddlewaretoken]")?.value ?? "";
  return {
    streamsUrl,
    readyUrl,
    liveUrl,
    model,
    pipelines: JSON.parse(pipelines || "[]"),
    storageKey: storageKey || "streamserve.chat",
    keepaliveSeconds: Number(keepaliveSeconds) || 15,
    conversationsUrl,
    source,
    hasAddress: address === "true",
    request: JSON.parse(request || "{}"),
    headers: () => ({ "X-CSRFToken": token() }),
    attachments: JSON.parse(attachments || "{}"),
    showsFigures: figures === "true",
    reportsTimings: timings === "true",
    hasMath: math === "true",
    budgets: { firstToken: Number(firstTokenBudget) || 0, total: Number(totalBudget) || 0 }, // seconds; 0: none
  };
}

/** The CSRF token: the cookie follows a login in another tab; the form's token serves if scripts cannot read it. */
function cookie(name) {
  const pair = document.cookie.split("; ").find((text) => text.startsWith(`${name}=`));
  return pair && decodeURIComponent(pair.slice(name.length + 1));
}

openAll(document.querySelectorAll("[data-streamserve-chat]"));
