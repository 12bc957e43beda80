"""An engine process and peers that are broken, foreign, of another version, or do not read."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from streamserve.clients.process import messages
from streamserve.clients.process.client import ProcessClient
from streamserve.clients.process.config import LaunchConfig, config_hash, engine_paths, listening, prepare_folder
from streamserve.clients.process.frame_socket import MAX_UNSENT_BYTES, Connection
from streamserve.clients.process.link import spawn
from streamserve.clients.process.messages import (
    PROTOCOL,
    Cancel,
    Goodbye,
    Hello,
    Open,
    ReaderAt,
    State,
    Tokenize,
    Welcome,
)
from streamserve.protocol.events import Done
from streamserve.protocol.frames import MAX_FRAME_BYTES, FrameError, frame
from streamserve.protocol.measures import Arrival
from streamserve.protocol.requests import NO_CALLER, GenerateRequest, Resume
from tests.support.engines.engine_processes import DEADLINE_SECONDS, ask, asking, connected, spec_in, until

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


def hello(spec: LaunchConfig, protocol: int = PROTOCOL) -> bytes:
    return messages.encode(Hello(protocol=protocol, config_hash=config_hash(spec), made_at=0.0))


@asynccontextmanager
async def dialled(spec: LaunchConfig, first: bytes | None = None) -> AsyncIterator[Connection]:
    """A hand-made connection, which has sent `first` (a good greeting) and is closed at the end."""
    loop, path = asyncio.get_running_loop(), str(engine_paths(spec).socket)
    _, connection = await loop.create_unix_connection(Connection, path)
    connection.send(hello(spec) if first is None else first)
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            yield connection
    finally:
        connection.abort()
        await connection.lost()


async def answer(connection: Connection) -> messages.ToClient:
    """Return the next message that is no heartbeat."""
    while True:
        payload = await connection.receive()
        assert payload is not None, "the connection is lost"
        message = messages.TO_CLIENT.decode(payload)
        if not isinstance(message, State):
            return message


BROKEN = {
    "garbage": b"\xc1\xff\x00garbage",
    "nothing": b"",
    "another shape": msgspec.msgpack.encode({"id": 1}),
    "unknown message": msgspec.msgpack.encode(["Shutdown", 1]),
    "a message of ours to them": messages.encode(Goodbye("idle")),
    "a field missing": msgspec.msgpack.encode(["Cancel"]),
    "a field of another type": msgspec.msgpack.encode(["Cancel", "one"]),
    "a request of another type": msgspec.msgpack.encode(["Open", 1, {"model": 3}]),
    "nested without end": b"\x93\xa4Open\x01" + b"\x91" * 100_000,
}


@pytest.mark.parametrize("payload", BROKEN.values(), ids=BROKEN)
async def test_a_broken_frame_ends_its_connection_and_nothing_else(shared_engine: LaunchConfig, payload: bytes) -> None:
    """Other connections continue; the same bytes as a handshake end theirs too."""
    async with connected(shared_engine) as other:
        generation = await other.generate(ask(max_tokens=100))
        async with dialled(shared_engine) as connection:
            connection.send(payload)
            await connection.lost()
        async with dialled(shared_engine, payload) as connection:
            await connection.lost()
        assert isinstance([event async for event in generation][-1], Done)


@pytest.mark.parametrize("raw", [(MAX_FRAME_BYTES + 1).to_bytes(4, "big"), b"GET / HTTP/1.1\r\n\r\n"])
async def test_an_oversized_frame_is_refused_by_its_length(shared_engine: LaunchConfig, raw: bytes) -> None:
    """The connection ends at the length, before the payload; the same for HTTP."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, str(engine_paths(shared_engine).socket))
        await loop.sock_sendall(sock, frame(hello(shared_engine)) + raw)
        async with asyncio.timeout(DEADLINE_SECONDS):
            while await loop.sock_recv(sock, 65536):
                pass


