"""`Upstreams`: the servers of one model, and which of them gets a request.

    those that the last probe has found, and that this request has not tried
      └─ that are not busy (429, 503 with Retry-After)
           └─ whose circuit lets it through; where none does: all of them
                └─ with a free place; where none has: the request waits for the first that is free
                     └─ in the order of `affinity`, the first that is not clearly busier than its weight

Requests of one conversation have one order of the upstreams, the same in every web process, so that they find the
prefix cache of the upstream that has seen it before: weighted rendezvous hashing (Thaler and Ravishankar 1996), with
bounded loads (Mirrokni, Thorup and Zadimoghaddam 2016). Lives on one event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b

from streamserve.clients.remote.body import can_continue
from streamserve.clients.remote.config import Dialect, RemoteConfig
from streamserve.clients.remote.errors import unavailable
from streamserve.clients.remote.metrics import RemoteMetrics
from streamserve.clients.remote.places import Places
from streamserve.clients.remote.server import RemoteServer
from streamserve.protocol.engine import ModelDescription
from streamserve.protocol.errors import Overloaded
from streamserve.protocol.requests import Admission, GenerateRequest, ShownChoice

FAILED_RETRY_SECONDS = 2
_RETRY_SECONDS, _MOST_RETRY_SECONDS = 5, 120
# An upstream may have so many times its share of the running requests, and one more, before its affinity is broken.
_MOST_LOAD = 1.25
_MAX_HASHED_CHARS = 2048  # of the first messages, and of a prompt


@dataclass(slots=True, eq=False)
class Route:
    """Where one request goes: what it asks of an upstream, and those that it has tried, with what became of that.

    `shown`: the part of the answer that an upstream is to continue; None: it begins anew.
    """

    tenant: str
    affinity: bytes
    request: GenerateRequest
    shown: ShownChoice | None = None
    tried: dict[RemoteServer, Exception] = field(default_factory=dict)

    def suits(self, server: RemoteServer) -> bool:
        """Return whether the upstream takes it: it is known, and continues the answer where it is to be continued."""
        dialect = server.dialect
        return dialect is not None and (self.shown is None or can_continue(self.request, self.shown, dialect))


class Upstreams:
    """See above. `servers` are in the order of the settings."""

    def __init__(self, config: RemoteConfig, clock: Callable[[], float]) -> None:
        self.config, self.clock = config, clock
        servers = config.servers
        self.servers = tuple(
            RemoteServer(upstream, own, clock, is_alone=len(servers) == 1, on_news=self._note_news)
            for upstream, own in servers
        )
        self.metrics = RemoteMetrics(clock)
        self.places: Places[RemoteServer] = Places(
            sum(server.config.max_waiting for server in self.servers), may_pick=self._may_pick, give_back=self.release
        )
        self._is_closed = self._was_ready = False

    @property
    def are_several(self) -> bool:
        """Whether there is another upstream for what one has failed."""
        return len(self.servers) > 1

    @property
    def num_running(self) -> int:
        """Requests that have a place."""
        return sum(server.num_running for server in self.servers)

    @property
    def has_free(self) -> bool:
        """Whether an upstream that is there has a free place."""
        return any(server.is_ready and server.has_free for server in self.servers)

    @property
    def dialects(self) -> dict[str, Dialect]:
        """What the upstreams take, by their kind, of those that are known."""
        return {server.kind: dialect for server in self.servers if (dialect := server.dialect) is not None}

    def start(self) -> None:
        """Begin to ask the upstreams for their state, once; returns at once. On the event loop."""
        for server in self.servers:
            server.start()

    async def require(self) -> None:
        """Return when an upstream is there. Raises EngineUnavailable while none can be used."""
        if self._is_closed:
            raise unavailable(self.config.alias)
        self.start()
        if not self._is_ready and not all(server.is_known.is_set() for server in self.servers):
            with suppress(TimeoutError):
                async with asyncio.timeout(2 * self.config.connect_seconds):
                    await self._first_known()
        if not self._is_ready:
            raise unavailable(self.config.alias, retry_after=FAILED_RETRY_SECONDS)

    def check_room(self, tenant: str) -> None:
        """Raise Overloaded if every place is taken, and too many requests wait already."""
        if not self.has_free:
            self.places.check_room(tenant, self.retry_after())

    def retry_after(self) -> int:
        """Return in how many seconds a place may be free: by what waits, and how long recent answers have taken."""
        seconds = self.metrics.times.running_seconds()
        num_places = sum(server.config.max_concurrent for server in self.servers if server.is_ready)
        if seconds is None or not num_places:
            return _RETRY_SECONDS
        return max(1, min(_MOST_RETRY_SECONDS, math.ceil(seconds * (self.places.num_waiting + 1) / num_places)))

    async def take(self, route: Route) -> RemoteServer:
        """Wait for a place at an upstream, which ends with `release`.

        Raises Overloaded after `queue_seconds`. Where no upstream is left, it raises what became of those it has tried.
        """
        try:
            return await self.places.take(route.tenant, self.config.queue_seconds, lambda: self._pick(route))
        except TimeoutError as late:
            raise Overloaded(
                f"model {self.config.alias} was too busy to begin this request in time. Try again later.",
                code="queue_timeout",
                retry_after=self.retry_after(),
            ) from late

    def release(self, server: RemoteServer) -> None:
        """Free a place."""
        server.release()
        self.places.turn()

    def describe(self) -> ModelDescription:
        """Return the model's state: ready while one of its upstreams is. Never blocks."""
        if not self.are_several:
            return self.servers[0].description
        found = [server.description for server in self.servers]
        states = [one.state for one in found]
        best = found[next((states.index(state) for state in ("ready", "loading", "idle") if state in states), 0)]
        messages = (f"{server.name}: {server.description.message}" for server in self.servers)
        return replace(
            best,
            message="; ".join(text for text, one in zip(messages, found, strict=True) if one.message),
            max_model_len=min((one.max_model_len for one in found if one.max_model_len), default=0),
            dtype=", ".join(sorted({one.dtype for one in found if one.dtype})),
            was_ready=any(one.was_ready for one in found),
        )

    def counts(self) -> dict[str, dict[str, float]]:
        """Return the figures of each upstream, by the names of their metrics."""
        return {
            server.name: {
                **asdict(server.counts),
                "up": float(server.is_up),
                "running": server.num_running,
                "weight": server.weight,
                "max_concurrent": server.config.max_concurrent,
                "max_waiting": server.config.max_waiting,
            }
            for server in self.servers
        }

    def close(self) -> None:
        """Refuse every later request, and stop asking."""
        self._is_closed = True
        for server in self.servers:
            server.close()

    async def aclose(self) -> None:
        """Close the connections. After `close`."""
        await asyncio.gather(*(server.aclose() for server in self.servers))

    @property
    def _is_ready(self) -> bool:
        return any(server.is_ready for server in self.servers)

    async def _first_known(self) -> None:
        """Wait until an upstream is there, or all are known."""
        known = {asyncio.ensure_future(server.is_known.wait()) for server in self.servers}
        try:
            while known and not self._is_ready:
                _, known = await asyncio.wait(known, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in known:
                one.cancel()

    def _may_pick(self) -> bool:
        return self.has_free or not self._is_ready

    def _pick(self, route: Route) -> RemoteServer | None:
        """Take a place at the best upstream; None: all that might take the request are full. Raises as `take`."""
        able = [one for one in self.servers if one.is_ready and one not in route.tried and route.suits(one)]
        if not able:
            raise self._error_of(route)
        if self.are_several:
            now = self.clock()
            rested = [one for one in able if not one.circuit.busy_seconds(now)]
            if not rested:
                raise self._error_of(route)
            able = [one for one in rested if one.circuit.may_try(now)] or rested
        free = [one for one in able if one.has_free]
        if not free:
            return None
        server = _choose(route.affinity, free, able) if self.are_several else free[0]
        server.take()
        return server

    def _error_of(self, route: Route) -> Exception:
        """Return why no upstream takes the request: where one is busy, with the shortest time until one is not."""
        now, errors = self.clock(), [*route.tried.values()]
        waits = [error.retry_after for error in errors if isinstance(error, Overloaded)]
        waits += [math.ceil(one.circuit.busy_seconds(now)) for one in self.servers if one.is_ready]
        if not self.are_several or not (known := [seconds for seconds in waits if seconds]):
            return errors[-1] if errors else unavailable(self.config.alias, retry_after=FAILED_RETRY_SECONDS)
        return Overloaded(f"model {self.config.alias} is busy. Try again in {min(known)} s.", retry_after=min(known))

    def _note_news(self, server: RemoteServer) -> None:
        """Let requests look again; those that an upstream that is away has not answered go to another."""
        was_ready, self._was_ready = self._was_ready, self._is_ready
        if was_ready and not self._is_ready:
            for one in self.servers:
                one.look()
        if not server.is_ready and self._is_ready:
            now = asyncio.get_running_loop().time()
            for limit in list(server.begins):
                if not limit.expired():
                    limit.reschedule(now)
        self.places.turn()


def _choose(affinity: bytes, free: Sequence[RemoteServer], able: Sequence[RemoteServer]) -> RemoteServer:
    """Return the first in the request's order that is not clearly busier than its weight; else the least busy."""
    load = (sum(one.num_running for one in able) + 1) / sum(one.weight for one in able)
    for server in sorted(free, key=lambda one: _score(affinity, one), reverse=True):
        if server.num_running < _MOST_LOAD * load * server.weight + 1:
            return server
    return min(free, key=lambda one: (one.num_running + 1) / one.weight)


def _score(affinity: bytes, server: RemoteServer) -> float:
    """Return the rank of an upstream for a request: the highest is first with a chance of its share of the weights."""
    digest = blake2b(server.name.encode(), key=affinity, digest_size=8).digest()
    return -server.weight / math.log(((int.from_bytes(digest, "big") >> 12) + 0.5) / 2**52)  # above 0, below 1


def affinity_of(request: GenerateRequest, admission: Admission) -> bytes:
    """Return what stays the same in a conversation: its tenant, and how its prompt begins.

    Of a chat that is everything up to its first question, so that conversations with one system prompt are spread.
    """
    hashed = blake2b(admission.salt.encode() + b"\0", digest_size=32)
    for message in request.messages or ():
        text = f"{message.role}\0{message.content[:_MAX_HASHED_CHARS]}\0"
        hashed.update(text.encode(errors="surrogatepass"))
        if message.role == "user":
            break
    if request.prompt is not None:
        hashed.update(request.prompt[:_MAX_HASHED_CHARS].encode(errors="surrogatepass"))
    if request.prompt_token_ids is not None:
        hashed.update(repr(request.prompt_token_ids[: _MAX_HASHED_CHARS // 4]).encode())
    return hashed.digest()
