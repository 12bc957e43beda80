"""Write back-pressure over real sockets: a reader that takes nothing costs little memory, and no byte is lost."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from tests.proofs.scale import scaled
from tests.support.apps.flow_app import BLOCK, pattern
from tests.support.processes import resident_bytes
from tests.support.servers.flow_driver import (
    APP,
    BLOCK_SECONDS,
    chunks,
    close_code,
    connect,
    flow,
    frame,
    frames,
    get,
    read_all,
    read_until,
    state,
    stock,
    until,
    websocket,
)
from tests.support.servers.ports import free_port
from tests.support.servers.web_servers import Server, uvicorn

NUM_READERS = 50
ANSWER_BYTES = scaled(20 * 2**20 // BLOCK, least=2 * 2**20 // BLOCK) * BLOCK
NUM_PIECES = scaled(320)  # of an answer that is read late
BYTES_A_READER = 256 * 1024

Ask = Callable[[Server, str], socket.socket]
SERVERS: dict[str, Callable[[], contextlib.AbstractContextManager[Server]]] = {
    "FlowServer": flow,
    "uvicorn": partial(uvicorn, APP),
}
ASKS = [pytest.param(get, id="http"), pytest.param(websocket, id="websocket")]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """FlowServer with a stall limit of a minute."""
    with flow("--stall-seconds", "60") as server:
        yield server


def warm_up(server: Server) -> int:
    """Serve a few requests, so that what the server needs once is there; return its memory then."""
    with httpx.Client(base_url=server.url) as client:
        for _ in range(20):
            assert len(client.get(f"/fill?bytes={BLOCK * 16}").content) == BLOCK * 16
    return resident_bytes(server.process.pid)


def settled(server: Server) -> int:
    """Wait until no app sends any more, and return how many bytes all have sent."""
    seen: list[int] = []

    def is_still() -> bool:
        seen.append(state(server)["sent"])
        return len(seen) > 10 and len(set(seen[-10:])) == 1

    until(is_still, "nothing is sent any more", server)
    return seen[-1]


def growth(server: Server, ask: Ask) -> float:
    """Return how much memory each of 50 readers that never read costs."""
    before = warm_up(server)
    clients = [ask(server, f"/fill?bytes={ANSWER_BYTES}") for _ in range(NUM_READERS)]
    settled(server)
    grown = resident_bytes(server.process.pid) - before
    for client in clients:
        client.close()
    return grown / NUM_READERS


@pytest.mark.proof
@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("name", SERVERS)
def test_idle_readers_cost_little(name: str, ask: Ask) -> None:
    """50 readers of a large answer that never read cost at most 256 kB each."""
    with SERVERS[name]() as server:
        grown = growth(server, ask)
        print(f"\n{name}: {grown / 1024:.0f} kB a reader of {ANSWER_BYTES / 2**20:.0f} MB who never reads")
        assert grown <= BYTES_A_READER, server.output()


@pytest.mark.proof
@pytest.mark.parametrize("ask", ASKS)
def test_stock_daphne_fails_that_test(ask: Ask) -> None:
    """The same readers cost stock daphne their whole answers: the test above can fail, and daphne#170 is still open."""
    with stock() as server:
        grown = growth(server, ask)
        print(f"\nstock daphne: {grown / 1024:.0f} kB a reader of {ANSWER_BYTES / 2**20:.0f} MB who never reads")
        assert grown > 2 * BYTES_A_READER, server.output()


@pytest.mark.parametrize("ask", ASKS)
def test_other_readers_are_not_starved(server: Server, ask: Ask) -> None:
    """While 50 readers read nothing, every other reader is served whole."""
    clients = [ask(server, f"/fill?bytes={ANSWER_BYTES}") for _ in range(NUM_READERS)]
    settled(server)
    with httpx.Client(base_url=server.url) as other:
        for _ in range(scaled(200)):
            assert other.get(f"/fill?bytes={BLOCK * 4}").content == pattern(0, BLOCK * 4)
    assert state(server)["connections"] > NUM_READERS, "the readers were to be there still"
    for client in clients:
        client.close()


