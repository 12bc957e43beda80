"""`LocalSite`: the engines, streams and quota that the ASGI app serves on one event loop. asyncio.

Streams belong to this process: no other can read or resume them, whatever their log. Without a database there is no
stored text and there are no watchers.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from streamserve.api.call import Caller, Found
from streamserve.api.idempotency import StartOnce
from streamserve.clients.base import EngineClient
from streamserve.dialects.openai.chat import REASONING_FIELDS
from streamserve.protocol.errors import no_stream
from streamserve.protocol.requests import LATENCY_CLASSES, ROUTES_WITH_CLASSES, GenerateRequest, Limits, with_system
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import EventLog
from streamserve.streams.quota import Places
from streamserve.streams.registry import Streams
from streamserve.streams.store import Admission, Once
from streamserve.streams.stream import Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What requests get that do not bring it.

    `systems`: alias → system prompt of every chat whose caller sends none; it is computed once for all callers.
    `latency_classes`: alias → class. `route_classes`: route → class, which goes before the model's. Raises ValueError.
    """

    systems: Mapping[str, str] = field(default_factory=dict)
    latency_classes: Mapping[str, str] = field(default_factory=dict)
    route_classes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = self.route_classes.keys() - set(ROUTES_WITH_CLASSES)
        if unknown:
            raise ValueError(f"route_classes has {min(unknown)!r}; routes are {', '.join(ROUTES_WITH_CLASSES)}")
        unknown = {*self.latency_classes.values(), *self.route_classes.values()} - set(LATENCY_CLASSES)
        if unknown:
            raise ValueError(f"{min(unknown)!r} is no latency class; they are {', '.join(LATENCY_CLASSES)}")

    def check_models(self, models: Collection[str]) -> None:
        """Raise ValueError for an alias that is not in `models`."""
        unknown = (self.systems.keys() | self.latency_classes.keys()) - set(models)
        if unknown:
            raise ValueError(f"defaults name the model {min(unknown)!r}; models are {', '.join(models)}")


class LocalSite:
    """A `Site`. Made on the loop that serves."""

    is_debug = False
    unseal = None  # no chat element
    stored_chats = None

    def __init__(
        self,
        clients: Mapping[str, EngineClient],
        log: EventLog,
        settings: StreamConfig,
        limits: Limits,
        default_model: str,
        patience: Mapping[str, float],
        *,
        takes_prompt_in_url: bool = False,
        reasoning_field: str = REASONING_FIELDS[0],
        defaults: Defaults = Defaults(),
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.clients, self.limits, self.default_model = clients, limits, default_model
        self.takes_prompt_in_url, self.reasoning_field = takes_prompt_in_url, reasoning_field
        self.is_draining = False
        self._defaults = defaults
        self.streams = Streams(clients, log, settings, limits=limits, patience=patience)
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
        begins_unloaded: bool = False,
        places: Places | None = None,
    ) -> Stream:
        """Start an answer for `caller`, within its limits. Raises StreamserveError."""
        # The tenant's prefix-cache salt: blocks of two tenants never match, and a salt cannot be guessed.
        salt = hmac.new(self._secret, caller.tenant.encode(), hashlib.sha256).hexdigest()
        admission = Admission(
            owner=caller.owner,
            tenant=caller.tenant,
            counted_as=caller.counted_as,
            salt=salt,
            on_disconnect=on_disconnect,
            received_at=received_at,
            once=once,
            begins_unloaded=begins_unloaded,
        )
        if request.model in self.clients:
            self.clients[request.model].start()
        start = self.streams.start if once is None else self._start_once
        return await start(self.with_own_system(request), admission, places)

    def default_class(self, route: str, model: str) -> str:
        """Return the latency class of requests that name none: the route's, the model's, or that of chats."""
        defaults = self._defaults
        return defaults.route_classes.get(route) or defaults.latency_classes.get(model) or LATENCY_CLASSES[0]

    async def find(self, caller: Caller, *, stream_id: str = "", log_id: str = "") -> Found:
        """Return the stream. Raises NotFound for an unknown id, and for a stream of another tenant."""
        stream = self.streams.find(stream_id) if stream_id else self.streams.find_log(log_id)
        if stream is None and self.streams.is_expired(stream_id or log_id):
            return Found(stream=None)
        if stream is None or stream.tenant != caller.tenant:
            raise no_stream()
        return Found(stream=stream)

    def with_own_system(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request with the system prompt of its model, unless it brings one."""
        return with_system(request, self._defaults.systems.get(request.model, ""))

    async def health(self) -> Mapping[str, Any]:
        """Return no further fields for `/readyz`."""
        return {}

    async def work(self) -> Mapping[str, Mapping[str, int]]:
        """Return nothing: without a database no work is durable."""
        return {}

    async def aclose(self) -> None:
        """End every stream, and close engines and log."""
        await self.streams.aclose()
        for client in self.clients.values():
            await client.aclose()
        await self.streams.log.aclose()
