"""`RemoteClient`: a model that any OpenAI-compatible server runs: vLLM, SGLang, llama-server, a provider, or ours.

Each web process has one client for the model, with its own connections and its own bounds. The client asks the server's
`/models` when it starts, while it is used, and while it is failing; so a kept connection is open before the first
request, and a server that is down is known before a caller waits for it. Lives on one event loop; needs httpx.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from streamserve import __version__
from streamserve.clients.remote.answer import Answer
from streamserve.clients.remote.body import CUT, body_of, can_continue
from streamserve.clients.remote.config import AUTO, SERVERS, Dialect, RemoteConfig, read_key
from streamserve.clients.remote.errors import UpstreamBroken, UpstreamError, UpstreamLost, unavailable
from streamserve.clients.remote.exchange import Exchange, Found, probe
from streamserve.clients.remote.generation import RemoteGeneration
from streamserve.clients.remote.metrics import RemoteMetrics, Timings
from streamserve.clients.remote.places import Places
from streamserve.clients.remote.tokens import NoTokenizer, tokenize
from streamserve.protocol.engine import Accepted, EngineStats, ModelDescription, Park
from streamserve.protocol.errors import (
    BadRequest,
    CannotContinue,
    EngineUnavailable,
    Overloaded,
    Refused,
    StreamserveError,
    error_for,
)
from streamserve.protocol.events import TEXT, BlockText, Done, Error, Status, Usage
from streamserve.protocol.requests import GenerateRequest, ShownChoice, check_needs, check_sampling

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger("streamserve.remote")

# A server that has not answered by then may be computing the prompt: the answer begins, and waits where it is seen.
_ACCEPT_SECONDS = 1.0
# uvicorn and llama-server close a connection that is idle for 5 s.
_KEEPALIVE_SECONDS = 4.5
_BUSY_SECONDS = 60.0  # after a request, connections are kept warm for so long
_FAILED_POLL_SECONDS = 1.0
_MAX_COUNTING = 8  # requests that tokenise at once
_FAILED_RETRY_SECONDS = 2
_ELSEWHERE = "model {} runs on a server elsewhere, which is paused, resumed and drained there."


class RemoteClient:
    """An `EngineClient` for the model of `config`."""

    def __init__(self, config: RemoteConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.alias = config.alias
        self._config = replace(config, url=config.url.rstrip("/"))
        self._clock = clock
        self._server = config.server
        self._description = ModelDescription(
            alias=self.alias, state="idle", created=int(time.time()), has_chat_template=True, device="remote"
        )
        self._metrics = RemoteMetrics(clock)
        self._places = Places(config.max_concurrent, config.max_waiting)
        self._counting = asyncio.Semaphore(_MAX_COUNTING)
        self._num_running = 0
        self._http: httpx.AsyncClient | None = None
        self._polling: asyncio.Task[None] | None = None
        self._tasks: dict[asyncio.Task[None], RemoteGeneration] = {}
        self._is_probed, self._poll_now = asyncio.Event(), asyncio.Event()
        self._used_at = clock()
        self._is_closed = False

    async def generate(self, request: GenerateRequest) -> RemoteGeneration:
        """Accept the request or raise: BadRequest (the server refuses it), Refused (not now, or not any more)."""
        check_needs(request.needs)
        check_sampling(request.sampling)
        dialect = await self._require_server()
        self._refuse_continuing(request, dialect)
        route, body = body_of(request, self._config.model, self._server, dialect)
        sampling, n = request.sampling, request.n
        accepted = Accepted(
            num_prompt_tokens=0,
            max_tokens=sampling.max_tokens or 0,
            seed=sampling.seed or 0,
            queue_position=self._places.num_ahead(request.share_of),
            has_token_ids=False,
        )
        generation = RemoteGeneration(
            accepted,
            Answer(n, request.shown),
            continues=not request.replay and can_continue(request, _TEXT_SO_FAR, dialect),
            lead_tokens=self._config.lead_tokens,
            reader_tokens=request.reader_tokens,
        )
        if body.get("max_tokens", 1) < 1:  # all of it was shown before the connection was lost
            generation.put([Done(finish_reason="length", usage=Usage(completion_tokens=generation.answer.num_tokens))])
            return generation
        if not request.was_admitted:
            self._places.check_room(request.share_of)
        self._metrics.counts.continued += any(choice.num_tokens for choice in request.shown)
        return await self._begin(generation, partial(self._serve, request.share_of, generation, route, body))

    async def tokenize(self, request: GenerateRequest) -> tuple[int, ...]:
        """Return the prompt's ids as the server has them. Raises BadRequest where it has no route for that."""
        await self._require_server()
        assert self._http is not None
        self._used_at = self._clock()
        try:
            async with self._counting:
                return await tokenize(self._http, self._config, self._server, request)
        except NoTokenizer as reason:
            logger.debug("model %s: its server counts no tokens: %s", self.alias, reason)
            raise BadRequest(
                f"model {self.alias} runs on a server elsewhere, which has the tokenizer and does not count for us.",
                code="unsupported_parameter",
            ) from reason
        except UpstreamLost as reason:
            logger.warning("model %s: %s", self.alias, reason)
            self._poll_now.set()
            raise unavailable(self.alias, retry_after=_FAILED_RETRY_SECONDS) from reason

    async def warm(self, request: GenerateRequest) -> None:
        """Have the server prefill the prompt into its prefix cache, by an answer of one token."""
        sampling = replace(request.sampling, max_tokens=1, min_tokens=0)
        unset = tuple(name for name in request.unset if name != "max_tokens")
        generation = await self.generate(
            replace(request, sampling=sampling, unset=unset, n=1, output_token_ids=(), shown=(), reader_tokens=None)
        )
        try:
            async for event in generation:
                if isinstance(event, Error):
                    raise error_for(event.code, event.message, retryable=event.retryable)
        finally:
            generation.cancel()

    async def control(self, action: str) -> None:
        """Raise BadRequest: other sites may use the server too."""
        raise BadRequest(_ELSEWHERE.format(self.alias), code="unsupported_parameter", param="action")

    def start(self) -> None:
        """Begin to ask the server for its state, once; returns at once. On the event loop."""
        if self._polling is None and not self._is_closed:
            self._http = self._connections()
            self._describe("loading", stage="connecting")
            self._polling = asyncio.get_running_loop().create_task(self._poll(), context=Context())

    def describe(self) -> ModelDescription:
        """Return what is known of the model and its server. Never blocks."""
        return self._description

    def stats(self) -> EngineStats:
        """Return this process's counts. Never blocks."""
        metrics, config = self._metrics, self._config
        return EngineStats(
            running=self._num_running,
            waiting=self._places.num_waiting,
            prompt_tokens=metrics.prompt_tokens,
            generation_tokens=metrics.generation_tokens,
            parks=metrics.num_parks,
            tokens_per_second=metrics.tokens_per_second(),
            latency=metrics.latency(),
            upstream={
                **asdict(metrics.counts),
                "max_concurrent": config.max_concurrent,
                "max_waiting": config.max_waiting,
            },
        )

    async def aclose(self) -> None:
        """End every generation with an `error` event and close the connections."""
        self._is_closed = True
        for generation in self._tasks.values():
            generation.fail("engine_closed", "the engine was shut down. Try again.")
        tasks = [*self._tasks, *([self._polling] if self._polling is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._http is not None:
            await self._http.aclose()
        self._describe("failed", message="the client was closed.")

    # One request

    async def _begin(
        self, generation: RemoteGeneration, serve: Callable[[asyncio.Future[None]], Any]
    ) -> RemoteGeneration:
        """Start the request's task; return when the server has accepted, or may take longer. Raises its refusal."""
        self._used_at = self._clock()
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        is_queued = not self._places.num_free
        task = asyncio.get_running_loop().create_task(serve(opened), context=Context())
        generation.task = task
        self._tasks[task] = generation
        task.add_done_callback(self._tasks.pop)
        try:
            if not is_queued:
                await asyncio.wait([opened], timeout=_ACCEPT_SECONDS)
        except asyncio.CancelledError:
            generation.cancel()
            raise
        if not opened.done():
            opened.cancel()  # what happens from now on is an event
        elif (error := opened.exception()) is not None:
            raise error
        return generation

    async def _serve(
        self, tenant: str, generation: RemoteGeneration, route: str, body: dict[str, Any], opened: asyncio.Future[None]
    ) -> None:
        """Wait for a place, exchange, and turn whatever goes wrong into an end."""
        timings = Timings(self._clock)
        was_queued = not self._places.num_free
        try:
            if was_queued:
                generation.put([Status(status="queued", step=self._places.num_ahead(tenant) + 1)])
            await self._take_place(tenant)
            self._num_running += 1
            try:
                assert self._http is not None
                exchange = Exchange(
                    self._http, self._config, generation, self._metrics, timings, partial(_settle, opened)
                )
                await exchange.run(route, body, was_queued=was_queued)
            finally:
                self._num_running -= 1
                self._places.release()
        except UpstreamLost as reason:
            self._lose(generation, opened, str(reason))
        except StreamserveError as error:
            self._refuse(generation, opened, error)
        except (UpstreamBroken, UpstreamError) as reason:
            logger.error("model %s: its server sent %s", self.alias, reason)
            message = "the model's server could not finish this answer. Try again."
            self._refuse(generation, opened, EngineUnavailable(message, code="upstream_error"))
        except Exception:  # the edge of the task
            logger.exception("model %s: a request failed", self.alias)
            message = "the server failed while answering. It has been logged."
            self._refuse(generation, opened, StreamserveError(message))

    async def _take_place(self, tenant: str) -> None:
        """Wait for one of the `max_concurrent` places."""
        try:
            await self._places.take(tenant, self._config.queue_seconds)
        except TimeoutError as late:
            raise Overloaded(
                f"model {self.alias} was too busy to begin this request in time. Try again later.",
                code="queue_timeout",
                retry_after=5,
            ) from late

    def _lose(self, generation: RemoteGeneration, opened: asyncio.Future[None], reason: str) -> None:
        """End a generation whose connection was lost: as parked, where the server can continue it."""
        logger.warning("model %s: %s", self.alias, reason)
        self._metrics.counts.lost += 1
        self._poll_now.set()
        if not opened.done():
            opened.set_exception(unavailable(self.alias, retry_after=_FAILED_RETRY_SECONDS))
        elif generation.can_park:
            generation.park(Park(reason="lost"))
        else:
            generation.fail("cannot_continue", CUT)

    def _refuse(self, generation: RemoteGeneration, opened: asyncio.Future[None], error: StreamserveError) -> None:
        """Raise the error where the request was sent from, or end the answer with it."""
        if not opened.done():
            opened.set_exception(error)
        else:
            generation.fail(error.code, error.message, retryable=isinstance(error, Refused))

    def _refuse_continuing(self, request: GenerateRequest, dialect: Dialect) -> None:
        """Raise CannotContinue for an answer that this server would not continue where it is.

        Nor for one whose text is to come again first (`replay`): what readers were shown is not what the model said.
        """
        if any(request.output_token_ids):  # by an engine that this site had before
            raise CannotContinue(CUT)
        has_more = [choice for choice in request.shown if any(block.text for block in choice.blocks)]
        is_alone = len(request.shown) == 1 and not request.replay
        if has_more and not (is_alone and can_continue(request, has_more[0], dialect)):
            raise CannotContinue(CUT)

    # The server

    def _connections(self) -> httpx.AsyncClient:
        """Return the pool. No proxy, key file or certificate comes from the environment."""
        import httpx

        config, key = self._config, read_key(self._config)
        verify = ssl.create_default_context(cafile=config.ca_file) if config.ca_file else True
        return httpx.AsyncClient(
            headers={
                **({"Authorization": f"Bearer {key}"} if key else {}),
                "Accept-Encoding": "identity",
                "User-Agent": f"streamserve/{__version__}",
            },
            limits=httpx.Limits(
                max_connections=None,  # `max_concurrent` bounds the requests
                max_keepalive_connections=config.max_concurrent,
                keepalive_expiry=_KEEPALIVE_SECONDS,
            ),
            timeout=httpx.Timeout(None, connect=config.connect_seconds),
            follow_redirects=False,
            trust_env=False,
            verify=verify,
        )

    async def _poll(self) -> None:
        """Ask the server for its state, for as long as this client lives."""
        assert self._http is not None
        while True:
            try:
                self._take(await probe(self._http, self._config))
            except UpstreamLost as reason:
                self._fail(str(reason))
            except Exception:  # the edge of the task
                logger.exception("model %s: its server's state could not be read", self.alias)
                self._fail("the server's state could not be read")
            self._is_probed.set()
            self._poll_now.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause()):
                    await self._poll_now.wait()

    def _pause(self) -> float:
        if self._description.state == "failed":
            return _FAILED_POLL_SECONDS
        is_busy = self._clock() - self._used_at < _BUSY_SECONDS
        return min(self._config.poll_seconds, 0.8 * _KEEPALIVE_SECONDS) if is_busy else self._config.poll_seconds

    def _take(self, found: Found) -> None:
        """Note what the server says of itself."""
        if self._config.server == AUTO:
            self._server = found.server
        if self._description.state != "ready":
            logger.info("model %s: its server (%s) is ready", self.alias, self._server)
        self._description = replace(
            self._description, max_model_len=found.max_model_len, was_ready=True, dtype=self._server
        )
        self._describe("ready", message=found.warning)

    def _fail(self, reason: str) -> None:
        if self._description.state != "failed":
            logger.error("model %s: its server cannot be used: %s", self.alias, reason)
        self._describe("failed", stage="waiting", message=reason)

    def _describe(self, state: str, *, stage: str = "", message: str = "") -> None:
        self._description = replace(self._description, state=state, stage=stage, message=message)

    async def _require_server(self) -> Dialect:
        """Return what the server takes, once it is known; refuse while it cannot be used."""
        if self._is_closed:
            raise unavailable(self.alias)
        self.start()
        if not self._is_probed.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(2 * self._config.connect_seconds):
                    await self._is_probed.wait()
        if self._description.state != "ready":
            raise unavailable(self.alias, retry_after=_FAILED_RETRY_SECONDS)
        return SERVERS[self._server]


_TEXT_SO_FAR = ShownChoice(blocks=(BlockText(index=0, kind=TEXT, text="…", is_open=True),), num_tokens=1)


def _settle(opened: asyncio.Future[None]) -> None:
    if not opened.done():
        opened.set_result(None)