def test_a_late_reader_gets_every_byte_in_order(server: Server) -> None:
    """A reader that starts late, in small bites, gets all bytes in order, once, with a proper end."""
    with get(server, f"/fill?bytes={BLOCK * NUM_PIECES}", "Connection: close") as client:
        sent = settled(server)
        assert httpx.get(f"{server.url}/fill?bytes=0").content == b""
        assert state(server)["sent"] == sent, "the app was to wait"
        data, is_clean = read_all(client)
    body, is_whole = chunks(data)
    assert (is_clean, is_whole, len(body)) == (True, True, BLOCK * NUM_PIECES)
    assert body == b"".join(pattern(index % 16 * BLOCK, BLOCK) for index in range(NUM_PIECES))


@pytest.mark.proof
def test_a_late_websocket_reader_gets_every_message_in_order(server: Server) -> None:
    """Over a WebSocket the app's close frame follows with its code, which autobahn alone would refuse."""
    with websocket(server, f"/fill?bytes={BLOCK * NUM_PIECES}") as client:
        sent = settled(server)
        assert state(server)["sent"] == sent
        data, _ = read_all(client)
    got = [payload for opcode, payload in frames(data) if opcode == 2]
    assert got == [pattern(index % 16 * BLOCK, BLOCK) for index in range(NUM_PIECES)]
    assert close_code(data) == 1001


@pytest.mark.parametrize("ask", ASKS)
def test_an_app_can_ask_how_far_behind_its_reader_is(server: Server, ask: Ask) -> None:
    """The scope's extension counts the bytes that the reader's system has not acknowledged."""
    with ask(server, f"/fill?bytes={BLOCK * 8}") as client:
        settled(server)
        assert state(server)["untaken"] > BLOCK // 2
        read_until(client, b"\r\n0\r\n\r\n" if ask is get else b"\x88\x06")
        until(lambda: state(server)["untaken"] == 0, "all is taken", server)


def test_over_a_unix_socket(tmp_path: Path) -> None:
    """Over a unix socket, as behind nginx on one machine, there is no TCP to tune, and all else holds."""
    path = str(tmp_path / "s")
    with flow("-u", path) as server, socket.socket(socket.AF_UNIX) as client:
        until(lambda: Path(path).exists(), "it listens there too")
        client.connect(path)
        client.sendall(f"GET /fill?bytes={BLOCK * NUM_PIECES * 4} HTTP/1.1\r\nConnection: close\r\n\r\n".encode())
        assert settled(server) < BLOCK * NUM_PIECES * 4
        body, is_whole = chunks(read_all(client)[0])
        assert (is_whole, len(body)) == (True, BLOCK * NUM_PIECES * 4)


def test_over_tls(tmp_path: Path) -> None:
    """The limits are those of the connection under TLS; answers, also early ones, come whole."""
    certificate(tmp_path / "tls.pem")
    port, total = free_port(), BLOCK * NUM_PIECES * 4
    where = f"ssl:port={port}:interface=127.0.0.1:privateKey={tmp_path}/tls.pem:certKey={tmp_path}/tls.pem"
    with flow("-e", where) as server:
        with tls(port, f"GET /fill?bytes={total} HTTP/1.1\r\nConnection: close\r\n\r\n") as client:
            assert settled(server) < total
            body, is_whole = chunks(read_all(client)[0])
            assert (is_whole, len(body)) == (True, total)
        with tls(port, "POST /body HTTP/1.1\r\nContent-Length: 1000000000\r\n\r\n") as client:
            assert read_all(client)[0].startswith(b"HTTP/1.1 413 ")


def tls(port: int, request: str) -> ssl.SSLSocket:
    """Ask over TLS, without a check of the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(30)
    client.connect(("127.0.0.1", port))
    out = context.wrap_socket(client)
    out.sendall(request.encode())
    return out


def certificate(path: Path) -> None:
    """Write a key and its own certificate, with what daphne's TLS brings along."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(days=1), now + timedelta(days=1))
    public = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + public)


