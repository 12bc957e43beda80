"""`LocalSite`: what the ASGI app serves with on one event loop: engines, log and streams, and services. asyncio.

Streams belong to this process: no other can read or resume them, whatever their log. Without a database there is no
stored text, there are no watchers, and no work is durable.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Mapping

from streamserve.api.answers import AnswerConfig, Answers
from streamserve.api.embedders import Embedders
from streamserve.api.openai.responses import LocalResponses
from streamserve.api.ops import Ops
from streamserve.api.threads import MemoryThreads
from streamserve.clients.base import EmbeddingClient, EngineClient
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import EventLog
from streamserve.streams.registry import Streams
from streamserve.streams.store import NullStore


class LocalSite:
    """Engine clients, log and streams of one event loop, and `services`, which routes are given. Made on that loop."""

    def __init__(
        self,
        clients: Mapping[str, EngineClient],
        log: EventLog,
        settings: StreamConfig,
        patience: Mapping[str, float],
        config: AnswerConfig,
        embedding: Mapping[str, EmbeddingClient] = {},
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.clients = clients
        store = NullStore()
        self.streams = Streams(clients, log, settings, store=store, limits=config.limits, patience=patience)
        embedders = Embedders(embedding, config.limits, wait_seconds=settings.engine_wait_seconds)
        self.answers = Answers(self.streams, config, salt_of=self._salt_of, embedders=embedders)
        self.ops = Ops(clients, self.streams, embedders=embedding)
        self.services: Mapping[str, object] = {
            "answers": self.answers,
            "ops": self.ops,
            "threads": MemoryThreads(store),
            "responses": LocalResponses(self.streams),
        }
        self._secret = secrets.token_bytes(32)

    def _salt_of(self, tenant: str) -> str:
        return hmac.new(self._secret, tenant.encode(), hashlib.sha256).hexdigest()

    def start_loading(self) -> None:
        """Start loading every model that is not loading yet; return at once."""
        for client in self.ops.all.values():
            client.start()

    def begin_to_drain(self) -> None:
        """Fail the probes, and refuse what waits for a place."""
        self.ops.is_draining = True
        self.streams.begin_to_drain()

    async def aclose(self) -> None:
        """End every stream, and close engines and log."""
        await self.streams.aclose()
        for client in self.ops.all.values():
            await client.aclose()
        await self.streams.log.aclose()
