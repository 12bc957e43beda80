"""`RemoteClient`: a model that any OpenAI-compatible server runs: vLLM, SGLang, llama-server, a provider, or ours.

Each web process has one client for the model, with its own connections and its own bounds (`RemoteServer`). A request
becomes a route and a body (body.py), and an `HTTPSource` reads the answer. Lives on one event loop; needs httpx.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace

from streamserve.clients.base import Generation
from streamserve.clients.remote.body import CUT, body_of, can_continue, check_parts
from streamserve.clients.remote.chunks import ChunkParser
from streamserve.clients.remote.config import Dialect, RemoteConfig
from streamserve.clients.remote.errors import UpstreamLost, unavailable
from streamserve.clients.remote.server import FAILED_RETRY_SECONDS, RemoteServer
from streamserve.clients.remote.source import HTTPSource
from streamserve.clients.remote.tokens import NoTokenizer, tokenize
from streamserve.protocol.engine import Accepted, EngineStats, ModelDescription
from streamserve.protocol.errors import BadRequest, CannotContinue, error_for
from streamserve.protocol.events import TEXT, BlockText, Done, Error, Usage
from streamserve.protocol.requests import (
    NO_CALLER,
    START,
    Admission,
    GenerateRequest,
    Resume,
    ShownChoice,
    check_needs,
    check_sampling,
)
from streamserve.protocol.spelling import Spell, Spelled

logger = logging.getLogger("streamserve.remote")

_MAX_COUNTING = 8  # requests that tokenise at once
_ELSEWHERE = "model {} runs on a server elsewhere, which is paused, resumed and drained there."
_TEXT_SO_FAR = ShownChoice(blocks=(BlockText(index=0, kind=TEXT, text="…", is_open=True),), num_tokens=1)


class RemoteClient:
    """An `EngineClient` for the model of `config`."""

    def __init__(self, config: RemoteConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.alias = config.alias
        self._config = replace(config, url=config.url.rstrip("/"))
        self._server = RemoteServer(self._config, clock)
        self._counting = asyncio.Semaphore(_MAX_COUNTING)
        self._sources: dict[asyncio.Task[None], HTTPSource] = {}

    async def generate(
        self, request: GenerateRequest, admission: Admission = NO_CALLER, resume: Resume = START
    ) -> Generation:
        """Accept the request or raise: BadRequest (the server refuses it), Refused (not now, or not any more)."""
        check_needs(request.needs)
        check_sampling(request.sampling)
        check_parts(request, self._config)
        server = self._server
        dialect = await server.require()
        self._refuse_continuing(request, resume, dialect)
        route, body = body_of(request, resume, self._config.model, server.kind, dialect)
        sampling = request.sampling
        accepted = Accepted(
            num_prompt_tokens=0,
            max_tokens=sampling.max_tokens or 0,
            seed=sampling.seed or 0,
            queue_position=server.places.num_ahead(admission.share_of),
            has_token_ids=False,
        )
        source = HTTPSource(
            accepted,
            ChunkParser(request.n, resume.shown),
            server,
            tenant=admission.share_of,
            continues=not resume.replay and can_continue(request, _TEXT_SO_FAR, dialect),
            reader_tokens=resume.reader_tokens,
            trace=admission.trace,
        )
        if body.get("max_tokens", 1) < 1:  # all of it was shown before the connection was lost
            usage = Usage(completion_tokens=source.answer.num_tokens)
            source.generation.put([Done(finish_reason="length", usage=usage)])
            return source.generation
        if not resume.was_admitted:
            server.places.check_room(admission.share_of)
        server.metrics.counts.continued += any(choice.num_tokens for choice in resume.shown)
        server.note_use()
        task = source.start(route, body)
        self._sources[task] = source
        task.add_done_callback(self._sources.pop)
        await source.opened()
        return source.generation

    async def tokenize(self, request: GenerateRequest, admission: Admission = NO_CALLER) -> tuple[int, ...]:
        """Return the prompt's ids as the server has them. Raises BadRequest where it has no route for that."""
        check_parts(request, self._config)
        await self._server.require()
        self._server.note_use()
        try:
            async with self._counting:
                return await tokenize(self._server.http, self._config, self._server.kind, request)
        except NoTokenizer as reason:
            logger.debug("model %s: its server counts no tokens: %s", self.alias, reason)
            raise BadRequest(
                f"model {self.alias} runs on a server elsewhere, which has the tokenizer and does not count for us.",
                code="unsupported_parameter",
            ) from reason
        except UpstreamLost as reason:
            self._server.note_loss(str(reason))
            raise unavailable(self.alias, retry_after=FAILED_RETRY_SECONDS) from reason

    async def spell(self, asked: Spell) -> Spelled:
        """Refuse: the server has the tokenizer."""
        message = f"model {self.alias} runs on a server elsewhere, which has the tokenizer. Ask that server."
        raise BadRequest(message, code="unsupported_parameter")

    async def warm(self, request: GenerateRequest, admission: Admission = NO_CALLER) -> None:
        """Have the server prefill the prompt into its prefix cache, by an answer of one token."""
        sampling = replace(request.sampling, max_tokens=1, min_tokens=0)
        unset = tuple(name for name in request.unset if name != "max_tokens")
        generation = await self.generate(replace(request, sampling=sampling, unset=unset, n=1), admission)
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
        self._server.start()

    def describe(self) -> ModelDescription:
        """Return what is known of the model and its server. Never blocks."""
        return self._server.description

    def stats(self) -> EngineStats:
        """Return this process's counts. Never blocks."""
        metrics, places, config = self._server.metrics, self._server.places, self._config
        return EngineStats(
            running=places.num_taken,
            waiting=places.num_waiting,
            prompt_tokens=metrics.prompt_tokens,
            generation_tokens=metrics.generation_tokens,
            parks=metrics.num_parks,
            tokens_per_second=metrics.times.tokens_per_second(),
            latency=metrics.times.latency(),
            upstream={
                **asdict(metrics.counts),
                "max_concurrent": config.max_concurrent,
                "max_waiting": config.max_waiting,
            },
        )

    async def aclose(self) -> None:
        """End every generation with an `error` event and close the connections."""
        self._server.close()
        sources = [*self._sources.values()]
        for source in sources:
            source.fail("engine_closed", "the engine was shut down. Try again.")
            source.cancel()
        await asyncio.gather(*self._sources, return_exceptions=True)
        await self._server.aclose()

    def _refuse_continuing(self, request: GenerateRequest, resume: Resume, dialect: Dialect) -> None:
        """Raise CannotContinue for an answer that this server would not continue where it is.

        Nor for an answer whose text comes again first (`replay`): what readers were shown is not the model's own text.
        """
        if resume.has_tokens:  # by an engine that this site had before
            raise CannotContinue(CUT)
        has_more = [choice for choice in resume.shown if any(block.text for block in choice.blocks)]
        is_alone = len(resume.shown) == 1 and not resume.replay
        if has_more and not (is_alone and can_continue(request, has_more[0], dialect)):
            raise CannotContinue(CUT)
