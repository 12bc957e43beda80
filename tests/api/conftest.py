"""Who asks the routes in these tests, and a site that several processes could share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve.web import site
from tests.conftest import Caller, until_ready
from tests.support.streams.hand_made import Gate


@pytest.fixture
def caller(alice_key: str) -> Caller:
    return Caller(key=alice_key)


@pytest.fixture
async def shared(
    request: pytest.FixtureRequest, tmp_path: Path, transactional_db: Any, site_gate: Gate
) -> AsyncIterator[None]:
    """The site of the module's SHARED settings, on a state folder of its own.

    `site.reset()` is the end of one process and the start of the next.
    """
    conf = {"CLIENT": "thread", "STATE_DIR": tmp_path, **request.module.SHARED}
    with override_settings(STREAMSERVE=conf):
        await until_ready()
        yield
        await site.reset()
