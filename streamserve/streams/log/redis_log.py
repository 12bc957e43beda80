"""`RedisLog`: events in Redis, shared by several machines. Lives on one event loop; needs the extra `redis`.

    {prefix}:{{log_id}}:head     hash: fence, last, ended, at
    {prefix}:{{log_id}}:events   stream: entry `<seq>-0`, field `e`, an event's bytes
    {prefix}:{{log_id}}:news     channel: the last seq, after every append

An append is one script, which Redis runs whole or not at all. Calls that are made during a batch go out as the next
batch, on one connection. Every append carries the seq it follows. So a retry after a lost connection is not applied
twice, and an append that a stalled Redis reads from its socket after this process gave up changes nothing.

Committed events are as safe as Redis is configured to keep them. With `appendonly yes` and `appendfsync always` neither
kill -9 nor a power cut loses any, at a low cost, because a batch of appends waits for the disk once. `everysec` may
lose the last two seconds: during a slow fsync Redis answers before it writes (measured with kill -9 on a busy disk).
The result of the next commit is then `LogLost`, never a gap. A failover loses what the replica does not have. `check`
reports what is missing. One Redis or a Sentinel's master; not a Redis Cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextvars import Context
from typing import Any
from urllib.parse import urlsplit

from streamserve.protocol.events import LoggedEvent
from streamserve.protocol.frames import decode_event
from streamserve.streams.log.base import (
    UNFINISHED_SECONDS,
    Batch,
    Ended,
    Fenced,
    LogLost,
    LogUnavailable,
    Refusal,
    Rejected,
    Result,
    Waiters,
)
from streamserve.streams.log.redis_calls import DOWN, Calls, connect

logger = logging.getLogger("streamserve.streams")

_APPEND = """
local fence, base, ends = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3]
local head = redis.call('HMGET', KEYS[1], 'fence', 'last', 'ended')
local last, num, seen = tonumber(head[2] or 0), #ARGV - 6, tonumber(head[1] or 0)
if last > 0 and redis.call('EXISTS', KEYS[2]) == 0 then return -4 end
if num == 0 and not head[1] then return -3 end
if fence < seen then return -1 end
if num > 0 then
    if base < 0 then base = last end
    if last == base + num and fence == seen then return last end
    if head[3] == '1' then return -2 end
    if last < base then return -4 end
    if last > base then return -1 end
end
for i = 7, #ARGV do
    last = last + 1
    redis.call('XADD', KEYS[2], last .. '-0', 'e', ARGV[i])
end
if ends == '0' and head[3] then ends = head[3] end
redis.call('HSET', KEYS[1], 'fence', fence, 'last', last, 'ended', ends, 'at', ARGV[4])
for _, key in ipairs(KEYS) do
    if ends == '1' then redis.call('PEXPIRE', key, ARGV[5]) else redis.call('PERSIST', key) end