async def test_an_id_cannot_be_used_twice_at_once(slow_engine: LaunchConfig) -> None:
    """A second request with an open id ends the connection."""
    async with dialled(slow_engine) as connection:
        for _ in range(2):
            connection.send(messages.encode(Open(1, *asking(max_tokens=400))))
        await connection.lost()


async def test_positions_for_fewer_choices_than_there_are_end_the_connection(slow_engine: LaunchConfig) -> None:
    """A position list that is too short is a protocol error."""
    async with dialled(slow_engine) as connection:
        connection.send(messages.encode(Open(1, *asking(max_tokens=400, n=2))))
        assert isinstance(await welcomed(connection), messages.Opened)
        connection.send(messages.encode(ReaderAt(1, ())))
        await connection.lost()


async def welcomed(connection: Connection) -> messages.ToClient:
    """Take the welcome; return the next message that is no heartbeat."""
    payload = await connection.receive()
    assert payload is not None
    messages.decode_welcome(payload)
    return await answer(connection)


async def test_unknown_ids_are_ignored(shared_engine: LaunchConfig) -> None:
    """A message for a generation that has ended meanwhile changes nothing."""
    async with dialled(shared_engine) as connection:
        connection.send(messages.encode(Cancel(77)))
        connection.send(messages.encode(ReaderAt(77, (1,))))
        connection.send(messages.encode(Tokenize(1, ask("ab"), NO_CALLER)))
        assert await welcomed(connection) == messages.Reply(1, (97, 98))


async def test_another_protocol_gets_a_welcome_and_is_refused(shared_engine: LaunchConfig) -> None:
    """Every version can read the handshake."""
    async with dialled(shared_engine, hello(shared_engine, protocol=PROTOCOL + 1)) as connection:
        payload = await connection.receive()
        assert payload is not None
        assert messages.decode_welcome(payload).protocol == PROTOCOL
        await connection.lost()


async def test_a_worker_of_another_protocol_fails_with_a_message(folder: Path) -> None:
    """It cannot use the engine, and gives up after a few tries."""
    spec = spec_in(folder, max_failures=2, made_at=1.0)
    welcome = Welcome(protocol=PROTOCOL + 1, config_hash="other", made_at=2.0, pid=1, started_at=0.0)
    prepare_folder(engine_paths(spec))
    with listening(engine_paths(spec)) as listener:
        greet = lambda: Connection(lambda connection: connection.send(messages.encode(welcome)))  # noqa: E731
        server = await asyncio.get_running_loop().create_unix_server(greet, sock=listener)
        client = ProcessClient(spec)
        client.start()
        await until(lambda: client.describe().state == "failed")
        assert "version" in client.describe().message
        await client.aclose()
        server.close()


async def test_a_peer_that_does_not_read_is_dropped(folder: Path) -> None:
    """The connection ends at 64 MiB of unread bytes, so memory is bounded."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with theirs:
        _, connection = await asyncio.get_running_loop().create_connection(Connection, sock=ours)
        for _ in range(MAX_UNSENT_BYTES // 2**20 + 2):
            connection.send(bytes(2**20))
        await connection.lost()


async def test_a_peer_is_asked_after_only_when_it_is_silent() -> None:
    """A peer that sends as often as heartbeats come is not asked after, which reads a file of each thread."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    gaps: list[float] = []

    def busy(seconds: float) -> float:
        gaps.append(seconds)
        return 0.0

    with theirs:
        _, connection = await asyncio.get_running_loop().create_connection(Connection, sock=ours)
        for _ in range(5):
            for _ in range(3):
                connection._watched_at -= 0.3
                connection.watch(100.0, busy, lambda: None)
            connection.data_received(frame(b"heartbeat"))
        assert gaps == []
        for _ in range(10):
            connection._watched_at -= 0.5
            connection._silence._looked_at -= 0.5
            connection.watch(100.0, busy, lambda: None)
        assert len(gaps) >= 5
        connection.abort()
        await connection.lost()


