"""`RedisLog`: events in Redis, shared by several machines. Lives on one event loop; needs the extra `redis`.

    {prefix}:{{log_id}}:head     hash: fence, last, ended, by and n (who appended last, and that one's count), at
    {prefix}:{{log_id}}:events   stream: entry `<seq>-0`, field `e`, an event's bytes
    {prefix}:{{log_id}}:news     channel: the last seq, after every append

An append is one script, which Redis runs whole or not at all. Whatever is asked while a batch of calls is under way
goes out as the next batch, on one connection. Every append carries its sender and a number that only grows (as Kafka's
idempotent producer does): sent again after a lost connection it is not applied again, and one that a stalled Redis
finds in its socket after we gave up comes too late.

What is acknowledged is as safe as Redis is set to keep it. `appendonly yes` with `appendfsync always` loses nothing to
kill -9 or a power cut of Redis, and costs little, because a batch of appends waits for the disk once. `everysec` may
lose the last two seconds to either: while a slow fsync is under way, Redis answers before it writes (seen with kill -9
on a busy disk). The producer then raises `LogLost` rather than write on behind a hole. A fail-over takes what had not
reached the replica. `check` names what is missing. One Redis or a Sentinel's master; not a Redis Cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextvars import Context
from typing import Any

from streamserve.protocol.events import Event, LoggedEvent, is_terminal
from streamserve.protocol.frames import decode_event, encode_event
from streamserve.streams.log.base import (
    Appending,
    Ended,
    Fenced,
    LogLost,
    LogUnavailable,
    Place,
    Settle,
    Waiters,
    Withdraw,
)
from streamserve.streams.log.redis_calls import DOWN, Calls, connect
from streamserve.streams.recent import RecentEvents

logger = logging.getLogger("streamserve.streams")

_APPEND = """
local fence, by, n, known = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local head = redis.call('HMGET', KEYS[1], 'fence', 'last', 'ended', 'by', 'n')
local last, num = tonumber(head[2] or 0), #ARGV - 8
if head[4] == by and n <= tonumber(head[5]) then return last end
if last < known or (last > 0 and redis.call('EXISTS', KEYS[2]) == 0) then return -4 end
if num == 0 and not head[1] then return -3 end
if fence < tonumber(head[1] or 0) then return -1 end
if num > 0 and head[3] == '1' then return -2 end
for i = 9, #ARGV do
    last = last + 1
    redis.call('XADD', KEYS[2], last .. '-0', 'e', ARGV[i])