end
redis.call('PUBLISH', ARGV[6], last)
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
local head = redis.call('HMGET', KEYS[1], 'at', 'ended')
local before = tonumber(head[2] == '1' and ARGV[2] or ARGV[3])
if tonumber(head[1] or before) >= before then return 0 end
redis.call('PUBLISH', ARGV[1], 0)
redis.call('DEL', KEYS[1], KEYS[2])
return 1
"""
_SCRIPTS = {hashlib.sha1(text.encode()).hexdigest(): text for text in (_APPEND, _READ, _DROP, _PURGE)}
_SHA = {text: sha for sha, text in _SCRIPTS.items()}

_RECONNECT_SECONDS = 0.2
# The listener pings its connection after so much silence, and reconnects after three times that.
_SILENCE_SECONDS = 1.0
_IDLE_SECONDS = 5.0


class RedisLog:
    """See `EventLog`. Connects when first used.

    Redis deletes a log `retention_seconds` after its end. An unfinished log it keeps, as the log of a queued job must
    outlive a site that is down; `purge` deletes it.
    `patience_seconds`: how long a call waits during an outage of Redis before it raises LogUnavailable.
    """

    def __init__(
        self,
        url: str,
        *,
        retention_seconds: float = 3600.0,
        patience_seconds: float = 3.0,
        prefix: str = "streamserve",
    ) -> None:
        address = urlsplit(url)
        self.place = f"{address.scheme}://{address.netloc.rpartition('@')[2]}{address.path}"  # without its password
        self._prefix = prefix
        self._client = connect(url, patience_seconds)
        self._calls = Calls(self._client, patience_seconds, _SCRIPTS)
        self._waiters = Waiters()
        self._notifications = _Notifications(self._client, self._key, self._waiters)
        self._retention_ms = int(retention_seconds * 1000)

    async def commit(self, batches: Sequence[Batch]) -> list[Result]:
        now = int(time.time())
        commands = [
            self._command(
                _APPEND,
                batch.log_id,
                batch.fence,
                -1 if batch.base_seq is None else batch.base_seq,
                int(batch.is_end),
                now,
                self._retention_ms,
                self._key(batch.log_id, "news"),
                *batch.bodies,
            )
            for batch in batches
        ]
        results: list[Result] = []
        for batch, result in zip(batches, await self._calls.call(*commands), strict=True):
            if isinstance(result, Rejected):
                results.append(result)
            elif result >= 0:
                self._waiters.wake(batch.log_id, result)
                results.append(int(result))
            else:
                results.append(_REFUSALS[result](batch.log_id))
        return results

    async def read(self, log_id: str, after: int, limit: int = 512) -> list[LoggedEvent]:
        entries = await self._script(_READ, log_id, f"{after + 1}-0", limit)
        if isinstance(entries, int):
            raise KeyError(log_id)
        return [LoggedEvent(seq=int(name.partition(b"-")[0]), event=decode_event(body)) for name, (_, body) in entries]

    async def last_seq(self, log_id: str) -> int:
        (last_seq,) = await self._calls.call(("HGET", self._key(log_id, "head"), "last"))
        if last_seq is None:
            raise KeyError(log_id)
        return int(last_seq)

    async def wait(self, log_id: str, after: int) -> None:
        if self._notifications.subscribe(log_id) == 0:  # no message announces events before the subscription
            try:
                self._notifications.note(log_id, await self.last_seq(log_id))
            except KeyError:
                return
        announced = self._notifications.subscribe(log_id)
        if announced is None or announced <= after:
            await self._waiters.wait(log_id, after)

    def wake(self, log_id: str) -> None:
        self._waiters.wake(log_id)

    async def drop(self, log_id: str) -> None:
        await self._script(_DROP, log_id, self._key(log_id, "news"))
        self._waiters.wake(log_id)

    async def purge(self, before: float) -> int:
        """Delete logs by age, earlier than Redis expires them."""
        num_purged = 0
        async for log_id in self._log_ids():
            news = self._key(log_id, "news")
            num_purged += await self._script(_PURGE, log_id, news, before, before - UNFINISHED_SECONDS)
        return num_purged

    async def old(self, before: float) -> Sequence[str]:
        found = set()
        async for log_id in self._log_ids():
            ((at, ended),) = await self._calls.call(("HMGET", self._key(log_id, "head"), "at", "ended"))
            if at is not None and float(at) < (before if ended == b"1" else before - UNFINISHED_SECONDS):
                found.add(log_id)  # a scan may give a key twice
        return list(found)

    async def _log_ids(self) -> AsyncIterator[str]:
        cursor = None
        while cursor != 0:
            scan = ("SCAN", cursor or 0, "MATCH", self._key("*", "head"), "COUNT", 500)
            ((cursor, heads),) = await self._calls.call(scan)
            for head in heads:
                yield head.decode().rpartition("}")[0].rpartition("{")[2]

    async def check(self) -> list[str]:
        """Return the problems of this Redis's persistence, one sentence each. Raises LogUnavailable."""
        return [text async for text in _problems(self._calls)]

    async def aclose(self) -> None:
        await self._calls.aclose()
        await self._notifications.aclose()
        await self._client.aclose()
        self._waiters.wake_all()

    async def _script(self, text: str, log_id: str, *args: object) -> Any:
        (result,) = await self._calls.call(self._command(text, log_id, *args))
        if isinstance(result, Rejected):
            raise result
        return result

    def _command(self, text: str, log_id: str, *args: object) -> tuple[Any, ...]:
        return "EVALSHA", _SHA[text], 2, self._key(log_id, "head"), self._key(log_id, "events"), *args

    def _key(self, log_id: str, what: str) -> str:
        return f"{self._prefix}:{{{log_id}}}:{what}"


# The results of the scripts that stand for a refusal.
_REFUSALS: dict[int, Callable[[str], Refusal | KeyError]] = {-1: Fenced, -2: Ended, -3: KeyError, -4: LogLost}