def test_one_large_message_is_written_piece_by_piece(server: Server) -> None:
    """A body sent in one message comes whole, and is not in the buffer while its reader takes none of it."""
    with get(server, f"/fill?bytes={2 * 2**20}&piece=all", "Connection: close") as client:
        settled(server)
        filled = state(server)["filled"]
        body, is_whole = chunks(read_all(client)[0])
    assert (is_whole, body == pattern(0, 2 * 2**20)) == (True, True)
    assert state(server)["filled"] == filled + 1, "the app's send was to wait for its reader"


@pytest.mark.parametrize("piece", ["65536", "all"])
def test_head_has_no_body(server: Server, piece: str) -> None:
    """Whatever messages a body came in, the next response on the connection starts where it should."""
    with httpx.Client(base_url=server.url) as client:
        for _ in range(3):
            assert client.head(f"/fill?bytes={BLOCK * 4}&piece={piece}").content == b""
            assert client.get(f"/fill?bytes={BLOCK}").content == pattern(0, BLOCK)


def test_pipelined_requests_wait_for_the_reader(server: Server) -> None:
    """Pipelined requests that are never read are not all answered into memory; read late, they come in order."""
    one = f"GET /fill?bytes={BLOCK * 4} HTTP/1.1\r\nHost: localhost\r\n"
    filled = state(server)["filled"]
    with get(server, f"/fill?bytes={BLOCK * 4}") as client:
        client.sendall(f"{one}\r\n".encode() * 18 + f"{one}Connection: close\r\n\r\n".encode())
        settled(server)
        assert state(server)["filled"] < filled + 5
        data, is_clean = read_all(client)
    assert is_clean
    for _ in range(20):
        assert chunks(data) == (pattern(0, BLOCK * 4), True)
        _, _, data = data.partition(b"\r\n0\r\n\r\n")
    assert data == b""


@pytest.mark.proof
def test_an_app_that_does_not_receive_stops_the_reading(server: Server) -> None:
    """A flood of WebSocket messages waits in the client, not in the server; received late, none is lost."""
    before = resident_bytes(server.process.pid)
    with websocket(server, "/deaf") as client:
        read_until(client, b"\r\n\r\n")
        num_sent = flood(client, frame(2, b"x" * 125) * 100)
        assert num_sent > 100 * 125
        assert resident_bytes(server.process.pid) - before < 8 * 2**20
        assert httpx.get(f"{server.url}/go").text == "ok"
        client.setblocking(True)
        data, _ = read_all(client)
    assert close_code(b"\r\n\r\n" + data) == 4500


def flood(client: socket.socket, data: bytes) -> int:
    """Send until the connection takes no more; return how many bytes it took."""
    num = 0
    client.settimeout(2.0)
    try:
        while num < 2**30:
            num += client.send(data)
    except TimeoutError:
        return num
    raise AssertionError("the server reads without end")


def test_a_body_that_its_app_does_not_take_is_not_read(server: Server) -> None:
    """However much of the response its client takes meanwhile, what has come of the body stays bounded."""
    body, num_sent, num_taken = memoryview(bytes(30 * 2**20)), 0, 0
    with connect(server) as client:
        client.sendall(b"POST /bursts HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body))
        client.setblocking(False)
        while num_taken < 6 * 2**18 and num_sent < len(body):
            readable, writable, _ = select.select([client], [client], [], BLOCK_SECONDS)
            assert readable or writable
            if readable:
                num_taken += len(client.recv(2**16))
            if writable:
                num_sent += client.send(body[num_sent : num_sent + 2**16])
    assert num_sent < 2**24, "the inbox, and what the system holds"


@pytest.mark.proof
def test_a_large_body_is_not_held_in_memory(server: Server) -> None:
    """The app takes a form of 24 MiB in pieces, out of the file that the server has put it into."""
    before = warm_up(server)
    form = {"content-type": "multipart/form-data; boundary=x"}
    length = 24 * 2**20
    with httpx.Client(base_url=server.url, timeout=60) as client:
        assert client.post("/body", content=b"x" * length, headers=form).text == str(length)
    assert resident_bytes(server.process.pid) - before < 8 * 2**20
