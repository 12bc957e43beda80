"""Thousands of connections that send nothing, heads and bodies that never end: other clients are served beside them."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Iterator

from tests.proofs.support.users import DEADLINE_SECONDS, Site
from tests.support.checks.stream_checks import check_native

NUM_IDLE = 10_000
NUM_SLOW = 200
NUM_GOOD = 20
_SPARE_DESCRIPTORS = 2_000
SLOW_HEAD = b"POST /streams HTTP/1.1\r\nHost: testserver\r\nX-Slow: "
SLOW_BODY = (
    b"POST /streams HTTP/1.1\r\nHost: testserver\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
)
# Without credentials: the length alone decides.
LARGE = SLOW_BODY.replace(b"1000", b"%d" % (2 * 1024 * 1024))


@contextlib.contextmanager
def opened(site: Site, num: int, data: bytes = b"") -> Iterator[list[socket.socket]]:
    """Open `num` connections that send `data` and no more."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(site.server.connect()) for _ in range(num)]
        for one in sockets:
            one.sendall(data)
        yield sockets


def num_possible() -> int:
    """Return how many connections this process may open: 10,000 where the system's limit allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return NUM_IDLE if hard == resource.RLIM_INFINITY else min(NUM_IDLE, hard - _SPARE_DESCRIPTORS)


def check_served(site: Site) -> None:
    """Each of some users gets a whole answer."""
    for number in range(NUM_GOOD):
        with site.client(number) as client:
            answer = client.get("/streams/new", params={"prompt": f"hello {number}", "max_tokens": 8})
            assert answer.status_code == 200
            assert check_native(answer.content)[-1].event == "done"


def status_of(connection: socket.socket) -> int:
    """Return the status of the response on a connection."""
    connection.settimeout(DEADLINE_SECONDS)
    head = b""
    while b"\r\n" not in head and (data := connection.recv(4096)):
        head += data
    return int(head.split()[1])


def test_good_clients_are_served_beside_idle_connections(site: Site) -> None:
    """On both servers, while they are open and after they have closed; and nothing of them is left."""
    before = site.least(site.num_descriptors)
    num = num_possible()
    with opened(site, num), opened(site, NUM_SLOW, SLOW_HEAD), opened(site, NUM_SLOW, SLOW_BODY) as bodies:
        site.until(lambda: site.num_descriptors() >= before + num // 2, "the server has accepted them")
        check_served(site)
        assert {status_of(one) for one in bodies} == {408}
        with opened(site, 1, LARGE) as (large,):
            assert status_of(large) == 413
        check_served(site)
    check_served(site)
    assert site.until(lambda: site.num_descriptors() <= before + 8, "their connections are closed")
    print(f"{num} idle connections and {2 * NUM_SLOW} slow ones on {site.server.process.args[2]}")  # type: ignore[index]