end
if ARGV[5] == '0' and head[3] then ARGV[5] = head[3] end
redis.call('HSET', KEYS[1], 'fence', fence, 'last', last, 'ended', ARGV[5], 'by', by, 'n', n, 'at', ARGV[6])
redis.call('PEXPIRE', KEYS[1], ARGV[7])
redis.call('PEXPIRE', KEYS[2], ARGV[7])
redis.call('PUBLISH', ARGV[8], last)
return last
"""
_READ = """
local last = redis.call('HGET', KEYS[1], 'last')
local found = redis.call('XRANGE', KEYS[2], ARGV[1], '+', 'COUNT', ARGV[2])
if not last or (#found == 0 and redis.call('EXISTS', KEYS[2]) == 0) then return -3 end
return found
"""
_DROP = """
redis.call('PUBLISH', ARGV[1], 0)
return redis.call('DEL', KEYS[1], KEYS[2])
"""
_PURGE = """
local at = tonumber(redis.call('HGET', KEYS[1], 'at') or ARGV[2])
if at >= tonumber(ARGV[2]) then return 0 end
redis.call('PUBLISH', ARGV[1], 0)
redis.call('DEL', KEYS[1], KEYS[2])
return 1
"""
_SCRIPTS = {hashlib.sha1(text.encode()).hexdigest(): text for text in (_APPEND, _READ, _DROP, _PURGE)}
_SHA = {text: sha for sha, text in _SCRIPTS.items()}

_RECONNECT_SECONDS = 0.2
# The listener asks whether its connection still lives after so much silence, and gives it up after three times that.
_SILENCE_SECONDS = 1.0
_SWEEP_SECONDS = 5.0
_LOST = "The stream log's Redis has lost this stream."


class RedisLog(Appending):
    """See `EventLog`. Connects when first used.

    `retention_seconds` after its last append Redis forgets a log by itself: more than a stream can live unread.
    `patience_seconds` is how long an outage of Redis is waited out before calls raise LogUnavailable.
    """

    def __init__(
        self,
        url: str,
        *,
        retention_seconds: float = 3600.0,
        patience_seconds: float = 3.0,
        prefix: str = "streamserve",
    ) -> None:
        self._prefix = prefix
        self._client = connect(url, patience_seconds)
        self._calls = Calls(self._client, patience_seconds, _SCRIPTS)
        self.waiters = Waiters()
        self._news = _News(self._client, self._key, self.waiters)
        self._recent = RecentEvents()
        self._known: dict[str, int] = {}  # last seq of the logs that this process appends to
        self._retention_ms = int(retention_seconds * 1000)
        self._sender, self._count = secrets.token_hex(8), itertools.count(1)

    def submit(self, log_id: str, fence: int, events: Sequence[Event], settle: Settle) -> Withdraw:
        bodies = [encode_event(event) for event in events]
        is_end = int(bool(events) and is_terminal(events[-1]))

        def note(answer: int | Exception) -> None:
            result = _checked(answer, log_id)
            if isinstance(result, Exception):
                settle(result)
                return
            if events:
                self._known[log_id] = result
                self._recent.add(log_id, result, bodies)
            settle(result)
            self.waiters.wake(log_id, result)

        known, now = self._known.get(log_id, 0), int(time.time())
        head = (
            fence,
            self._sender,
            next(self._count),
            known,
            is_end,
            now,
            self._retention_ms,
            self._key(log_id, "news"),
        )
        return self._calls.submit(self._command(_APPEND, log_id, *head, *bodies), note)

    async def read(self, log_id: str, after: int, limit: int = 512) -> list[LoggedEvent]:
        if found := self._recent.read(log_id, after, limit):
            return found
        entries = await self._script(_READ, log_id, f"{after + 1}-0", limit)
        if isinstance(entries, int):
            raise KeyError(log_id)
        return [LoggedEvent(seq=int(name.partition(b"-")[0]), event=decode_event(body)) for name, (_, body) in entries]

    async def last_seq(self, log_id: str) -> int:
        last_seq = await self._calls.call(("HGET", self._key(log_id, "head"), "last"))
        if last_seq is None:
            raise KeyError(log_id)
        return int(last_seq)

    async def wait(self, log_id: str, place: Place) -> None:
        if self._recent.last_seq(log_id) <= place.seq:
            self._news.follow(log_id)
            await self.waiters.wait(log_id, place)

    async def seal(self, log_id: str) -> None:
        self._known.pop(log_id, None)
        self.waiters.wake(log_id)

    async def drop(self, log_id: str) -> None:
        await self._script(_DROP, log_id, self._key(log_id, "news"))
        self._known.pop(log_id, None)
        self._recent.drop(log_id)
        self.waiters.wake(log_id)

    async def purge(self, before: float) -> int:
        """Redis forgets by itself; this is for what must go sooner."""
        num_purged, cursor = 0, None
        while cursor != 0:
            cursor, heads = await self._calls.call(("SCAN", cursor or 0, "MATCH", self._key("*", "head"), "COUNT", 500))
            for head in heads:
                log_id = head.decode().rpartition("}")[0].rpartition("{")[2]
                num_purged += await self._script(_PURGE, log_id, self._key(log_id, "news"), before)
        self._recent = RecentEvents()
        return num_purged

    async def check(self) -> list[str]:
        """Return what is wrong with how this Redis keeps things, a sentence each. Raises LogUnavailable."""
        return [text async for text in _complaints(self._calls.call)]

    async def aclose(self) -> None:
        await self._calls.aclose()
        await self._news.aclose()
        await self._client.aclose()
        self.waiters.wake_all()

    async def _script(self, text: str, log_id: str, *args: object) -> Any:
        return await self._calls.call(self._command(text, log_id, *args))

    def _command(self, text: str, log_id: str, *args: object) -> tuple[Any, ...]:
        return "EVALSHA", _SHA[text], 2, self._key(log_id, "head"), self._key(log_id, "events"), *args

    def _key(self, log_id: str, what: str) -> str:
        return f"{self._prefix}:{{{log_id}}}:{what}"


def _checked(answer: int | Exception, log_id: str) -> int | Exception:
    """Return the append script's result, or the exception that its code stands for."""
    if isinstance(answer, Exception) or answer >= 0:
        return answer
    return {
        -1: Fenced(log_id),
        -2: Ended(log_id),
        -3: KeyError(log_id),
        -4: LogLost(_LOST),
    }[answer]


class _News:
    """One connection that hears of every append to the logs that somebody here waits for.

    A subscription that begins, also after a lost connection, wakes who waits: an append may have come just before.
    """

    def __init__(self, client: Any, key: Callable[[str, str], str], waiters: Waiters) -> None:
        self._client, self._key, self._waiters = client, key, waiters
        self._pubsub: Any = None
        self._followed: set[str] = set()  # subscribed to, or asked for
        self._asked: list[str] = []  # not sent yet
        self._idle: set[str] = set()  # nobody waited for them at the last sweep
        self._swept_at = 0.0
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def follow(self, log_id: str) -> None:
        """Hear of that log from now on. Who waits for it is woken once that is so."""
        if log_id not in self._followed:
            self._followed.add(log_id)
            self._asked.append(log_id)
            self._begin("asking", self._ask)
        self._begin("listening", self._listen_always)

    async def aclose(self) -> None:
        """End the connection. Asks more than once: a library in between may swallow a cancellation."""
        open_tasks = set(self._tasks.values())
        while open_tasks:
            for task in open_tasks:
                task.cancel()
            _, open_tasks = await asyncio.wait(open_tasks, timeout=_RECONNECT_SECONDS)

    def _begin(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if name not in self._tasks or self._tasks[name].done():
            self._tasks[name] = asyncio.create_task(work(), name=f"redis log, {name}", context=Context())

    async def _ask(self) -> None:
        """Subscribe to what was asked for, if there is a connection; a new one begins with everything."""
        import redis

        while self._asked and self._pubsub is not None:
            asked, self._asked = self._asked, []
            with contextlib.suppress(redis.RedisError, OSError):  # the listener will notice
                await self._pubsub.subscribe(*map(self._channel, asked))

    async def _listen_always(self) -> None:
        import redis

        while True:
            try:
                async with self._client.pubsub() as pubsub:
                    await self._listen(pubsub)
            except (redis.RedisError, OSError) as error:
                logger.info("stream log: listening to Redis again after: %s", error)
            except Exception:
                logger.exception("stream log: listening to Redis failed")
            finally:
                self._pubsub = None
            await asyncio.sleep(_RECONNECT_SECONDS)

    async def _listen(self, pubsub: Any) -> None:
        """Hear what comes until the connection breaks or no longer answers."""
        self._asked, self._followed = [], set(self._waiters.awaited())
        await pubsub.subscribe(self._channel(""), *map(self._channel, self._followed))
        self._pubsub = pubsub
        num_silences = 0
        while num_silences < 3:
            message = await pubsub.get_message(timeout=_SILENCE_SECONDS)
            if message is None:
                num_silences += 1
                await pubsub.ping()
            else:
                num_silences = 0
                self._hear(message)
            await self._sweep(pubsub)
        raise ConnectionResetError("Redis no longer answers")

    def _hear(self, message: dict[str, Any]) -> None:
        if message["type"] in ("message", "subscribe"):
            log_id = bytes(message["channel"]).decode().rpartition("}")[0].rpartition("{")[2]
            is_append = message["type"] == "message" and message["data"] != b"0"
            self._waiters.wake(log_id, int(message["data"]) if is_append else None)

    async def _sweep(self, pubsub: Any) -> None:
        """Unsubscribe from what nobody has waited for at two sweeps."""
        if time.monotonic() < self._swept_at + _SWEEP_SECONDS:
            return
        self._swept_at = time.monotonic()
        idle = {log_id for log_id in self._followed if log_id not in self._waiters}
        gone, self._idle = idle & self._idle, idle
        self._followed -= gone
        if gone:
            await pubsub.unsubscribe(*map(self._channel, gone))

    def _channel(self, log_id: str) -> str:
        return self._key(log_id, "news")


async def _complaints(call: Callable[[tuple[Any, ...]], Coroutine[Any, Any, Any]]) -> AsyncIterator[str]:
    try:
        appendonly, fsync = await _config(call, "appendonly"), await _config(call, "appendfsync")
        policy = await _config(call, "maxmemory-policy")
    except LogUnavailable as error:
        if error.message == DOWN:
            raise
        yield "Redis does not let us ask how it keeps data (CONFIG GET is forbidden). Make sure of appendonly yes."
        return
    if appendonly != "yes":
        yield "Redis keeps streams in memory only (appendonly no): a restart loses them. Set appendonly yes."
    elif fsync != "always":
        yield f"A crash of Redis may lose its last seconds of streams (appendfsync {fsync}). Set appendfsync always."
    if policy != "noeviction":
        yield f"Redis may evict running streams when its memory is full (maxmemory-policy {policy}): set noeviction."


async def _config(call: Callable[[tuple[Any, ...]], Coroutine[Any, Any, Any]], name: str) -> str:
    _, value = await call(("CONFIG", "GET", name))
    return bytes(value).decode()
