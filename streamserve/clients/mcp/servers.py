"""`McpServers`: the site's MCP servers, and calls of their tools. The package runs on a thread with a loop of its own.

    readers' loop ──► tools, call ──► thread "mcp": a loop, a `Server` for each name, a `Connection` each
                  ◄── text

So reading a large result, or starting a program, holds no reader up. Nothing is connected before the first use; a
connection that has ended is opened anew by the next use, at growing intervals while that fails. A call that has been
sent is not sent again: it may have had its effect.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from streamserve.clients.mcp.config import McpConfig
from streamserve.clients.mcp.connection import Connection
from streamserve.protocol.errors import StreamserveError
from streamserve.protocol.measures import MCP_CALLS

T = TypeVar("T")
logger = logging.getLogger("streamserve.mcp")

MAX_RESULT_CHARS = 20_000
_MAX_DESCRIPTION_CHARS, _MAX_SCHEMA_CHARS, _MAX_PAGES = 4_000, 64_000, 20
_LIST_SECONDS = 60.0  # so long a listing is believed
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.5, 30.0
_MOST_TIMEOUTS = 3  # in a row: then the server is taken to hang
_CLOSED, _INVALID_REQUEST = -32000, -32600


class McpUnavailable(StreamserveError):
    """An MCP server cannot be reached, or lacks a tool that TOOLS lists."""

    code = "mcp_unavailable"
    http_status = 503
    is_retryable = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTool:
    """A tool as its server describes it. `schema` is the JSON Schema of its arguments."""

    name: str
    description: str
    schema: Mapping[str, Any]


class McpServers:
    """The servers of MCP_SERVERS, by name. Its methods are for any loop; `aclose` ends the thread."""

    def __init__(self, configs: Mapping[str, McpConfig]) -> None:
        self.configs = configs
        self._servers = {name: _Server(config) for name, config in configs.items()}
        self._lock = threading.Lock()  # guards `_loop` and `_thread`
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    async def tools(self, name: str) -> tuple[ServerTool, ...]:
        """Return the tools of a server that its TOOLS lists, in that order. Raises McpUnavailable, KeyError."""
        return await self._there(self._servers[name].tools())

    async def call(self, name: str, tool: str, arguments: Mapping[str, Any]) -> str:
        """Return a call's result as text for the model: of a failure too, "Error: …". Cancelled, the call is."""
        return await self._there(self._servers[name].call(tool, arguments))

    async def aclose(self) -> None:
        """Close every connection, and end the thread."""
        with self._lock:
            self._is_closed = True
            loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        ending = asyncio.run_coroutine_threadsafe(self._close(), loop)
        await asyncio.gather(asyncio.wrap_future(ending), return_exceptions=True)
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.to_thread(thread.join)

    async def _close(self) -> None:
        await asyncio.gather(*(server.aclose() for server in self._servers.values()), return_exceptions=True)

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work on the thread's loop."""
        try:
            loop = self._running_loop()
        except BaseException:
            work.close()
            raise
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._is_closed:
                raise McpUnavailable("The server is shutting down.")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._serve, args=(self._loop,), name="mcp", daemon=True)
                self._thread.start()
            return self._loop

    @staticmethod
    def _serve(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_forever()
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()


class _Server:
    """One server: its connection, if any, and its listing. On the thread's loop."""

    def __init__(self, config: McpConfig) -> None:
        self._config = config
        self._connection: Connection | None = None
        self._listed: tuple[ServerTool, ...] = ()
        self._listed_until = self._paused_until = 0.0
        self._num_failures = self._num_timeouts = 0

    async def tools(self) -> tuple[ServerTool, ...]:
        """See `McpServers.tools`."""
        if time.monotonic() < self._listed_until:
            return self._listed
        try:
            async with asyncio.timeout(self._config.connect_seconds + self._config.timeout_seconds):
                found = await self._list(await self._client())
        except McpUnavailable:
            raise
        except Exception as error:
            self._drop(error)
            raise self._unavailable() from error
        missing = [name for name in self._config.tools if name not in found]
        if missing:
            logger.error("the MCP server %s has no usable tool %s", self._config.name, ", ".join(missing))
            raise McpUnavailable(f"The tool {missing[0]} is not there now.")
        self._listed = tuple(found[name] for name in self._config.tools)
        self._listed_until = time.monotonic() + _LIST_SECONDS
        return self._listed

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """See `McpServers.call`."""
        outcome, text = "error", f"Error: {tool} is not available now."
        try:
            result = await self._ask(tool, arguments)
            self._num_timeouts = 0
            is_error = bool(result.is_error)
            outcome, text = ("error" if is_error else "ok"), text_of(result)
            if is_error:
                text = f"Error: {text}" if text else f"Error: {tool} has failed."
        except McpUnavailable:
            outcome = "unavailable"
        except TimeoutError:
            outcome, text = "timeout", f"Error: {tool} took longer than {self._config.timeout_seconds:g} seconds."
            self._num_timeouts += 1
            if self._num_timeouts >= _MOST_TIMEOUTS:
                self._drop(TimeoutError(f"{self._num_timeouts} calls in a row had no answer"))
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except Exception as error:
            code = getattr(error, "code", None)
            if isinstance(code, int) and code != _CLOSED:  # the server's own refusal
                text = f"Error: {getattr(error, 'message', error)}"[:MAX_RESULT_CHARS]
            elif isinstance(error, ValueError):  # of pydantic: an answer that is none, on a sound connection
                logger.warning("the MCP server %s answered a call of %s wrongly: %s", self._config.name, tool, error)
                text = f"Error: {tool} gave no result that can be read."
            else:
                outcome = "unavailable"
                self._drop(error)
        finally:
            MCP_CALLS.by_outcome[self._config.name, tool, outcome] += 1
        return text

    async def aclose(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            await self._connection.aclose()

    async def _ask(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        """Return the package's result of a call; a server elsewhere that has forgotten the session is asked again."""
        for is_last in (False, True):
            client = await self._client()
            try:
                async with asyncio.timeout(self._config.timeout_seconds):
                    return await client.call_tool(tool, dict(arguments))
            except Exception as error:
                if is_last or getattr(error, "code", None) != _INVALID_REQUEST or "Session" not in str(error):
                    raise
                self._drop(error)  # "Session terminated": it was not run
        raise AssertionError("unreachable")

    async def _client(self) -> Any:
        """Return a connected client. Raises McpUnavailable."""
        if self._connection is None or self._connection.is_over:
            if time.monotonic() < self._paused_until:
                raise self._unavailable()
            self._connection = Connection(self._config)
        connection = self._connection
        try:
            client = await connection.client()
        except Exception as error:
            if connection is self._connection:
                self._connection = None
                self._num_failures += 1
                pause = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2 ** (self._num_failures - 1))
                self._paused_until = time.monotonic() + pause
                logger.warning("the MCP server %s cannot be reached: %s", self._config.name, error)
            raise self._unavailable() from error
        self._num_failures = 0
        return client

    async def _list(self, client: Any) -> dict[str, ServerTool]:
        """Return the listed tools by name, with what a model can be shown of them."""
        found: dict[str, ServerTool] = {}
        cursor = None
        for _ in range(_MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            for one in page.tools:
                if one.name in self._config.tools and one.name not in found:
                    schema = dict(one.input_schema)
                    if schema.get("type") != "object" or len(json.dumps(schema)) > _MAX_SCHEMA_CHARS:
                        logger.error("the MCP server %s: the schema of %s cannot be used", self._config.name, one.name)
                        continue
                    description = (one.description or one.title or "")[:_MAX_DESCRIPTION_CHARS]
                    found[one.name] = ServerTool(name=one.name, description=description, schema=schema)
            cursor = page.next_cursor
            if not cursor:
                break
        return found

    def _drop(self, error: BaseException) -> None:
        """Leave the connection: the next use opens another."""
        logger.warning("the MCP server %s has failed: %r", self._config.name, error)
        self._listed_until, self._num_timeouts = 0.0, 0
        if self._connection is not None:
            self._connection.leave()

    def _unavailable(self) -> McpUnavailable:
        return McpUnavailable(f"The tools of {self._config.name} are not available now. Try again.")


def text_of(result: Any) -> str:
    """Return what a call gave as text, cut to MAX_RESULT_CHARS: texts, and a line for what is none."""
    parts: list[str] = []
    num_chars = 0
    for block in result.content:
        part = _block_text(block)
        parts.append(part[: MAX_RESULT_CHARS + 1 - num_chars])
        num_chars += len(part) + 1
        if num_chars > MAX_RESULT_CHARS:
            break
    text = "\n".join(parts)
    if not text and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_RESULT_CHARS else text[:MAX_RESULT_CHARS] + "…"


def _block_text(block: Any) -> str:
    """Return one part of a result: its text, or what it is."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource":
        text = getattr(block.resource, "text", None)
        return str(text) if text is not None else f"[a file: {block.resource.uri}]"
    if block.type == "resource_link":
        return f"[{block.name}: {block.uri}]"
    return f"[{block.type}: {getattr(block, 'mime_type', 'unknown')}]"
