"""Laws of the load test's HTTP, against a server on a socket: every way a body is framed, and every way it ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from streamserve.loadtest.site_http import Address, BadAddress, Broken, Frame, Refused, SiteHTTP

EVENTS = (
    b": ok\n\nevent: meta\nid: abc-1\ndata: {}\n\n: keepalive\n"
    b'event: token\nid: abc-2\ndata: {"text":"\xc3\xa4"}\n\nevent: done\ndata: {}\n\n'
)
FRAMES = [Frame("meta", 1, {}), Frame("token", 2, {"text": "ä"}), Frame("done", None, {})]
OK = b"HTTP/1.1 200 OK\r\n"


def chunked(size: int) -> bytes:
    """Return the events in chunks of that size, with the extension that a proxy may add."""
    parts = [EVENTS[at : at + size] for at in range(0, len(EVENTS), size)]
    return b"".join(b"%x;a=b\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@contextlib.asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[SiteHTTP]:
    """Have a server on a free port that gives each connection the next answer and closes it."""
    left = list(answers)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(left.pop(0))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield SiteHTTP(Address.parse(f"http://127.0.0.1:{port}/ai/"))


async def frames_of(site: SiteHTTP) -> list[Frame]:
    async with site.open("POST", "/streams", "key", {}) as answer:
        return [frame async for frame in answer.frames()]


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"\r\n" + EVENTS,
        OK + b"Content-Length: %d\r\n\r\n" % len(EVENTS) + EVENTS,
        *(OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(size) for size in (1, 7, 1000)),
    ],
)
async def test_every_framing_gives_the_same_events(answer: bytes) -> None:
    """Up to the end, by a length, in chunks that end anywhere, inside a code point too; comments are no events."""
    async with answering(answer) as site:
        assert await frames_of(site) == FRAMES


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\r\n",
        b"HTTP/1.1 two hundred\r\n\r\n",
        OK + b"Content-Length: 999\r\n\r\n" + EVENTS,
        OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(7)[:40],
        OK + b"Transfer-Encoding: chunked\r\n\r\nno size\r\n",
    ],
)
async def test_an_answer_that_is_cut_is_broken(answer: bytes) -> None:
    """No head, half a body, half a chunk: no answer is taken for whole."""
    async with answering(answer) as site:
        with pytest.raises(Broken):
            await frames_of(site)


async def test_refusals_have_their_code_or_their_status() -> None:
    """Our error's code and message; of a proxy's page the status, of a redirect where it leads."""
    ours = b'{"error": {"code": "overloaded", "message": "Full."}}'
    async with answering(
        b"HTTP/1.1 503 No\r\nContent-Length: %d\r\n\r\n" % len(ours) + ours,
        b"HTTP/1.1 502 Bad Gateway\r\n\r\n<html>",
        b"HTTP/1.1 301 Moved\r\nLocation: https://here/\r\n\r\n",
    ) as site:
        found = []
        for _ in range(3):
            with pytest.raises(Refused) as refused:
                await frames_of(site)
            found.append((refused.value.code, str(refused.value)))
    assert found == [
        ("overloaded", "Full."),
        ("502", "HTTP status 502"),
        ("301", "HTTP status 301, to https://here/"),
    ]


async def test_nothing_at_an_address_is_broken() -> None:
    """A port at which nothing listens."""
    async with answering() as site:
        pass
    with pytest.raises(Broken, match="nothing answers"):
        await frames_of(site)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("https://Example.org/ai/", "https://example.org/ai"),
        ("http://[::1]:80/", "http://[::1]"),
    ],
)
def test_addresses(url: str, shown: str) -> None:
    """The default port is not shown; a prefix is kept."""
    assert str(Address.parse(url)) == shown


@pytest.mark.parametrize(
    "url", ["", "ftp://a", "http://", "http://a:99999", "http://a:x", "http://u:p@a", "http://a/?q=1", "http://a/#b"]
)
def test_what_is_no_address(url: str) -> None:
    """Nor is an address with a login, a query or a fragment."""
    with pytest.raises(BadAddress):
        Address.parse(url)
