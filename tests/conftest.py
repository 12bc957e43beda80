"""Fixtures of the Django side: a runtime per test, callers of every kind, and real daphne servers."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import date
from functools import partial
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.test import AsyncClient
from django.test.utils import override_settings
from django.utils import timezone
from hypothesis import HealthCheck, settings

from streamserve import Run, pipeline
from streamserve.clients import factory
from streamserve.clients.pipeline.client import forget
from streamserve.clients.thread.client import ThreadClient
from streamserve.models import ApiKey
from streamserve.testing import DaphneServer
from streamserve.web import site
from tests.support.streams.hand_made import Gate, started_echo

pytest_plugins = [
    "streamserve.pytest_fixtures",
    "tests.support.plugins.collection",
    "tests.support.plugins.covering",
    "tests.support.plugins.flush",
    "tests.support.plugins.migrated",
    "tests.support.plugins.patience",
    "tests.support.plugins.schedule",
    "tests.support.checks.stream_watch",
]

# A test run started in the background of a script inherits an ignored SIGINT, and so would the commands under test.
signal.signal(signal.SIGINT, signal.default_int_handler)
# None of the laws that Hypothesis tries is about time, and a busy machine draws slowly.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")
# Before anything imports torch: spinning OpenMP threads make a busy machine ten times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until `condition()` holds; fail after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  (the condition has no event)
            await asyncio.sleep(0.005)


async def until_ready() -> None:
    """Load the models of the current settings."""
    site.start_loading()
    await until(lambda: all(one.describe().state == "ready" for one in site.get_site().clients.values()))


@pytest.fixture(autouse=True)
def levels() -> Iterator[None]:
    """Put log levels and handlers back: Celery's worker sets the root's, and Django sets up a site's `LOGGING`."""
    loggers = [logging.getLogger(), logging.getLogger("streamserve")]
    before = [(one.level, one.handlers[:], one.propagate) for one in loggers]
    yield
    for one, (level, handlers, propagate) in zip(loggers, before, strict=True):
        one.setLevel(level)
        one.handlers[:] = handlers
        one.propagate = propagate


@pytest.fixture
async def engine(transactional_db: Any) -> AsyncIterator[None]:
    """The echo engine, ready, on this test's event loop; closed after it."""
    await until_ready()
    yield
    await site.reset()


@pytest.fixture
def gate() -> Gate:
    """The gate through which steps of the echo engine pass."""
    return Gate()


@pytest.fixture
def site_gate(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """The gate, through which the steps of the site's echo engines pass too: of those that are made from now on.

    An answer that has to be under way while a test acts is held here: a slow engine may have ended it by then.
    """
    monkeypatch.setattr(factory, "echo_client", partial(factory.echo_client, on_plan=gate))
    yield gate
    gate.open()


@pytest.fixture
async def echo(gate: Gate) -> AsyncIterator[ThreadClient]:
    """The echo engine on a thread, ready, behind `gate`."""
    client = await started_echo(gate)
    yield client
    gate.open()
    await client.aclose()


@pytest.fixture
def one_day(monkeypatch: pytest.MonkeyPatch) -> date:
    """Today, until the test ends: of what is counted by the day, midnight would make two rows."""
    today = timezone.localdate()
    monkeypatch.setattr(timezone, "localdate", lambda: today)
    return today


@pytest.fixture
def anonymous_site() -> Iterator[None]:
    """A site that serves visitors without a login."""
    with override_settings(STREAMSERVE={"TESTING": True, "ANONYMOUS": True}):
        yield


@pytest.fixture
def alice(transactional_db: Any) -> Any:
    """A user."""
    return get_user_model().objects.create_user("alice", password="pw")


@pytest.fixture
def bob(transactional_db: Any) -> Any:
    """Another user."""
    return get_user_model().objects.create_user("bob", password="pw")


@pytest.fixture
def staff(transactional_db: Any) -> Any:
    """Staff without any of our permissions."""
    return get_user_model().objects.create_user("staff", password="pw", is_staff=True)


@pytest.fixture
def root(transactional_db: Any) -> Any:
    """A superuser."""
    return get_user_model().objects.create_superuser("root", password="pw")


@pytest.fixture
def alice_key(alice: Any) -> str:
    """A key of alice's."""
    return ApiKey.objects.make(user=alice, name="alice's")[1]


@pytest.fixture
def lonely_key(transactional_db: Any) -> str:
    """A key without a user."""
    return ApiKey.objects.make(name="lonely")[1]


@pytest.fixture
def ops_key(transactional_db: Any) -> str:
    """A key for operators."""
    return ApiKey.objects.make(name="ops", scopes=["ops"])[1]


@pytest.fixture
def review() -> Iterator[None]:
    """A pipeline of that name."""

    async def review(run: Run) -> None:
        """Review an account."""

    pipeline(review)
    yield
    forget("review")


class Caller:
    """An AsyncClient that posts JSON with the headers of a login or a key."""

    def __init__(self, user: Any = None, key: str | None = None) -> None:
        self.client = AsyncClient(raise_request_exception=True)
        if user is not None:
            self.client.force_login(user)
        self.headers = {"authorization": f"Bearer {key}"} if key else {}

    async def post(self, path: str, body: Any = None, **headers: str) -> Any:
        return await self.client.post(path, body, content_type="application/json", headers={**self.headers, **headers})

    async def get(self, path: str, **headers: str) -> Any:
        return await self.client.get(path, headers={**self.headers, **headers})

    async def delete(self, path: str) -> Any:
        return await self.client.delete(path, headers=self.headers)


async def body_of(response: Any) -> bytes:
    """Return a response's whole body, streamed or not."""
    if not response.streaming:
        return bytes(response.content)
    return b"".join([chunk async for chunk in response.streaming_content])


@pytest.fixture(scope="session")
def hard_server(django_db_setup: None) -> Iterator[DaphneServer]:
    """tests/site/settings.py under daphne: ATOMIC_REQUESTS, LoginRequiredMiddleware, GZip, sync middleware.

    One for all tests; each empties the database after itself.
    """
    with DaphneServer(settings_module="tests.site.settings") as server:
        yield server
