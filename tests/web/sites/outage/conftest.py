"""A site whose log of events has no room for a while."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve.web import site as site_module
from tests.conftest import until_ready
from tests.support.checks.stream_checks import Frame, notices_of
from tests.support.streams.outages import FullFile, quick

__all__ = ["quick"]

LOG_FILE = "streams.sqlite3"
# More than three times what the engine may be ahead of its reader: it cannot end before it is read.
BODY = {"prompt": "tell me", "max_tokens": 1000, "seed": 7, "ignore_eos": True}


@pytest.fixture
async def full(tmp_path: Path) -> AsyncIterator[FullFile]:
    """The log of a site on `tmp_path`."""
    made = FullFile(tmp_path / LOG_FILE)
    yield made
    await made.aclose()


@pytest.fixture
async def site(tmp_path: Path, full: FullFile, transactional_db: Any) -> AsyncIterator[site_module.DjangoSite]:
    """A site on that log, whose outages last for ever. Its engine is slow enough to be read."""
    settings = {"MODELS": {"echo": {"PATH": "echo"}}, "CLIENT": "thread", "STATE_DIR": tmp_path}
    settings |= {"STREAMS": {"SNAPSHOT_EVENTS": 0, "LOG_OUTAGE_SECONDS": 3600}, "ECHO_STEP_SECONDS": 0.0005}
    with override_settings(STREAMSERVE=settings):
        await until_ready()
        made = site_module.get_site()
        made.log = made.streams.log = made.streams.writer.log = full.log
        yield made
        full.store.is_full = False
        await site_module.reset()


class Response:
    """A stream that a caller reads as it comes."""

    def __init__(self, response: Any) -> None:
        assert response.status_code == 200
        self.stream_id = response["X-Stream-Id"]
        self.path = f"/streams/{self.stream_id}"
        self.data = b""
        self._chunks = aiter(response)

    async def read(self, until_there: bytes = b"") -> None:
        """Read until there is such a frame; without one, to the end."""
        async for chunk in self._chunks:
            self.data += chunk
            if until_there and until_there in self.data:
                return
        assert not until_there, self.data[-200:]

    @property
    def notices(self) -> list[str]:
        return [frame.json["status"] for frame in notices_of(self.data) if frame.event == "status"]

    async def close(self) -> None:
        await self._chunks.aclose()


def num_tokens(frames: list[Frame]) -> int:
    """Count the tokens that native frames hold."""
    return sum(len(frame.json["token_ids"]) for frame in frames if frame.event == "token")