class _Notifications:
    """One connection, subscribed to the channels of the logs that this process waits for.

    Every new subscription, also after a lost connection, ends the waits for its log: an append may have come just
    before it. From then on the last announced seq is kept, so that no append between a read and a wait is missed.
    """

    def __init__(self, client: Any, key: Callable[[str, str], str], waiters: Waiters) -> None:
        self._client, self._key, self._waiters = client, key, waiters
        self._pubsub: Any = None
        # By log id: the last seq announced, 0 before the first. None: the subscription is not confirmed yet.
        self._last_seqs: dict[str, int | None] = {}
        self._pending: list[str] = []  # subscriptions that are not sent yet
        self._idle: set[str] = set()  # had no waiter at the last check
        self._checked_at = 0.0
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def subscribe(self, log_id: str) -> int | None:
        """Subscribe to that log, unless it is subscribed; return its entry in `_last_seqs`."""
        if log_id not in self._last_seqs:
            self._last_seqs[log_id] = None
            self._pending.append(log_id)
            self._start("subscribe", self._send_pending)
        self._start("listen", self._listen_always)
        return self._last_seqs[log_id]

    def note(self, log_id: str, seq: int) -> None:
        """Note the last seq of a log, if it is subscribed."""
        known = self._last_seqs.get(log_id)
        if known is not None:
            self._last_seqs[log_id] = max(known, seq)

    async def aclose(self) -> None:
        """Close the connection. Cancels more than once: a library in between may swallow a cancellation."""
        open_tasks = set(self._tasks.values())
        while open_tasks:
            for task in open_tasks:
                task.cancel()
            _, open_tasks = await asyncio.wait(open_tasks, timeout=_RECONNECT_SECONDS)

    def _start(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if name not in self._tasks or self._tasks[name].done():
            self._tasks[name] = asyncio.create_task(work(), name=f"redis log, {name}", context=Context())

    async def _send_pending(self) -> None:
        """Send the pending subscriptions, if there is a connection. A new connection subscribes to everything."""
        import redis

        while self._pending and self._pubsub is not None:
            pending, self._pending = self._pending, []
            with contextlib.suppress(redis.RedisError, OSError):  # the listener gets the same error
                await self._pubsub.subscribe(*map(self._channel, pending))

    async def _listen_always(self) -> None:
        import redis

        while True:
            try:
                async with self._client.pubsub() as pubsub:
                    await self._listen(pubsub)
            except (redis.RedisError, OSError) as error:
                logger.info("stream log: reconnecting to Redis after: %s", error)
            except Exception:
                logger.exception("stream log: the connection to Redis failed")
            finally:
                self._pubsub = None
            await asyncio.sleep(_RECONNECT_SECONDS)

    async def _listen(self, pubsub: Any) -> None:
        """Handle messages until the connection breaks or no longer answers."""
        self._pending, self._last_seqs = [], dict.fromkeys(self._waiters.awaited())
        await pubsub.subscribe(self._channel(""), *map(self._channel, self._last_seqs))
        self._pubsub = pubsub
        num_silent = 0
        while num_silent < 3:
            message = await pubsub.get_message(timeout=_SILENCE_SECONDS)
            if message is None:
                num_silent += 1
                await pubsub.ping()
            else:
                num_silent = 0
                self._on_message(message)
            await self._unsubscribe_idle(pubsub)
        raise ConnectionResetError("Redis no longer answers")

    def _on_message(self, message: dict[str, Any]) -> None:
        if message["type"] in ("message", "subscribe"):
            log_id = bytes(message["channel"]).decode().rpartition("}")[0].rpartition("{")[2]
            last_seq = int(message["data"]) if message["type"] == "message" else 0  # 0: subscribed, or dropped
            if log_id in self._last_seqs:
                self._last_seqs[log_id] = last_seq
            self._waiters.wake(log_id, last_seq or None)

    async def _unsubscribe_idle(self, pubsub: Any) -> None:
        """Unsubscribe from logs without a waiter at two checks in a row."""
        if time.monotonic() < self._checked_at + _IDLE_SECONDS:
            return
        self._checked_at = time.monotonic()
        idle = {log_id for log_id in self._last_seqs if log_id not in self._waiters.by_log}
        gone, self._idle = idle & self._idle, idle
        for log_id in gone:
            del self._last_seqs[log_id]
        if gone:
            await pubsub.unsubscribe(*map(self._channel, gone))

    def _channel(self, log_id: str) -> str:
        return self._key(log_id, "news")


async def _problems(calls: Calls) -> AsyncIterator[str]:
    try:
        appendonly, fsync = await _config(calls, "appendonly"), await _config(calls, "appendfsync")
        policy = await _config(calls, "maxmemory-policy")
    except LogUnavailable as error:
        if error.message == DOWN:
            raise
        yield "CONFIG GET is forbidden in this Redis: its persistence cannot be checked. Make sure of appendonly yes."
        return
    if appendonly != "yes":
        yield "Redis keeps streams in memory only (appendonly no): a restart loses them. Set appendonly yes."
    elif fsync != "always":
        yield f"A crash of Redis may lose the last seconds of streams (appendfsync {fsync}). Set appendfsync always."
    if policy != "noeviction":
        yield f"Redis may evict running streams when its memory is full (maxmemory-policy {policy}): set noeviction."


async def _config(calls: Calls, name: str) -> str:
    ((_, value),) = await calls.call(("CONFIG", "GET", name))
    return bytes(value).decode()
