"""`RemoteClient`: a model that OpenAI-compatible servers run: vLLM, SGLang, llama-server, a provider, or ours.

Each web process has one client for the model, with its own connections and its own bounds (`Upstreams`). An
`HTTPSource` sends a request to one of the upstreams (body.py) and reads the answer. Lives on one event loop; needs
httpx.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from streamserve.clients.base import Generation
from streamserve.clients.remote.body import CUT, can_continue, check_parts, refuse_unsupported
from streamserve.clients.remote.config import RemoteConfig
from streamserve.clients.remote.errors import UpstreamLost, unavailable
from streamserve.clients.remote.server import RemoteServer
from streamserve.clients.remote.source import HTTPSource
from streamserve.clients.remote.tokens import NoTokenizer, tokenize
from streamserve.clients.remote.upstreams import FAILED_RETRY_SECONDS, Route, Upstreams, affinity_of
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
        self._config = config
        self._upstreams = Upstreams(config, clock)
        self._counting = asyncio.Semaphore(_MAX_COUNTING)
        self._sources: dict[asyncio.Task[None], HTTPSource] = {}

    async def generate(
        self, request: GenerateRequest, admission: Admission = NO_CALLER, resume: Resume = START
    ) -> Generation:
        """Accept the request or raise: BadRequest (the server refuses it), Refused (not now, or not any more)."""
        check_needs(request.needs)
        check_sampling(request.sampling)
        check_parts(request, self._config)
        upstreams = self._upstreams
        await upstreams.require()
        for kind, dialect in upstreams.dialects.items():
            refuse_unsupported(request, kind, dialect)
        shown = self._to_continue(request, resume)
        sampling, tenant = request.sampling, admission.share_of
        accepted = Accepted(
            num_prompt_tokens=0,
            max_tokens=sampling.max_tokens or 0,
            seed=sampling.seed or 0,
            queue_position=upstreams.places.num_ahead(tenant),
            has_token_ids=False,
        )
        route = Route(tenant=tenant, affinity=affinity_of(request, admission), request=request, shown=shown)
        continues = not resume.replay and self._can_continue(request, _TEXT_SO_FAR)
        source = HTTPSource(accepted, upstreams, route, resume, continues=continues, trace=admission.trace)
        num_shown = sum(choice.num_tokens for choice in resume.shown)
        if "max_tokens" not in request.unset and sampling.max_tokens is not None and sampling.max_tokens <= num_shown:
            # All of it was shown before the connection was lost.
            source.generation.put([Done(finish_reason="length", usage=Usage(completion_tokens=num_shown))])
            return source.generation
        if not resume.was_admitted:
            upstreams.check_room(tenant)
        task = source.start()
        self._sources[task] = source
        task.add_done_callback(self._sources.pop)
        await source.opened()
        return source.generation

    async def tokenize(self, request: GenerateRequest, admission: Admission = NO_CALLER) -> tuple[int, ...]:
        """Return the prompt's ids as the server has them. Raises BadRequest where it has no route for that."""
        check_parts(request, self._config)
        await self._upstreams.require()
        reason: Exception | None = None
        for server in self._upstreams.servers:
            if not server.is_ready:
                continue
            server.note_use()
            try:
                async with self._counting:
                    return await tokenize(server.http, server.config, server.kind, request)
            except NoTokenizer as error:
                logger.debug("model %s: %s counts no tokens: %s", self.alias, server.name, error)
                reason = reason or error
            except UpstreamLost as error:
                server.note_loss(str(error))
                reason = error
        if isinstance(reason, NoTokenizer):
            raise BadRequest(
                f"model {self.alias} runs on a server elsewhere, which has the tokenizer and does not count for us.",
                code="unsupported_parameter",
            ) from reason
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
        """Begin to ask the upstreams for their state, once; returns at once. On the event loop."""
        self._upstreams.start()

    def wake(self) -> None:
        """Do `start`."""
        self.start()

    def describe(self) -> ModelDescription:
        """Return what is known of the model and its upstreams. Never blocks."""
        return self._upstreams.describe()

    @property
    def servers(self) -> tuple[RemoteServer, ...]:
        """The model's upstreams."""
        return self._upstreams.servers

    def stats(self) -> EngineStats:
        """Return this process's counts. Never blocks."""
        upstreams, metrics = self._upstreams, self._upstreams.metrics
        return EngineStats(
            running=upstreams.num_running,
            waiting=upstreams.places.num_waiting,
            prompt_tokens=metrics.prompt_tokens,
            generation_tokens=metrics.generation_tokens,
            parks=metrics.num_parks,
            tokens_per_second=metrics.times.tokens_per_second(),
            latency=metrics.times.latency(),
            upstreams=upstreams.counts(),
        )

    async def aclose(self) -> None:
        """End every generation with an `error` event and close the connections."""
        self._upstreams.close()
        sources = [*self._sources.values()]
        for source in sources:
            source.fail("engine_closed", "the engine was shut down. Try again.")
            source.cancel()
        await asyncio.gather(*self._sources, return_exceptions=True)
        await self._upstreams.aclose()

    def _to_continue(self, request: GenerateRequest, resume: Resume) -> ShownChoice | None:
        """Return the part of the answer that an upstream is to continue. Raises CannotContinue where none would.

        Nor an answer whose text comes again first (`replay`): what readers were shown is not the model's own text.
        """
        if resume.has_tokens:  # by an engine that this site had before
            raise CannotContinue(CUT)
        has_more = [choice for choice in resume.shown if any(block.text for block in choice.blocks)]
        if not has_more:
            return None
        if len(resume.shown) > 1 or resume.replay or not self._can_continue(request, has_more[0]):
            raise CannotContinue(CUT)
        return has_more[0]

    def _can_continue(self, request: GenerateRequest, shown: ShownChoice) -> bool:
        return any(can_continue(request, shown, dialect) for dialect in self._upstreams.dialects.values())
