"""The stream fixtures, for this folder too, and the framework-free app over the gated echo engine."""

from collections.abc import AsyncIterator

import pytest

from streamserve.asgi import app
from streamserve.asgi.application import StreamApp
from streamserve.clients.thread.client import ThreadClient
from tests.streams.conftest import echo_streams, scripted, streams
from tests.support.apps.app_calls import by_header

__all__ = ["echo_streams", "scripted", "streams"]


@pytest.fixture
async def ai(echo: ThreadClient) -> AsyncIterator[StreamApp]:
    """The app over the gated echo engine."""
    async with app(models={"echo": echo}, authenticate=by_header, prompt_in_url=True) as serving:
        yield serving
