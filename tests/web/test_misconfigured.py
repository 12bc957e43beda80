"""Laws of a site whose settings are wrong, or whose folder cannot be used: it says so, and serves its own pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve.web import site
from tests.conftest import Caller
from tests.support.streams.log_lines import captured_events
from tests.web.sockets.conftest import connect

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(params=["RATES", "STATE_DIR"])
def wrong(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Settings of which a value is wrong, or whose folder is a file."""
    (tmp_path / "taken").write_text("")
    values = {"RATES": {"user": {"none": 1}}, "STATE_DIR": str(tmp_path / "taken" / "state")}
    return {
        "LOG": "file",
        "MODELS": {"echo": {"PATH": "echo"}},
        "CLIENT": "thread",
        request.param: values[request.param],
    }


@pytest.fixture
async def serves_wrong(alice_key: str, wrong: dict[str, Any]) -> Any:
    await site.reset()
    with override_settings(STREAMSERVE=wrong):
        yield next(name for name in ("RATES", "STATE_DIR") if name in wrong)
        await site.reset()


@pytest.mark.parametrize("path", ["/jobs", "/v1/models", "/readyz"])
async def test_a_request_is_refused_by_name(path: str, serves_wrong: str) -> None:
    """503 with a code and Retry-After. The log names the setting in one line; the reply does not."""
    with captured_events() as lines:
        response = await Caller().get(path)
    assert (response.status_code, response["Retry-After"]) == (503, "120")
    assert b"site_misconfigured" in response.content or path == "/readyz"
    assert serves_wrong not in response.content.decode()
    (line,) = [one for one in lines if one["event"] == "site_misconfigured"]
    assert serves_wrong in line["problem"]
    assert response["X-Request-Id"] == line["request_id"]
    assert not line.get("cause")


async def test_a_socket_is_refused(serves_wrong: str) -> None:
    """Its handshake ends; the log has the line."""
    socket = connect("")
    with captured_events() as lines:
        connected, _ = await socket.connect()
    assert not connected
    assert lines[-1]["event"] == "site_misconfigured"


async def test_a_server_begins_to_serve(serves_wrong: str) -> None:
    """It logs the problem in one line and starts, as the site has pages of its own."""
    with captured_events() as lines, override_settings(DEBUG=False):
        await site.begin_to_serve()
    assert [one["event"] for one in lines] == ["site_misconfigured"]
