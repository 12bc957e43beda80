"""Servers that a remote client talks to: one on a real socket whose bytes a test writes, and llama-server."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import ssl
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest

from streamserve.clients.remote.client import RemoteClient
from streamserve.clients.remote.config import RemoteConfig
from streamserve.clients.remote.config import Upstream as Server
from streamserve.protocol.errors import Refused, StreamserveError
from streamserve.protocol.events import Error, Event, Meta
from streamserve.protocol.grammar import check_events
from streamserve.protocol.requests import Admission, GenerateRequest, Message, Resume, SamplingParams
from tests.support.engines.clients import collect, split
from tests.support.engines.runners import DEADLINE_SECONDS
from tests.support.models.gguf_models import write_gguf

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
JSON = "Content-Type: application/json"
DONE = b"data: [DONE]\n\n"
META = Meta(model="m", stream_id="s", created=1, has_token_ids=False)


def chunk(data: bytes) -> bytes:
    """Return `data` as one chunk of HTTP's chunked coding."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    """Return a value as one server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def delta(index: int = 0, finish_reason: str | None = None, **fields: Any) -> bytes:
    """Return one chunk of a chat completion."""
    return event({"choices": [{"index": index, "delta": fields, "finish_reason": finish_reason}]})


def usage(prompt: int = 5, completion: int = 3, cached: int = 2) -> bytes:
    """Return the chunk with the usage."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return event({"choices": [], "usage": {**counts, "prompt_tokens_details": {"cached_tokens": cached}}})


def response(status: str, body: bytes = b"", *headers: str) -> bytes:
    """Return a whole HTTP response."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass
class Asked:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any] = field(default_factory=dict)


Answer = Callable[[Asked, asyncio.StreamWriter], Awaitable[bool | None]]


class Upstream:
    """Answers `GET /v1/models` by itself and each POST by `answers[i]`, the last one for all that follow.

    An answer that returns False closes the connection. `gone` has an event for each POST: its client has left. While
    it `is_frozen` it takes requests and answers none.
    """

    def __init__(self, *answers: Answer, owned_by: str = "vllm") -> None:
        self.answers = list(answers)
        self.models: bytes = json.dumps({"data": [{"id": "m", "owned_by": owned_by, "max_model_len": 512}]}).encode()
        self.models_status = "200 OK"
        self.ssl: ssl.SSLContext | None = None
        self.asked: list[Asked] = []
        self.gone: list[asyncio.Event] = []
        self.num_connections = self.num_open = 0
        self.is_frozen = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    @property
    def posts(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.method == "POST"]

    @property
    def url(self) -> str:
        assert self._server is not None
        scheme = "http" if self.ssl is None else "https"
        return f"{scheme}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, ssl=self.ssl)

    async def stop(self) -> None:
        """Close the port, and break every connection."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        while self._writers:  # noqa: ASYNC110  # each handler ends by itself
            await asyncio.sleep(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.num_open += 1
        self._writers.add(writer)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                while await self._answer(await _read_request(reader), reader, writer):
                    pass
        finally:
            self.num_open -= 1
            writer.close()
            self._writers.discard(writer)

    async def _answer(self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        self.asked.append(asked)
        if self.is_frozen:
            await reader.read()
            return False
        if asked.method == "GET":
            writer.write(response(self.models_status, self.models, "Content-Type: application/json"))
            await writer.drain()
            return True
        gone = asyncio.Event()
        self.gone.append(gone)
        answer = self.answers[min(len(self.gone), len(self.answers)) - 1]
        watch = asyncio.ensure_future(_until_gone(reader, gone))
        task = asyncio.ensure_future(_call(answer, asked, writer))
        try:
            await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                return False
            return task.result() is not False
        finally:
            for one in (task, watch):
                one.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)


async def _call(answer: Answer, asked: Asked, writer: asyncio.StreamWriter) -> bool | None:
    try:
        return await answer(asked, writer)
    except ConnectionError:
        return False


async def _until_gone(reader: asyncio.StreamReader, gone: asyncio.Event) -> None:
    """Set `gone` when the client closes. A client of ours sends nothing before the response is whole."""
    while not reader.at_eof():
        if reader._buffer:  # type: ignore[attr-defined]  # the next request
            await asyncio.Event().wait()
        with suppress(ConnectionError):
            await reader._wait_for_data("watch")  # type: ignore[attr-defined]
    gone.set()


async def _read_request(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Asked(method, path, headers, json.loads(body) if body else {})


def says(*parts: bytes, whole: bool = True) -> Answer:
    """Return an answer of these parts, each a chunk of its own; with `whole` False the connection then breaks."""

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        writer.write(STREAM_HEAD)
        for part in parts:
            writer.write(chunk(part))
            await writer.drain()
            await asyncio.sleep(0)
        if whole:
            writer.write(LAST_CHUNK)
            await writer.drain()
        return whole

    return answer


def raw(data: bytes, *, keeps: bool = True) -> Answer:
    """Return an answer of exactly these bytes."""

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> bool:
        writer.write(data)
        await writer.drain()
        return keeps

    return answer


PLAIN = (delta(role="assistant", content=""), delta(content="Hel"), delta(content="lo."))
WHOLE = (*PLAIN, delta(finish_reason="stop"), usage(), DONE)


def chat(text: str = "Hello?", **fields: Any) -> GenerateRequest:
    """Return a chat request; `fields` are GenerateRequest's or SamplingParams'."""
    outer = {name: fields.pop(name) for name in list(fields) if name in GenerateRequest.__slots__}
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 64, **fields})
    messages = (Message(role="user", content=text),)
    return GenerateRequest(**{"model": "m", "messages": messages, "sampling": sampling, **outer})


def chatting(text: str = "Hello?", **fields: Any) -> tuple[GenerateRequest, Admission, Resume]:
    """Return what `chat` makes, with its admission and where it continues; `fields` are those of either, too."""
    return split(lambda rest: chat(text, **rest), fields)


def counts(client: RemoteClient) -> Counter[str]:
    """Return the figures of a client's upstreams, added up."""
    return sum((Counter(figures) for figures in client.stats().upstreams.values()), Counter())


