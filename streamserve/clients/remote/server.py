"""`RemoteServer`: a server elsewhere as this process uses it: its connections, its places, its counts and its state.

The server is asked for its `/models` when it is first needed, while it is used, and while it is failing: is it there,
what software is it, does it have the model, how long a context. So a kept connection is open before the first request,
and a server that is down is known before a caller waits for it. Knows no request. Lives on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from streamserve import __version__
from streamserve.clients.remote.config import AUTO, OWNERS, SERVERS, Dialect, RemoteConfig, read_key
from streamserve.clients.remote.errors import UpstreamLost, clean, unavailable
from streamserve.clients.remote.metrics import RemoteMetrics
from streamserve.clients.remote.places import Places
from streamserve.protocol.engine import ModelDescription

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger("streamserve.remote")

# uvicorn and llama-server close a connection that is idle for 5 s.
_KEEPALIVE_SECONDS = 4.5
_BUSY_SECONDS = 60.0  # after a request, connections are kept warm for so long
_FAILED_POLL_SECONDS = 1.0
FAILED_RETRY_SECONDS = 2
_LENGTHS = ("max_model_len", "context_length", "context_window", "max_context_length")
_MAX_MODELS_BYTES = 4 * 1024 * 1024  # of the list that `probe` reads


class RemoteServer:
    """See above. `kind` is the software that runs there, one of SERVERS; `start` makes the connections."""

    def __init__(self, config: RemoteConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.clock = clock
        self.kind = config.server
        self.description = ModelDescription(
            alias=config.alias, state="idle", created=int(time.time()), has_chat_template=True, device="remote"
        )
        self.metrics = RemoteMetrics(clock)
        self.places = Places(config.max_concurrent, config.max_waiting)
        self._http: httpx.AsyncClient | None = None
        self._polling: asyncio.Task[None] | None = None
        self._is_probed, self._poll_now = asyncio.Event(), asyncio.Event()
        self._used_at = clock()
        self._is_closed = False

    @property
    def http(self) -> httpx.AsyncClient:
        """The connections. Only after `start`."""
        assert self._http is not None
        return self._http

    def start(self) -> None:
        """Begin to ask the server for its state, once; returns at once. On the event loop."""
        if self._polling is None and not self._is_closed:
            self._http = self._connections()
            self._describe("loading", stage="connecting")
            self._polling = asyncio.get_running_loop().create_task(self._poll(), context=Context())

    async def require(self) -> Dialect:
        """Return what the server takes, once it is known. Raises EngineUnavailable while it cannot be used."""
        if self._is_closed:
            raise unavailable(self.config.alias)
        self.start()
        if not self._is_probed.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(2 * self.config.connect_seconds):
                    await self._is_probed.wait()
        if self.description.state != "ready":
            raise unavailable(self.config.alias, retry_after=FAILED_RETRY_SECONDS)
        return SERVERS[self.kind]

    def note_use(self) -> None:
        """Keep connections warm for a while: there are requests."""
        self._used_at = self.clock()

    def note_loss(self, reason: str) -> None:
        """Ask the server for its state now: a connection to it was lost."""
        logger.warning("model %s: %s", self.config.alias, reason)
        self._poll_now.set()

    def close(self) -> None:
        """Refuse every later request, and stop asking."""
        self._is_closed = True
        if self._polling is not None:
            self._polling.cancel()

    async def aclose(self) -> None:
        """Close the connections. After `close`."""
        if self._polling is not None:
            await asyncio.gather(self._polling, return_exceptions=True)
        if self._http is not None:
            await self._http.aclose()
        self._describe("failed", message="the client was closed.")

    def _connections(self) -> httpx.AsyncClient:
        """Return the pool. No proxy, key file or certificate comes from the environment."""
        import httpx

        config, key = self.config, read_key(self.config)
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
        while True:
            try:
                self._take(await probe(self.http, self.config))
            except UpstreamLost as reason:
                self._fail(str(reason))
            except Exception:  # the edge of the task
                logger.exception("model %s: its server's state could not be read", self.config.alias)
                self._fail("the server's state could not be read")
            self._is_probed.set()
            self._poll_now.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause()):
                    await self._poll_now.wait()

    def _pause(self) -> float:
        if self.description.state == "failed":
            return _FAILED_POLL_SECONDS
        is_busy = self.clock() - self._used_at < _BUSY_SECONDS
        return min(self.config.poll_seconds, 0.8 * _KEEPALIVE_SECONDS) if is_busy else self.config.poll_seconds

    def _take(self, found: Found) -> None:
        """Note what the server tells about itself."""
        if self.config.server == AUTO:
            self.kind = found.server
        if self.description.state != "ready":
            logger.info("model %s: its server (%s) is ready", self.config.alias, self.kind)
        self.description = replace(self.description, max_model_len=found.max_model_len, was_ready=True, dtype=self.kind)
        self._describe("ready", message=found.warning)

    def _fail(self, reason: str) -> None:
        if self.description.state != "failed":
            logger.error("model %s: its server cannot be used: %s", self.config.alias, reason)
        self._describe("failed", stage="waiting", message=reason)

    def _describe(self, state: str, *, stage: str = "", message: str = "") -> None:
        self.description = replace(self.description, state=state, stage=stage, message=message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a server tells about itself. `server` is one of SERVERS; `warning` is for the operator."""

    server: str = "openai"
    max_model_len: int = 0
    warning: str = ""


