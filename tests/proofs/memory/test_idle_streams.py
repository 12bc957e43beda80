"""A stream that waits holds neither a thread nor a database connection of its server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx
import pytest

from tests.proofs.support.users import NUM_USERS, Site
from tests.support.checks.stream_checks import check_native

pytestmark = pytest.mark.timeout(600)

NUM_PLAIN = 20


@contextlib.contextmanager
def opened(site: Site, path: str, num: int) -> Iterator[list[httpx.Response]]:
    """Open streams of as many users, while the engine is held; wait for the first event of each."""
    site.control("?hold=1")
    with contextlib.ExitStack() as stack:
        stack.callback(site.control, "?hold=0")
        answers = []
        for number in range(num):
            client = stack.enter_context(site.client(number))
            answers.append(stack.enter_context(client.stream("GET", path)))
            assert answers[-1].status_code == 200
        yield answers


def costs(site: Site) -> tuple[int, int]:
    """Return the threads and database connections that the server keeps; short-lived ones are not counted."""
    return site.least(site.num_threads), site.least(site.num_database_connections)


def warm_up(site: Site) -> None:
    """Let every thread pool grow to its limit."""
    with opened(site, "/streams/new?prompt=hello&max_tokens=2", 20) as answers:
        site.control("?hold=0")
        for answer in answers:
            check_native(answer.read())


def test_idle_streams_of_logged_in_users_hold_nothing(site: Site) -> None:
    """100 streams of 100 users: 0 extra threads, 0 extra database connections; then each is answered whole."""
    warm_up(site)
    before = costs(site)
    with opened(site, "/streams/new?prompt=hello&max_tokens=4", NUM_USERS) as answers:
        assert site.control()["connections"] >= NUM_USERS
        assert len({answer.headers["x-stream-id"] for answer in answers}) == NUM_USERS
        during = costs(site)
        site.control("?hold=0")
        assert [check_native(answer.read())[-1].event for answer in answers] == ["done"] * NUM_USERS
    print(f"\n{NUM_USERS} idle streams: threads {before[0]} -> {during[0]}, connections {before[1]} -> {during[1]}")
    assert during[0] <= before[0] + 2  # a pool may not have grown to its limit
    assert during[1] <= before[1]


def test_streams_of_django_itself_hold_one_each(site: Site) -> None:
    """The same site and users by `StreamingHttpResponse`: the test above can fail."""
    before = costs(site)
    with opened(site, "/plain", NUM_PLAIN) as answers:
        during = costs(site)
        site.control("?hold=0")
        for answer in answers:
            answer.read()
    print(f"\n{NUM_PLAIN} plain streams: threads {before[0]} -> {during[0]}, connections {before[1]} -> {during[1]}")
    assert during[0] - before[0] > NUM_PLAIN / 2
    assert during[1] - before[1] > NUM_PLAIN / 2
