"""`RemoteServer`: one upstream as this process uses it: its connections, its places, its counts, its state and circuit.

The server is asked for its `/models` when it is first needed, while it is used, and while it is failing: is it there,
what software is it, does it have the model, how long a context. So a kept connection is open before the first request,
and a server that is down is known before a caller waits for it. Knows no request, and no other upstream. Lives on one
event loop.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from streamserve import __version__
from streamserve.clients.remote.circuit import Circuit
from streamserve.clients.remote.config import AUTO, OWNERS, SERVERS, Dialect, RemoteConfig, Upstream, read_key
from streamserve.clients.remote.errors import UpstreamLost, clean
from streamserve.clients.remote.metrics import Counts
from streamserve.protocol.engine import ModelDescription

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger("streamserve.remote")

# uvicorn and llama-server close a connection that is idle for 5 s.
_KEEPALIVE_SECONDS = 4.5
_BUSY_SECONDS = 60.0  # after a request, connections are kept warm for so long
_FAILED_POLL_SECONDS = 1.0  # twice as long after each that fails, where another upstream is there
_MOST_FAILED_POLL_SECONDS = 8.0
_LENGTHS = ("max_model_len", "context_length", "context_window", "max_context_length")
_MAX_MODELS_BYTES = 4 * 1024 * 1024  # of the list that `probe` reads


class RemoteServer:
    """See above. `kind` is the software that runs there, one of SERVERS, or AUTO before that is known.

    `is_alone`: the model has no other upstream, so that the circuit keeps no request from it. `on_news` is called when
    it may be used from now on, or no more.
    """

    def __init__(
        self,
        upstream: Upstream,
        config: RemoteConfig,
        clock: Callable[[], float],
        *,
        is_alone: bool,
        on_news: Callable[[RemoteServer], None],
    ) -> None:
        self.config, self.name, self.weight = config, upstream.label, upstream.weight
        self.clock = clock
        self.kind = config.server
        self.description = ModelDescription(
            alias=config.alias, state="idle", created=int(time.time()), has_chat_template=True, device="remote"
        )
        self.counts = Counts()
        self.circuit = Circuit()
        self.num_running = 0
        self.is_known = asyncio.Event()  # it was asked for its state once
        self.begins: set[asyncio.Timeout] = set()  # the time limits of requests that have no token yet
        self._is_alone, self._on_news = is_alone, on_news
        self._is_away = False  # as logged
        self._reported = ""
        self._http: httpx.AsyncClient | None = None
        self._polling: asyncio.Task[None] | None = None
        self._poll_now = asyncio.Event()
        self._num_failed_polls = 0
        self._used_at = clock()
        self._is_closed = False

    @property
    def http(self) -> httpx.AsyncClient:
        """The connections. Only after `start`."""
        assert self._http is not None
        return self._http

    @property
    def is_ready(self) -> bool:
        """Whether the last probe has found it."""
        return self.description.state == "ready"

    @property
    def is_up(self) -> bool:
        """Whether it gets requests like any other."""
        return self.is_ready and (self._is_alone or self.circuit.is_well)

    @property
    def has_free(self) -> bool:
        """Whether it has a free place."""
        return self.num_running < self.config.max_concurrent

    @property
    def dialect(self) -> Dialect | None:
        """What the server takes; None before it is known."""
        return SERVERS.get(self.kind)

    def start(self) -> None:
        """Begin to ask the server for its state, once; returns at once. On the event loop."""
        if self._polling is None and not self._is_closed:
            self._http = self._connections()
            self._describe("loading", stage="connecting")
            self._polling = asyncio.get_running_loop().create_task(self._poll(), context=Context())

    def take(self) -> None:
        """Give a place to a request, which ends with `release`."""
        self.num_running += 1
        self._used_at = self.clock()
        self.circuit.begin(self.clock())

    def release(self) -> None:
        """End a request's place."""
        self.num_running -= 1
        self.circuit.leave()

    def look(self) -> None:
        """Ask the server for its state now, and each second from then on: there is no other upstream."""
        self._num_failed_polls = 0
        self._poll_now.set()

    def note_use(self) -> None:
        """Keep connections warm for a while: there are requests."""
        self._used_at = self.clock()

    def note_token(self) -> None:
        """Note the first token of a request."""
        self._reported = ""
        self.circuit.succeed()
        self._tell("")

    def note_loss(self, reason: str) -> None:
        """Ask the server for its state now: a connection to it was lost, or it gave no token in time."""
        if self._is_alone:
            self.report(logging.WARNING, reason)
        self._fail_circuit(reason, lost=True)
        self._poll_now.set()

    def note_fault(self, reason: str, *, certain: bool = False) -> None:
        """Note an answer that is none; `certain`: the same awaits every request."""
        self._fail_circuit(reason, certain=certain)

    def note_busy(self, seconds: float) -> None:
        """Note that the server wants no request for so long."""
        self.circuit.rest(self.clock(), seconds)

    def report(self, level: int, reason: str) -> None:
        """Log what is wrong with the server: once, until a request has its first token or something else is wrong."""
        if reason != self._reported:
            self._reported = reason
            logger.log(level, "model %s: %s%s", self.config.alias, self._of_several, reason)

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

    @property
    def _of_several(self) -> str:
        return "" if self._is_alone else f"upstream {self.name}: "

    def _fail_circuit(self, reason: str, *, lost: bool = False, certain: bool = False) -> None:
        if not self._is_alone:
            self.circuit.fail(self.clock(), lost=lost, certain=certain)
            self._tell(reason)

    def _tell(self, reason: str) -> None:
        """Log that it is away, or back, once, and let the requests that wait look again."""
        is_away = not self.is_up
        if is_away and not self._is_away:
            logger.error("model %s: %sits server cannot be used: %s", self.config.alias, self._of_several, reason)
            self.counts.away += 1
        elif self._is_away and not is_away:
            logger.info("model %s: %sits server (%s) is ready", self.config.alias, self._of_several, self.kind)
        if is_away is not self._is_away:
            self._is_away = is_away
            self._on_news(self)

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
                logger.exception("model %s: %sits state could not be read", self.config.alias, self._of_several)
                self._fail("the server's state could not be read")
            self.is_known.set()
            self._on_news(self)
            self._poll_now.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause()):
                    await self._poll_now.wait()

    def _pause(self) -> float:
        if not self.is_ready:
            if self._is_alone:
                return _FAILED_POLL_SECONDS
            seconds = _FAILED_POLL_SECONDS * 2.0 ** min(self._num_failed_polls - 1, 10)
            return min(seconds, _MOST_FAILED_POLL_SECONDS) * random.uniform(0.75, 1.25)
        is_busy = self.clock() - self._used_at < _BUSY_SECONDS
        return min(self.config.poll_seconds, 0.8 * _KEEPALIVE_SECONDS) if is_busy else self.config.poll_seconds

    def _take(self, found: Found) -> None:
        """Note what the server tells about itself."""
        if self.config.server == AUTO and (found.is_listed or self.kind == AUTO):
            self.kind = found.server
        self._num_failed_polls = 0
        self.circuit.find(self.clock())
        if self.description.state == "loading":
            self._is_away = True  # the first time is logged too
        length = found.max_model_len if found.is_listed else self.description.max_model_len
        self.description = replace(self.description, max_model_len=length, was_ready=True, dtype=self.kind)
        self._describe("ready", message=found.warning)
        self._tell("")

    def _fail(self, reason: str) -> None:
        self._num_failed_polls += 1
        if self.is_ready and not self._is_alone:  # when it is back, one request tries first
            self.circuit.fail(self.clock(), lost=True)
        self._describe("failed", stage="waiting", message=reason)
        self._tell(reason)

    def _describe(self, state: str, *, stage: str = "", message: str = "") -> None:
        self.description = replace(self.description, state=state, stage=stage, message=message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a server tells about itself. `server` is one of SERVERS; `warning` is for the operator.

    `is_listed` False: it is there, and did not list its models now.
    """

    server: str = "openai"
    is_listed: bool = True
    max_model_len: int = 0
    warning: str = ""


async def probe(http: httpx.AsyncClient, config: RemoteConfig) -> Found:
    """Return what the server tells about itself. Raises UpstreamLost with the reason why it cannot be used."""
    answers = await asyncio.gather(*(_ask(http, config) for _ in range(max(1, config.warm_connections))))
    status, body = answers[0]
    if status in (401, 403):
        raise UpstreamLost(f"it refuses our key ({status}); check API_KEY_ENV")
    if status == 429 or status == 404:  # it is there, and has no such route, or no time for it
        return Found(is_listed=False)
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
