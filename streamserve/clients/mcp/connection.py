"""`Connection`: one session with an MCP server, over its pipes or over HTTP, by the official package.

The package's scopes belong to the task that opened them, so one task opens, holds and closes a connection. It ends by
itself when the server's output ends, as of a program that has crashed. Lives on the loop of servers.py's thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from streamserve.clients.mcp.config import McpConfig

logger = logging.getLogger("streamserve.mcp")


class Connection:
    """A session that is opened at once. `is_over`: it serves no further call."""

    def __init__(self, config: McpConfig) -> None:
        loop = asyncio.get_running_loop()
        self.is_over = False
        self._config = config
        self._is_left = asyncio.Event()
        self._client: asyncio.Future[Any] = loop.create_future()
        self._task = loop.create_task(self._run(), name=f"MCP server {config.name}")
        self._too_late = loop.call_later(config.connect_seconds, self._give_up)

    async def client(self) -> Any:
        """Return the package's `Client`, once it is connected. Raises what kept it from that."""
        return await asyncio.shield(self._client)

    def leave(self) -> None:
        """Have it end: calls under way fail."""
        self.is_over = True
        self._is_left.set()

    async def aclose(self) -> None:
        """End it and wait for that: a program is given the time to end that the specification says, then killed."""
        self.leave()
        if not self._client.done():
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _give_up(self) -> None:
        if not self._client.done():
            self._client.set_exception(TimeoutError(f"no connection within {self._config.connect_seconds:g} s"))
            self._task.cancel()

    async def _run(self) -> None:
        from mcp import Client

        try:
            transport = _noticing(_transport(self._config), self.leave)
            async with Client(transport, cache=None) as client:
                if not self._client.done():
                    self._client.set_result(client)
                await self._is_left.wait()
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # the package's task groups raise groups of whatever has failed
            if self._client.done():
                logger.warning("the connection to the MCP server %s has ended: %r", self._config.name, error)
            else:
                self._client.set_exception(ConnectionError(f"{error!r}"))
            if not isinstance(error, Exception):
                raise
        finally:
            self.is_over = True
            self._too_late.cancel()
            if not self._client.done():
                self._client.set_exception(ConnectionError("the connection was closed"))
            self._client.exception()  # looked at: nobody may be waiting


def _transport(config: McpConfig) -> Any:
    """Return the package's transport for a server."""
    if config.command:
        from mcp.client.stdio import StdioServerParameters, stdio_client

        program = StdioServerParameters(command=config.command, args=list(config.args), env=dict(config.env))
        return stdio_client(program, errlog=_errors_to())
    return _over_http(config)


@asynccontextmanager
async def _over_http(config: McpConfig) -> AsyncIterator[Any]:
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    timeout = httpx2.Timeout(config.connect_seconds, read=config.timeout_seconds + config.connect_seconds)
    async with (
        httpx2.AsyncClient(headers=dict(config.headers), timeout=timeout, trust_env=False) as http,
        streamable_http_client(config.url, http_client=http) as streams,
    ):
        yield streams


def _errors_to() -> Any:
    """Return where a program's error output goes: where this process's does."""
    with suppress(AttributeError, OSError, ValueError):
        sys.stderr.fileno()
        return sys.stderr
    return os.open(os.devnull, os.O_WRONLY)


@asynccontextmanager
async def _noticing(transport: Any, on_end: Callable[[], None]) -> AsyncIterator[Any]:
    """Yield the transport's streams; `on_end` is called when the server's output ends."""
    async with transport as (reading, writing):
        yield _Noticed(reading, on_end), writing


class _Noticed:
    """A stream of the server's messages; see `_noticing`."""

    def __init__(self, stream: Any, on_end: Callable[[], None]) -> None:
        self._stream, self._on_end = stream, on_end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def receive(self) -> Any:
        try:
            return await self._stream.receive()
        except Exception:
            self._on_end()
            raise

    def __aiter__(self) -> _Noticed:
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._stream.__anext__()
        except Exception:  # StopAsyncIteration too
            self._on_end()
            raise

    async def __aenter__(self) -> _Noticed:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> Any:
        return await self._stream.__aexit__(*error)
