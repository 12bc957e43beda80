"""Readers that request a large answer and never read it cost the server little and other readers nothing."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest

from tests.proofs.scale import IS_SOAK, scaled
from tests.proofs.support.users import DEADLINE_SECONDS, Site
from tests.support.checks.stream_checks import check_native, text_of
from tests.support.docs.demo_site import environment
from tests.support.processes import resident_bytes
from tests.support.servers.flow_driver import connect
from tests.support.servers.web_servers import SERVERS, wait_until_ready

pytestmark = [pytest.mark.timeout(1200)]

NUM_READERS = 50 if IS_SOAK else 20
NUM_OTHERS = scaled(200)
needs_soak = pytest.mark.skipif(not IS_SOAK, reason="needs STREAMSERVE_SOAK=1: takes minutes")
# With 20 candidates a token is 2.5 kB on the wire, and a page of the log 64 of them: 20 MB. Without, 0.1 kB. uvicorn
# counts what the kernel holds as read, some megabytes, and so a plain answer as read to its end.
LARGE = {"prompt": "a large answer", "max_tokens": 8000, "ignore_eos": "true", "logprobs": 20}
PLAIN = {"prompt": "a long answer", "max_tokens": 8000, "ignore_eos": "true"}
SMALL = {"prompt": "a small answer", "max_tokens": 50, "ignore_eos": "true", "seed": 5}


@pytest.fixture
def site(name: str, users: tuple[Path, list[str]]) -> Iterator[Site]:
    """The demo site with its engine process, and what its web process holds at /held."""
    folder, sessions = users
    names = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.never_settings", "ALLOWED_HOSTS": "127.0.0.1"}
    with SERVERS[name]("tests.support.sites.ends_app:app", env=environment(folder, **names)) as server:
        wait_until_ready(server.url)
        yield Site(server, folder, sessions)


def held(site: Site) -> dict[str, Any]:
    """Return what the web process holds."""
    value: dict[str, Any] = httpx.get(f"{site.server.url}/held", timeout=DEADLINE_SECONDS).json()
    return value


@contextlib.contextmanager
def never_reading(site: Site, answer: dict[str, Any], num_readers: int) -> Iterator[None]:
    """Open so many such readers, one after the other, until the engine does nothing for them; then they leave."""
    with contextlib.ExitStack() as stack:
        for number in range(num_readers):
            stack.enter_context(contextlib.closing(asked(site, answer, number)))
            site.until(lambda: held(site)["readers"] > number, "it is there")  # noqa: B023
        site.until(lambda: is_parked(site), "all are parked")
        yield
    site.until(lambda: held(site)["readers"] == held(site)["generations"] == 0, "all have left")


def is_parked(site: Site) -> bool:
    """Whether no generation is open, and none is requested meanwhile: the kernel may take more."""
    return all(held(site)["generations"] == 0 for _ in range(20))


def asked(site: Site, answer: dict[str, Any], number: int) -> socket.socket:
    """Request that answer as that user, on a connection with a small receive buffer; read nothing."""
    client = connect(site.server)
    lines = [f"GET /streams/new?{urlencode(answer)} HTTP/1.1", "Host: 127.0.0.1"]
    lines += [f"Cookie: sessionid={site.sessions[number]}", "Sec-Fetch-Site: same-origin", "", ""]
    client.sendall("\r\n".join(lines).encode())
    return client


@pytest.mark.parametrize(
    ("name", "answer", "kilobytes"),
    [
        pytest.param("daphne", PLAIN, 256, id="daphne, plain"),
        pytest.param("daphne", LARGE, 256, id="daphne, 20 MB", marks=needs_soak),
        pytest.param("uvicorn", LARGE, 256, id="uvicorn, 20 MB", marks=needs_soak),
    ],
)
def test_readers_that_never_read(name: str, answer: dict[str, Any], kilobytes: int, site: Site) -> None:
    """The engine parks for each, each costs little, other answers are whole, and nothing is left when they leave."""
    with site.client(NUM_READERS) as other:
        whole = text_of(check_native(other.get("/streams/new", params=SMALL).content))
        with never_reading(site, answer, 3):  # the fixed cost of the server
            pass
        before = resident_bytes(site.server.process.pid)
        with never_reading(site, answer, NUM_READERS):
            grown = (resident_bytes(site.server.process.pid) - before) / NUM_READERS / 1024
            for number in range(NUM_OTHERS):
                text = text_of(check_native(other.get("/streams/new", params=SMALL).content))
                assert text == whole, f"answer {number}"
            site.until(lambda: held(site)["generations"] == 0, "the engine does nothing")
            assert held(site)["readers"] == NUM_READERS, "they were to be there still"
    size = f"{answer['max_tokens']} tokens, {answer.get('logprobs', 0)} candidates each"
    print(
        f"\n{name}: {grown:.0f} kB for each of {NUM_READERS} that never read {size}; {NUM_OTHERS} other answers whole"
    )
    assert grown <= kilobytes