@asynccontextmanager
async def remote(upstream: Upstream, **fields: Any) -> AsyncIterator[RemoteClient]:
    """Start the upstream and a client of it that has found it ready."""
    await upstream.start()
    async with client_of(RemoteConfig(**{"alias": "m", "url": upstream.url, **fields})) as client:
        yield client
    await upstream.stop()


@asynccontextmanager
async def several(
    *upstreams: Upstream, own: Sequence[dict[str, Any]] = (), clock: Callable[[], float] = time.monotonic, **fields: Any
) -> AsyncIterator[RemoteClient]:
    """Start upstreams, named a, b and so on, and a client of all of them; `own` are the fields of each."""
    for upstream in upstreams:
        await upstream.start()
    servers = tuple(
        Server(**{"name": name, "url": upstream.url, **more})
        for name, upstream, more in zip_longest(ascii_lowercase[: len(upstreams)], upstreams, own, fillvalue={})
    )
    async with client_of(RemoteConfig(**{"alias": "m", "upstreams": servers, **fields}), clock) as client:
        yield client
    for upstream in upstreams:
        await upstream.stop()


@asynccontextmanager
async def client_of(config: RemoteConfig, clock: Callable[[], float] = time.monotonic) -> AsyncIterator[RemoteClient]:
    """Yield a client that knows the state of each of its servers."""
    client = RemoteClient(config, clock=clock)
    try:
        client.start()
        await until(lambda: all(server.is_known.is_set() for server in client.servers))
        yield client
    finally:
        await client.aclose()


def certificate(folder: Path) -> Path:
    """Write a certificate of 127.0.0.1, and its key, into one file that signs itself; return the file."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    file = folder / "server.pem"
    file.write_bytes(secret + made.public_bytes(serialization.Encoding.PEM))
    return file


@contextmanager
def llama_server(folder: Path) -> Iterator[str]:
    """Serve a tiny random model by llama.cpp's server, in this process; yields the base of its routes."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install -r tests/requirements.txt")
    params = xllamacpp.CommonParams()
    params.model.path = str(write_gguf(folder / "tiny.gguf"))
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 2048, 2, 1
    params.warmup, params.verbosity = False, -1
    server = xllamacpp.Server(params)
    yield f"{server.listening_address}/v1"
    del server


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until the condition holds."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():  # noqa: ASYNC110  # state without an event to wait on
            await asyncio.sleep(0.001)


async def never(asked: Asked, writer: asyncio.StreamWriter) -> None:
    """Answer nothing, ever."""
    await asyncio.Event().wait()


def begins(*parts: bytes) -> Any:
    """Return an answer that begins and then stays silent."""

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + b"".join(chunk(part) for part in parts))
        await asyncio.Event().wait()

    return answer


async def outcome(client: RemoteClient, **fields: Any) -> tuple[str, bool, str]:
    """Return code, whether it may be tried again, and message of the error that a request ends in, here or there."""
    try:
        generation = await client.generate(*chatting(**fields))
    except StreamserveError as error:
        return error.code, isinstance(error, Refused), error.message
    events: list[Event] = await collect(generation)  # type: ignore[arg-type]
    if generation.parked is not None:
        return generation.parked.reason, True, ""
    assert isinstance(events[-1], Error), events
    return events[-1].code, events[-1].retryable, events[-1].message


async def turns(num: int = 50) -> None:
    """Let the loop run on."""
    for _ in range(num):
        await asyncio.sleep(0)


async def ask(client: RemoteClient, **fields: Any) -> list[Event]:
    events = await collect(await client.generate(*chatting(**fields)))  # type: ignore[arg-type]
    check_events([META, *events])
    return events
