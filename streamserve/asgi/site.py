"""`Service`: what the framework-free app serves with on one event loop: engines, streams, places. asyncio.

Streams are this process's own: no other can read or go on with them, whatever their log.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import secrets
from collections.abc import Mapping

from streamserve.api.resume import gone
from streamserve.asgi.callers import Caller
from streamserve.clients.base import EngineClient
from streamserve.protocol.errors import NotFound
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import GenerateRequest
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import EventLog
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream


class Service:
    """Made on the loop that serves; `aclose` ends every stream, and closes engines and log."""

    def __init__(
        self, clients: Mapping[str, EngineClient], log: EventLog, settings: StreamConfig, limits: Limits
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.clients, self.limits = clients, limits
        self.streams = Streams(clients, log, settings, limits=limits)
        self._secret = secrets.token_bytes(32)

    def start_loading(self) -> None:
        """Begin loading every model that has not begun; returns at once."""
        for client in self.clients.values():
            client.start()

    async def start_stream(self, caller: Caller, request: GenerateRequest, on_disconnect: str) -> Stream:
        """Start an answer for `caller`, within its limits. Raises what the client is told."""
        request = dataclasses.replace(request, salt=self._salt_of(caller.tenant))
        if request.model in self.clients:
            self.clients[request.model].start()
        return await self.streams.start(request, owner=caller.owner, tenant=caller.tenant, on_disconnect=on_disconnect)

    def find(self, caller: Caller, stream_id: str) -> Stream:
        """Return the stream; another tenant's is as unknown as one that never was. Raises NotFound, Gone."""
        stream = self.streams.find(stream_id)
        if stream is None and self.streams.is_expired(stream_id):
            raise gone()
        if stream is None or stream.tenant != caller.tenant:
            raise NotFound("There is no stream of that id.", code="stream_not_found")
        return stream

    def find_log(self, caller: Caller, log_id: str) -> Stream | None:
        """Return the stream whose events carry that log id, if `caller` may read it."""
        stream = self.streams.find_log(log_id)
        return stream if stream is not None and stream.tenant == caller.tenant else None

    async def aclose(self) -> None:
        """End everything."""
        await self.streams.aclose()
        for client in self.clients.values():
            await client.aclose()
        await self.streams.log.aclose()

    def _salt_of(self, tenant: str) -> str:
        """Return the tenant's prefix-cache salt: blocks of two tenants never match, and nobody can guess a salt."""
        return hmac.new(self._secret, tenant.encode(), hashlib.sha256).hexdigest()
