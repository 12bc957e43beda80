"""`LocalSite`: the engines, streams and quota that the ASGI app serves on one event loop. asyncio.

Streams belong to this process: no other can read or resume them, whatever their log. Without a database there is no
stored text and there are no watchers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any

from streamserve.api.call import Caller, Found
from streamserve.api.idempotency import StartOnce
from streamserve.clients.base import EngineClient
from streamserve.dialects.openai_chat import REASONING_FIELDS
from streamserve.protocol.errors import no_stream
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import LATENCY_CLASSES, GenerateRequest
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import EventLog
from streamserve.streams.registry import Streams
from streamserve.streams.store import Once
from streamserve.streams.stream import Stream


class LocalSite:
    """A `Site`. Made on the loop that serves."""

    is_debug = False
    unseal = None  # no chat element

    def __init__(
        self,
        clients: Mapping[str, EngineClient],
        log: EventLog,
        settings: StreamConfig,
        limits: Limits,
        default_model: str,
        *,
        takes_prompt_in_url: bool = False,
        reasoning_field: str = REASONING_FIELDS[0],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.clients, self.limits, self.default_model = clients, limits, default_model
        self.takes_prompt_in_url, self.reasoning_field = takes_prompt_in_url, reasoning_field
        self.is_draining = False
        self.streams = Streams(clients, log, settings, limits=limits)
        self._start_once = StartOnce(self.streams)
        self._secret = secrets.token_bytes(32)

    def start_loading(self) -> None:
        """Start loading every model that is not loading yet; return at once."""
        for client in self.clients.values():
            client.start()

    async def start(
        self,
        caller: Caller,
        request: GenerateRequest,
        on_disconnect: str = "park",
        *,
        received_at: float | None = None,
        once: Once | None = None,
    ) -> Stream:
        """Start an answer for `caller`, within its limits. Raises StreamserveError."""
        # The tenant's prefix-cache salt: blocks of two tenants never match, and a salt cannot be guessed.
        salt = hmac.new(self._secret, caller.tenant.encode(), hashlib.sha256).hexdigest()
        request = dataclasses.replace(request, salt=salt)
        if request.model in self.clients:
            self.clients[request.model].start()
        start = partial(
            self.streams.start,
            request,
            owner=caller.owner,
            tenant=caller.tenant,
            on_disconnect=on_disconnect,
            received_at=received_at,
            once=once,
        )
        return await self._start_once(once, start)

    def default_class(self, route: str, model: str) -> str:
        """Return the class of chats: an app without settings has no other default."""
        return LATENCY_CLASSES[0]

    async def find(self, caller: Caller, *, stream_id: str = "", log_id: str = "") -> Found:
        """Return the stream. Raises NotFound for an unknown id, and for a stream of another tenant."""
        stream = self.streams.find(stream_id) if stream_id else self.streams.find_log(log_id)
        if stream is None and self.streams.is_expired(stream_id or log_id):
            return Found(stream=None)
        if stream is None or stream.tenant != caller.tenant:
            raise no_stream()
        return Found(stream=stream)

    def with_own_system(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request: an app without settings has no system prompt of its own."""
        return request

    def health(self) -> Mapping[str, Any]:
        """Return no further fields for `/readyz`."""
        return {}

    async def aclose(self) -> None:
        """End every stream, and close engines and log."""
        await self.streams.aclose()
        for client in self.clients.values():
            await client.aclose()
        await self.streams.log.aclose()
