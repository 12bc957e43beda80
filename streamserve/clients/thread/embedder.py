"""`ThreadEmbedder`: an embedding model on a thread of this process: for tests, and inside the engine's own process.

Event loops accept requests, a small pool tokenises, the engine thread computes one pass after the other of what waits
(`EmbedQueue`). A request that is cancelled is withdrawn: what of it was not computed yet never is. A pass that fails is
computed again in halves, so that it fails only for the input that makes it fail.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from streamserve.clients.base import not_loaded
from streamserve.engine.config import EmbedderConfig
from streamserve.engine.embedding import Embedder, EmbedQueue, Item, PassTime, Work
from streamserve.engine.plan import Flight, OnStep, Progress
from streamserve.engine.text.tokenizer import checked_bytes
from streamserve.protocol.embeddings import Embedded, EmbedRequest
from streamserve.protocol.engine import EMBEDS, EngineStats, ModelDescription
from streamserve.protocol.errors import (
    BadRequest,
    EngineUnavailable,
    Overloaded,
    PromptTooLong,
    StreamserveError,
)
from streamserve.protocol.requests import NO_CALLER, Admission, GenerateRequest
from streamserve.protocol.spelling import Spell, Spelled

logger = logging.getLogger(__name__)

Load = Callable[[Progress], Embedder]

_TOKENIZER_THREADS = 2
_STATES = {"pause": "paused", "resume": "ready", "drain": "draining"}
_OPERATOR_RETRY_SECONDS = 10
_FIRST_GUESS = 2.0  # seconds to retry after, until a pass was measured
_LEAST_HANG_SECONDS = 12.0
_SHUT_DOWN = "the engine was shut down."


class _Closed(Exception):
    """Ends a load whose client was closed meanwhile."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request's future, on the loop that waits for it."""

    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[None]


