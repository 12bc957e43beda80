"""`Embedders`: the embedding models of a site, and what bounds their use by one caller. asyncio; knows no HTTP.

A request waits while its model loads, and is asked again where its engine's process ended meanwhile: vectors are the
same each time. Who may use which model decides `Answers`, as for all models.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from streamserve.clients.base import EmbeddingClient, until_loaded
from streamserve.protocol.embeddings import Embedded, EmbedRequest
from streamserve.protocol.errors import EngineUnavailable, Overloaded, QuotaExceeded
from streamserve.protocol.limits import Limits
from streamserve.protocol.rates import Rates
from streamserve.protocol.requests import Admission
from streamserve.streams.store import ANONYMOUS, Group, groups_of

# A request whose engine's process ended so often while it was there may itself end it.
_MAX_LOSSES = 3
_LOOK_SECONDS = 0.1  # how often a request looks for the next engine


def _ignore(request: EmbedRequest, admission: Admission, num_tokens: int) -> None:
    """Note nothing."""


async def _allow(request: EmbedRequest, admission: Admission) -> Rates | None:
    """Refuse nothing."""
    return None


class Embedders:
    """Embeds for callers. One event loop.

    A caller may have as many requests at once, in this process, as streams; `wait_seconds`: how long a request waits
    for its model. `on_begin` is awaited with a request before it is computed, and may refuse it, or returns what is
    left of the caller's limits; `on_end` is called with a request that has its vectors, and the number of its tokens.
    """

    def __init__(
        self,
        clients: Mapping[str, EmbeddingClient],
        limits: Limits,
        *,
        wait_seconds: float,
        on_begin: Callable[[EmbedRequest, Admission], Awaitable[Rates | None]] = _allow,
        on_end: Callable[[EmbedRequest, Admission, int], None] = _ignore,
    ) -> None:
        self.clients = clients
        self._limits, self._wait_seconds = limits, wait_seconds
        self._on_begin, self._on_end = on_begin, on_end
        self._open: Counter[Group] = Counter()

    async def embed(self, request: EmbedRequest, admission: Admission) -> Embedded:
        """Return the vectors. Raises BadRequest, and Refused: the caller's limits, a full queue, no engine."""
        with self._place(request, admission):
            rates = await self._on_begin(request, admission)
            embedded = await self._embed(request, admission)
        self._on_end(request, admission, embedded.num_tokens)
        return replace(embedded, rates=rates)

    async def _embed(self, request: EmbedRequest, admission: Admission) -> Embedded:
        client, until, num_losses = self.clients[request.model], time.monotonic() + self._wait_seconds, 0
        while True:
            await until_loaded(client, until - time.monotonic())
            try:
                return await client.embed(request, admission)
            except EngineUnavailable as error:
                is_leaving = error.code == "engine_draining"  # the next engine follows
                num_losses += not is_leaving
                can_wait = is_leaving or client.describe().is_loading
                if num_losses >= _MAX_LOSSES or not can_wait or time.monotonic() >= until:
                    raise
            if is_leaving:
                await asyncio.sleep(_LOOK_SECONDS)

    @contextmanager
    def _place(self, request: EmbedRequest, admission: Admission) -> Iterator[None]:
        """Count a request in its caller's groups. Rows of batches are bounded by their worker."""
        groups = () if request.is_batch else groups_of(admission.place_of)
        for group in groups:
            most = self._limit_of(group)
            if most and self._open[group] >= most:
                raise _refusal(group, most)
        self._open.update(groups)
        try:
            yield
        finally:
            self._open.subtract(groups)
            for group in groups:
                if not self._open[group]:
                    del self._open[group]

    def _limit_of(self, group: Group) -> int:
        """Return how many requests a group may have at once; 0: no bound."""
        limits = self._limits
        if group == ANONYMOUS:
            return limits.max_streams_anonymous
        if group.is_prefix:
            return limits.max_streams_per_address
        return limits.max_streams_per_visitor if group.name in ANONYMOUS else limits.max_streams_per_principal


def _refusal(group: Group, most: int) -> QuotaExceeded | Overloaded:
    if group == ANONYMOUS:
        return Overloaded("Too many visitors ask for embeddings at once. Try again in a moment.")
    return QuotaExceeded(f"You have {most} requests for embeddings under way, as many as you may. Wait for one to end.")