async def probe(http: httpx.AsyncClient, config: RemoteConfig) -> Found:
    """Return what the server tells about itself. Raises UpstreamLost with the reason why it cannot be used."""
    answers = await asyncio.gather(*(_ask(http, config) for _ in range(max(1, config.warm_connections))))
    status, body = answers[0]
    if status in (401, 403):
        raise UpstreamLost(f"it refuses our key ({status}); check API_KEY_ENV")
    if status == 429 or status == 404:  # it is there, and has no such route, or no time for it
        return Found()
    if status != 200:
        raise UpstreamLost(f"GET {config.url}/models answers {status}")
    return _found(body, config)


async def _ask(http: httpx.AsyncClient, config: RemoteConfig) -> tuple[int, bytes]:
    """Return status and body of `GET /models`."""
    import httpx

    body = bytearray()
    try:
        async with asyncio.timeout(2 * config.connect_seconds), http.stream("GET", config.url + "/models") as response:
            async for part in response.aiter_raw():
                body += part
                if len(body) > _MAX_MODELS_BYTES:
                    raise UpstreamLost("its list of models has no end")
            return response.status_code, bytes(body)
    except TimeoutError as late:
        raise UpstreamLost(f"it did not answer within {2 * config.connect_seconds:g} s") from late
    except httpx.TransportError as error:
        raise UpstreamLost(f"cannot connect: {clean(str(error)) or type(error).__name__}") from error


def _found(body: bytes, config: RemoteConfig) -> Found:
    try:
        value: Any = msgspec.json.decode(body)
        listed = value if isinstance(value, list) else value["data"]  # some servers give the list alone
        models = [model for model in listed if isinstance(model, dict)]
    except (ValueError, TypeError, KeyError, RecursionError):
        return Found(warning="its /models is no list of models")
    names = [str(model.get("id")) for model in models]
    ours = next((model for model in models if model.get("id") == config.model), models[0] if models else {})
    server = OWNERS.get(str(ours.get("owned_by")), "openai")
    warning = ""
    if names and config.model not in names and server != "llama-server":  # which answers to any name
        warning = f"it has no model {config.model!r}. It has: {', '.join(clean(name) for name in names[:5])}"
    return Found(server=server, max_model_len=_model_len(ours), warning=warning)


def _model_len(model: dict[str, Any]) -> int:
    """Return the context length: vLLM's and SGLang's `max_model_len`, llama-server's `meta.n_ctx`; 0 if not named.

    Providers have other names for it.
    """
    meta = model.get("meta")
    places = [*map(model.get, _LENGTHS), meta.get("n_ctx") if isinstance(meta, dict) else None]
    for known in places:
        if isinstance(known, str) and known.isdecimal():
            known = int(known)
        if isinstance(known, int | float) and not isinstance(known, bool) and 0 < known < 2**53:
            return int(known)
    return 0