class ThreadEmbedder:
    """An `EmbeddingClient` whose model is on a thread. `load(progress)` runs there after `start()`.

    `on_step` is told of each pass, on the engine thread, as an engine's steps are. Several loops may embed.
    """

    def __init__(
        self,
        config: EmbedderConfig,
        load: Load,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_step: OnStep | None = None,
        loads_at_once: bool = False,
    ) -> None:
        self.alias = config.alias
        self._config, self._load, self._clock, self._on_step = config, load, clock, on_step
        self._description = ModelDescription(alias=config.alias, state="idle", created=int(time.time()), kind=EMBEDS)
        self._embedder: Embedder | None = None
        self._operator_state = "ready"
        self._news = threading.Condition()  # guards the fields below
        self._queue = EmbedQueue()
        self._waiting: dict[Work, _Waiting] = {}
        self._num_chars = 0  # of all requests that have not ended
        self._is_closing = False
        self._stats = EngineStats()
        self._pass_time = PassTime(config.max_batch_tokens, config.max_batch_seconds)
        self._started_at = 0.0
        self._thread = threading.Thread(target=self._run, name=f"embed-{config.alias}", daemon=True)
        self._tokenizers = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix=f"tokenize-{config.alias}")
        self._loaded = threading.Event() if loads_at_once else None

    # Event loops

    async def embed(self, request: EmbedRequest, admission: Admission = NO_CALLER) -> Embedded:
        """Return the vectors, or raise: BadRequest (an input never fits), Refused (not now)."""
        embedder = self._require(takes_new=True)
        self._check_dimensions(embedder, request)
        num_chars = self._reserve(request)
        try:
            loop = asyncio.get_running_loop()
            inputs = await loop.run_in_executor(self._tokenizers, partial(_encoded, embedder, request))
            work = Work(inputs, request.dimensions, tenant=admission.share_of, is_batch=request.is_batch)
            vectors = await self._computed(work)
        finally:
            with self._news:
                self._num_chars -= num_chars
        return Embedded(vectors=vectors, num_tokens=sum(map(len, inputs)))

    async def tokenize(self, request: GenerateRequest, admission: Admission = NO_CALLER) -> tuple[int, ...]:
        """Return the ids of a request's `prompt`, as `embed` would see them."""
        embedder = self._require()
        text = request.prompt or ""
        num_chars = self._reserve(EmbedRequest(model=self.alias, inputs=(text,)))
        try:
            loop = asyncio.get_running_loop()
            (ids,) = await loop.run_in_executor(self._tokenizers, embedder.encode, (text,))
        finally:
            with self._news:
                self._num_chars -= num_chars
        return tuple(ids)

    async def spell(self, asked: Spell) -> Spelled:
        """Return ids of a bare text, or texts of ids."""
        embedder = self._require()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._tokenizers, embedder.spell, asked)

    async def control(self, action: str) -> None:
        """Pause, resume or drain: what has been accepted is computed, nothing new is accepted until "resume"."""
        if action not in _STATES:
            raise BadRequest(f"action is one of {', '.join(_STATES)}.", param="action")
        self._refuse_failed()
        self._operator_state = _STATES[action]

    def start(self) -> None:
        """Start loading, once; returns at once, or loaded (`loads_at_once`)."""
        with self._news:
            if self._description.state != "idle" or self._is_closing:
                return
            self._started_at = self._clock()
            self._describe(state="loading", stage="starting")
        self._thread.start()
        if self._loaded is not None:
            self._loaded.wait()

    def wake(self) -> None:
        """Do `start`."""
        self.start()

    @property
    def has_failed(self) -> bool:
        """Whether the model could not be loaded, or its thread has ended in a fault."""
        return self._description.state == "failed"

    def describe(self) -> ModelDescription:
        """Return what the model is and how far loading has come. Never blocks."""
        description = self._description
        if description.state == "loading":
            return replace(description, elapsed_seconds=self._clock() - self._started_at)
        return replace(description, state=self._operator_state) if description.state == "ready" else description

    def stats(self) -> EngineStats:
        """Return live counts: `running` and `waiting` are requests, `rows` inputs that wait. Never blocks."""
        return self._stats

    async def aclose(self) -> None:
        """Refuse what waits, and end the thread after the pass it is in."""
        with self._news:
            self._is_closing = True
            if self._description.state == "idle":
                self._describe(state="failed", message=_SHUT_DOWN)
            self._news.notify()
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)
        self._tokenizers.shutdown(wait=False)

    def _require(self, *, takes_new: bool = False) -> Embedder:
        """Return the loaded model; refuse while it is not loaded (loading starts), failed, or closed by an operator."""
        self.start()
        self._refuse_failed()
        if self._embedder is None:
            raise not_loaded(self._description)
        if takes_new and self._operator_state != "ready":
            message = f"model {self.alias} is {self._operator_state} by an operator. Try again later."
            code = f"engine_{self._operator_state}"
            raise EngineUnavailable(message, code=code, retry_after=_OPERATOR_RETRY_SECONDS)
        return self._embedder

    def _refuse_failed(self) -> None:
        if self.has_failed:
            raise EngineUnavailable(f"model {self.alias} is not available.", retry_after=30)

    def _check_dimensions(self, embedder: Embedder, request: EmbedRequest) -> None:
        asked, has = request.dimensions, embedder.dimensions
        if asked is None or asked == has:
            return
        if asked > has:
            raise BadRequest(
                f"dimensions is {asked}; the vectors of {self.alias} have {has:,}.",
                code="invalid_value",
                param="dimensions",
            )
        if not embedder.allows_fewer:
            message = (
                f"The vectors of {self.alias} have {has:,} dimensions, and it was not trained to be cut: leave "
                "dimensions out. (MATRYOSHKA of the model in EMBEDDING_MODELS allows it.)"
            )
            raise BadRequest(message, code="unsupported_parameter", param="dimensions")

    def _reserve(self, request: EmbedRequest) -> int:
        """Count a request's characters among those that wait, and return their number. Raises Overloaded."""
        num_chars = request.num_chars
        with self._news:
            if self._num_chars and self._num_chars + num_chars > self._config.max_waiting_chars:
                self._stats = replace(self._stats, refused=self._stats.refused + 1)
                message = f"model {self.alias} has as many texts waiting as it takes. Try again later."
                raise Overloaded(message, retry_after=self._retry_after())
            self._num_chars += num_chars
        return num_chars

    def _retry_after(self) -> int:
        seconds = self._pass_time.seconds_for(self._queue.num_tokens)
        return round(_FIRST_GUESS if seconds is None else seconds)

    async def _computed(self, work: Work) -> tuple[bytes, ...]:
        """Have a request computed and return its vectors. Cancelled, it is withdrawn."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(loop, loop.create_future())
        with self._news:
            self._refuse_closing()
            self._waiting[work] = waiting
            self._queue.add(work)
            self._note_waiting()
            self._news.notify()
        try:
            await waiting.done
        finally:
            with self._news:
                work.is_withdrawn = True
                self._waiting.pop(work, None)
                self._note_waiting()
                self._news.notify()
        vectors = [vector for vector in work.vectors if vector is not None]
        if len(vectors) < len(work.inputs):
            message = "the model gave numbers that are not finite for an input of this request."
            raise StreamserveError(message, code="numerical_error")
        return tuple(vectors)

    def _refuse_closing(self) -> None:
        if self._is_closing or self.has_failed:
            raise EngineUnavailable(f"model {self.alias} is not available.", retry_after=2)

    # The engine thread

    def _run(self) -> None:
        message = _SHUT_DOWN
        try:
            self._load_model()
            while (items := self._next_pass()) is not None:
                self._compute(items)
        except _Closed:
            pass
        except StreamserveError as error:  # its message is written for operators
            logger.error("model %s could not be loaded: %s", self.alias, error.message)
            message = error.message
        except Exception as error:  # the edge of the thread
            logger.exception("the embedding model %s died", self.alias)
            message = f"the engine failed ({type(error).__name__}); the log has the details."
        finally:
            self._end(message)

    def _load_model(self) -> None:
        embedder = self._load(self._report)
        self._embedder = embedder
        self._describe(
            state="ready",
            stage="ready",
            fraction=1.0,
            elapsed_seconds=self._clock() - self._started_at,
            max_model_len=embedder.max_model_len,
            dimensions=embedder.dimensions,
            dtype=embedder.dtype,
            device=embedder.device,
            num_parameters=embedder.num_parameters,
        )
        if self._loaded is not None:
            self._loaded.set()

    def _next_pass(self) -> list[Item] | None:
        """Wait for inputs, and take those of the next pass; None once the client is closed."""
        with self._news:
            while not self._is_closing:
                items = self._queue.take(self._pass_time.most_tokens)
                self._note_waiting()
                if items:
                    return items
                self._news.wait()
        return None

    def _compute(self, items: list[Item]) -> None:
        """Compute one pass, and give its vectors to their requests."""
        assert self._embedder is not None
        inputs = [item.token_ids for item in items]
        num_padded = max(map(len, inputs)) * len(inputs)
        self._report_flight(self._pass_time.seconds_allowed(num_padded, _LEAST_HANG_SECONDS))
        began = self._clock()
        try:
            vectors = self._embedder.embed(inputs, [item.work.dimensions for item in items])
        except Exception:
            self._report_flight(None)
            logger.exception("a pass of %d inputs of the model %s failed", len(items), self.alias)
            self._retry(items)
            return
        self._report_flight(None)
        seconds = self._clock() - began
        self._pass_time.note(num_padded, seconds)
        finished: list[Work] = []
        for item, vector in zip(items, vectors, strict=True):
            item.work.vectors[item.index] = vector
            item.work.num_left -= 1
            if not item.work.num_left:
                finished.append(item.work)
        with self._news:
            self._note_pass(inputs, seconds, len(finished))
        for work in finished:
            self._settle(work, None)

    def _retry(self, items: list[Item]) -> None:
        """Have the halves of a pass computed by themselves; an input that failed alone fails its request."""
        if len(items) > 1:
            self._compute(items[: len(items) // 2])
            self._compute(items[len(items) // 2 :])
            return
        work = items[0].work
        work.is_withdrawn = True
        self._settle(work, StreamserveError("the model failed on an input of this request."))

    def _settle(self, work: Work, error: StreamserveError | None) -> None:
        with self._news:
            waiting = self._waiting.pop(work, None)
        if waiting is not None:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits there any more
                waiting.loop.call_soon_threadsafe(_resolve, waiting.done, error)

    def _end(self, message: str) -> None:
        self._describe(state="failed", message=message)
        with self._news:
            waiting = list(self._waiting)
        for work in waiting:
            self._settle(work, EngineUnavailable("the engine stopped working. Try again.", retry_after=2))
        if self._loaded is not None:
            self._loaded.set()

    def _report(self, stage: str, fraction: float, loaded_bytes: int = 0, total_bytes: int = 0) -> None:
        if self._is_closing:
            raise _Closed
        self._describe(stage=stage, fraction=fraction, loaded_bytes=loaded_bytes, total_bytes=total_bytes)

    def _report_flight(self, seconds_allowed: float | None) -> None:
        if self._on_step is not None:
            self._on_step(Flight(seconds_allowed=seconds_allowed, stream_ids=frozenset()))

    def _describe(self, **changes: object) -> None:
        self._description = replace(self._description, **changes)  # type: ignore[arg-type]

    # Under the lock

    def _note_waiting(self) -> None:
        self._stats = replace(self._stats, waiting=len(self._waiting), rows=len(self._queue))

    def _note_pass(self, inputs: Sequence[Sequence[int]], seconds: float, num_finished: int) -> None:
        num_tokens, before = sum(map(len, inputs)), self._stats
        self._stats = replace(
            before,
            steps=before.steps + 1,
            prompt_tokens=before.prompt_tokens + num_tokens,
            computed_tokens=before.computed_tokens + num_tokens,
            busy_seconds=before.busy_seconds + seconds,
            embedded_inputs=before.embedded_inputs + len(inputs),
            embedded_requests=before.embedded_requests + num_finished,
        )


def _encoded(embedder: Embedder, request: EmbedRequest) -> list[Sequence[int]]:
    """Return the ids of each input. Raises BadRequest for what the model does not take. On a tokenising thread."""
    places = [(f"input[{at}]", one) for at, one in enumerate(request.inputs, request.first)]
    texts = [one for _, one in places if isinstance(one, str)]
    for where, one in places:
        if isinstance(one, str):
            checked_bytes(one, where)
        elif not one or min(one) < 0 or max(one) >= embedder.vocab_size:
            message = f"{where}: ids of tokens of this model are 0 to {embedder.vocab_size - 1:,}, and one at least."
            raise BadRequest(message, code="invalid_value", param=where)
    encoded = iter(embedder.encode(texts))
    inputs: list[Sequence[int]] = [next(encoded) if isinstance(one, str) else one for _, one in places]
    for (where, _), ids in zip(places, inputs, strict=True):
        if len(ids) > embedder.max_model_len:
            most = embedder.max_model_len
            raise PromptTooLong(f"{where} has {len(ids):,} tokens; this model takes {most:,}. Cut it.", param=where)
        if not ids:
            raise BadRequest(f"{where} has no token.", code="invalid_value", param=where)
    return inputs


def _resolve(done: asyncio.Future[None], error: StreamserveError | None) -> None:
    if not done.done():
        done.set_result(None) if error is None else done.set_exception(error)
