"""Laws of the warning that a site's ASGI application is not wrapped: it comes where a server would see it, only."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from streamserve.web import views
from tests.conftest import Caller, body_of
from tests.site.bare_asgi import application
from tests.support.apps.asgi_app import Client
from tests.support.streams.log_lines import captured_events

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engine")]

ASK = {"prompt": "hi", "max_tokens": 2}
WARNING = "asgi_application_not_wrapped"


@pytest.fixture(autouse=True)
def not_warned() -> Iterator[None]:
    """A process that has not warned yet."""
    views._warn_of_unwrapped_application.cache_clear()
    yield
    views._warn_of_unwrapped_application.cache_clear()


async def test_a_bare_application_is_warned_of_once(alice_key: str) -> None:
    """Two streams of it make one line with the remedy."""
    headers = [
        (b"host", b"testserver"),
        (b"authorization", f"Bearer {alice_key}".encode()),
        (b"content-type", b"application/json"),
    ]
    with captured_events() as lines:
        for _ in range(2):
            await Client(
                application, method="POST", path="/streams", body=json.dumps(ASK).encode(), headers=headers
            ).task
    assert [line["event"] for line in lines].count(WARNING) == 1


async def test_the_test_client_warns_of_nothing(alice_key: str) -> None:
    """A site's own tests call views without any application."""
    with captured_events() as lines:
        await body_of(await Caller(key=alice_key).post("/streams", ASK))
    assert WARNING not in [line["event"] for line in lines]
