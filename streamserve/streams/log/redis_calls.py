"""`Calls`: commands to Redis in batches, retried during an outage; the part of redis-py that `RedisLog` uses.

Lives on one event loop. redis-py itself retries nothing here: a call returns one result or raises LogUnavailable.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextvars import Context
from typing import Any

from streamserve.streams.log.base import LogFull, LogUnavailable, Rejected

logger = logging.getLogger("streamserve.streams")

DOWN = "The stream log's Redis cannot be reached."
_CLOSED = "The stream log is closed."
_FULL = "The stream log's Redis is full."
_FAILED = "The stream log's Redis refused a command."
_BATCH = 256
_RETRY_SECONDS = 0.05
_FULL_RETRY_SECONDS = 30

Command = tuple[Any, ...]


class _Call:
    """A command, and the future of its result."""

    __slots__ = ("command", "result")

    def __init__(self, command: Command) -> None:
        self.command = command
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def resolve(self, result: Any) -> None:
        """Set the result; the caller gets an exception raised. A cancelled call is skipped."""
        if self.result.done():
            return
        if isinstance(result, Exception):
            self.result.set_exception(result)
        else:
            self.result.set_result(result)


def connect(url: str, seconds: float) -> Any:
    """Return a client whose calls return or raise within about `seconds`. Only `Calls` retries."""
    try:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError as error:
        raise ImportError('RedisLog needs redis-py: pip install "streamserve[redis]"') from error
    return Redis.from_url(url, retry=Retry(NoBackoff(), 0), **_options(seconds))


def connect_blocking(url: str, seconds: float) -> Any:
    """Return a blocking client, for use in a thread."""
    from redis import Redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return Redis.from_url(url, retry=Retry(NoBackoff(), 0), **_options(seconds))


def _options(seconds: float) -> dict[str, Any]:
    return {
        "socket_timeout": seconds,
        "socket_connect_timeout": seconds,
        "socket_keepalive": True,
        "protocol": 2,
    }


class Calls:
    """Commands to Redis, one batch after the other: calls made during a batch are in the next.

    A batch is retried until it has results, for `patience_seconds`. Later batches of the same outage are tried once or
    twice. `scripts` maps sha1 to text. The queue is bounded by its callers: each call has a task that waits for it.
    """

    def __init__(self, client: Any, patience_seconds: float, scripts: Mapping[str, str]) -> None:
        self._client, self._scripts = client, scripts
        self._patience_seconds = patience_seconds
        self._queue: list[_Call] = []
        self._sender: asyncio.Task[None] | None = None
        self._is_down = self._is_closed = self._has_loaded = False

    async def call(self, *commands: Command) -> list[Any]:
        """Send the commands together and return their results, `Rejected` among them.

        Raises LogUnavailable if a call fails because Redis does not work.
        """
        if self._is_closed:
            raise LogUnavailable(_CLOSED)
        calls = [_Call(command) for command in commands]
        self._queue += calls
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_all(), name="redis log", context=Context())
        results = await asyncio.gather(*(call.result for call in calls), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, Rejected):
                raise result
        return results

    async def aclose(self) -> None:
        """Finish the calls that were made, and refuse new calls."""
        self._is_closed = True
        if self._sender is not None:
            await asyncio.wait([self._sender])

    async def _send_all(self) -> None:
        while self._queue:
            batch, self._queue = self._queue[:_BATCH], self._queue[_BATCH:]
            try:
                await self._resolve(batch)
            except BaseException as error:  # cancelled, or a bug: no call may wait for ever
                for call in batch:
                    call.resolve(LogUnavailable(DOWN))
                if not isinstance(error, Exception):
                    raise
                logger.exception("stream log: a batch of calls to Redis failed")

    async def _resolve(self, batch: list[_Call]) -> None:
        """Resolve every call of the batch."""
        give_up_at = time.monotonic() + (_RETRY_SECONDS if self._is_down else self._patience_seconds)
        has_tried = self._is_down
        while batch:
            again: list[_Call] = []
            for call, result in zip(batch, await self._send(batch), strict=True):
                if not isinstance(result, Exception):
                    self._note_outage(None)
                    call.resolve(result)
                elif not is_transient(result):
                    call.resolve(_refusal(result))
                elif (not has_tried or time.monotonic() < give_up_at) and not self._is_closed:
                    again.append(call)
                else:
                    self._note_outage(result)
                    call.resolve(_refusal(result))
            batch = again
            has_tried = True  # at least two tries: after a pause of this process its time is over, but Redis answers
            if batch:
                await asyncio.sleep(_RETRY_SECONDS)

    async def _send(self, batch: Sequence[_Call]) -> Sequence[Any]:
        """Return a result or an exception for each call."""
        import redis

        pipeline = self._client.pipeline(transaction=False)
        for call in batch:
            pipeline.execute_command(*call.command)
        try:
            if not self._has_loaded:
                await self._load_scripts()
            results: Sequence[Any] = await pipeline.execute(raise_on_error=False)
        except (redis.RedisError, OSError) as error:
            self._has_loaded = False  # a restarted Redis has no scripts
            return [error] * len(batch)
        if any(isinstance(result, redis.exceptions.NoScriptError) for result in results):
            self._has_loaded = False  # Redis was restarted; these calls are retried
        return results

    async def _load_scripts(self) -> None:
        for text in self._scripts.values():
            await self._client.execute_command("SCRIPT LOAD", text)
        self._has_loaded = True

    def _note_outage(self, error: Exception | None) -> None:
        """Log the beginning and the end of an outage, not every call in between."""
        if (error is not None) != self._is_down:
            self._is_down = error is not None
            if error is not None:
                logger.error("stream log: Redis is down: %s", error)
            else:
                logger.warning("stream log: Redis is back")


def is_transient(error: Exception) -> bool:
    """Return whether a retry of the same call may succeed."""
    import redis

    away = (redis.ConnectionError, redis.TimeoutError, OSError, redis.exceptions.NoScriptError)
    refused = (redis.exceptions.AuthenticationError, redis.exceptions.AuthorizationError)
    return isinstance(error, away) and not isinstance(error, refused)


def _refusal(error: Exception) -> LogUnavailable | Rejected:
    """Return what stands for an error of Redis, whose text goes to the log only."""
    import redis

    if is_transient(error):
        return LogUnavailable(DOWN)
    logger.error("stream log: Redis refused a command: %s", error)
    text = str(error)
    if "WRONGTYPE" in text or isinstance(error, redis.DataError):  # this command only: an outage would not end
        return Rejected(_FAILED)
    if "OOM" in text or "No space left" in text or "used memory > 'maxmemory'" in text:
        return LogFull(_FULL, retry_after=_FULL_RETRY_SECONDS)
    return LogUnavailable(_FAILED)