async def test_the_files_are_private(folder: Path) -> None:
    """The folder, the socket and the log belong to our user alone."""
    spec = spec_in(folder)
    await spawn(spec)
    assert engine_paths(spec).socket.stat().st_mode & 0o777 == 0o600
    assert engine_paths(spec).socket.parent.stat().st_mode & 0o777 == 0o700
    assert engine_paths(spec).log.stat().st_mode & 0o777 == 0o600


_DIAL = """
import os, socket, sys
os.setuid(int(sys.argv[3]))
sock = socket.socket(socket.AF_UNIX)
try:
    sock.connect(sys.argv[1])
    sock.sendall(bytes.fromhex(sys.argv[2]))
    sys.exit(bool(sock.recv(1)))
except (ConnectionResetError, BrokenPipeError):
    sys.exit(0)
"""


@as_root
async def test_another_user_is_refused_by_uid(folder: Path) -> None:
    """SO_PEERCRED names the user, and the connection ends without a byte."""
    spec = spec_in(folder)
    await spawn(spec)
    for path, mode in ((folder, 0o755), (folder / "run", 0o755), (engine_paths(spec).socket, 0o666)):
        path.chmod(mode)
    command = [sys.executable, "-I", "-c", _DIAL, str(engine_paths(spec).socket), frame(hello(spec)).hex()]
    for user, is_answered in ((NOBODY, False), (os.geteuid(), True)):
        result = await asyncio.to_thread(subprocess.run, [*command, str(user)], check=False)
        assert result.returncode == is_answered


_LISTEN = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
sock = socket.socket(socket.AF_UNIX)
sock.bind(sys.argv[1])
sock.listen()
print("listening", flush=True)
sys.exit(bool(sock.accept()[0].recv(1)))
"""


@as_root
async def test_another_users_socket_gets_no_byte(folder: Path) -> None:
    """The client sends no byte to a socket of another user in our folder."""
    spec, run = spec_in(folder, autostart=False), folder / "run"
    _open_for_others(folder, run)
    command = [sys.executable, "-I", "-c", _LISTEN, str(engine_paths(spec).socket), str(NOBODY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as theirs:  # noqa: ASYNC220
        assert theirs.stdout is not None
        await asyncio.to_thread(theirs.stdout.readline)
        run.chmod(0o700)
        client = ProcessClient(spec)
        client.start()
        assert await asyncio.to_thread(theirs.wait) == 0
        assert not client.is_connected
        await client.aclose()


def _open_for_others(folder: Path, run: Path) -> None:
    folder.chmod(0o755)
    run.mkdir()
    run.chmod(0o777)


def test_refusals_are_rebuilt_from_what_is_known() -> None:
    """An unknown error class becomes the root of the tree."""
    error = messages.error_of(messages.Refusal(1, "TooNew", "no.", "too_new", None, 0))
    assert (type(error).__name__, error.code) == ("StreamserveError", "too_new")


def test_a_handshake_of_a_later_version_can_be_read() -> None:
    """Unknown fields of a handshake are ignored."""
    data = msgspec.msgpack.encode({"protocol": 9, "config_hash": "x", "made_at": 1.0, "mood": "good"})
    assert messages.decode_hello(data).protocol == 9
    with pytest.raises(FrameError):
        messages.decode_hello(b"")


def test_an_arrival_crosses_as_its_moment() -> None:
    """What is known of a request's way in stays with the stream; the engine gets a number."""
    admission = replace(NO_CALLER, received_at=Arrival(12.5, admitted_at=12.75))
    sent = messages.TO_ENGINE.decode(messages.encode(messages.Open(1, GenerateRequest(model="m"), admission, Resume())))
    assert isinstance(sent, messages.Open)
    assert sent.admission == replace(NO_CALLER, received_at=12.5)
    assert type(sent.admission.received_at) is float
