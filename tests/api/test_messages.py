"""Error messages: they name the mistake and the way out."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import httpx
import pytest
from django.test.utils import override_settings

from streamserve.testing import DaphneServer
from streamserve.web import site
from tests.conftest import Caller, body_of, until, until_ready

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
async def caller(alice_key: str, engine: None) -> Caller:
    return Caller(key=alice_key)


async def error_of(response: Any, status: int) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert response.status_code == status, error
    return error


async def test_a_position_that_a_live_stream_does_not_have_is_named(caller: Caller) -> None:
    """Not as expired: a number beyond the last event, an id of another form, an id of another stream."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "ECHO_STEP_SECONDS": 0.02}):
        await until_ready()
        response = await caller.post("/streams", {"prompt": "tell me", "max_tokens": 400, "ignore_eos": True})
        path = f"/streams/{response['X-Stream-Id']}/events"
        [stream] = site.get_site().streams.all()
        beyond = await error_of(await caller.get(f"{path}?after=99999"), 410)
        assert (beyond["code"], beyond["param"]) == ("unknown_event_id", "after")
        assert "none with the number 99,999" in beyond["message"]
        for event_id in ("nonsense", f"{stream.log_id}-x", "a" * 12 + "-1"):
            other = await error_of(await caller.get(path, **{"last-event-id": event_id}), 410)
            assert (other["code"], other["param"]) == ("unknown_event_id", "Last-Event-ID")
            assert f"{stream.log_id}-1" in other["message"]
        reconnecting = await caller.get(path, **{"last-event-id": "nonsense", "accept": "text/event-stream"})
        assert reconnecting.status_code == 204
        await stream.stop(None)
        await until(stream.ended.is_set)
        await body_of(response)
        await site.reset()


@pytest.mark.parametrize("stream_id", ["0" * 32, "abc", "G" * 32])
@pytest.mark.parametrize("rest", ["", "/events"])
async def test_an_unknown_stream_is_named_alike_whatever_its_id_looks_like(
    caller: Caller, stream_id: str, rest: str
) -> None:
    error = await error_of(await caller.get(f"/streams/{stream_id}{rest}"), 404)
    assert error["code"] == "stream_not_found"
    assert "32 hex digits" in error["message"]


async def test_an_unknown_field_error_names_the_known_ones(caller: Caller) -> None:
    """A near miss gets the nearest field, any other name all known ones, or where to find them."""
    slip = await error_of(await caller.post("/streams", {"prompt": "x", "max_token": 1}), 400)
    assert slip["message"] == "Unknown field max_token. The nearest known field is max_tokens."
    other = await error_of(await caller.post("/v1/chat/completions", {"foo": 1}), 400)
    assert (other["code"], other["param"]) == ("unknown_field", "foo")
    assert "nearest" not in other["message"]
    assert "docs/api.md" in other["message"]
    inner = await error_of(await caller.post("/v1/chat/completions", {"stream_options": {"foo": 1}}), 400)
    assert "Known: include_usage, " in inner["message"]
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"foo": 1}}
    variable = await error_of(await caller.post("/streams", body), 400)
    assert variable["param"] == "chat_template_kwargs"
    assert "chat template does not read foo. It reads none." in variable["message"]


@pytest.mark.parametrize("path", ["/streams", "/v1/chat/completions", "/v1/models/nope"])
async def test_an_unknown_model_error_names_the_known_ones(caller: Caller, path: str) -> None:
    body = {"model": "nope", "messages": [{"role": "user", "content": "hi"}]}
    response = await (caller.get(path) if "models" in path else caller.post(path, body))
    error = await error_of(response, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error["message"] == "There is no model 'nope' here. It serves: echo."


def test_the_status_line_names_the_status(django_db_setup: None) -> None:
    """Twisted has no name for a 429 and wrote "Unknown Status"."""
    limits = {"MAX_STREAMS_PER_VISITOR": 1, "MAX_QUEUED_PER_PRINCIPAL": 0}
    conf = {"TESTING": True, "ANONYMOUS": True, "ECHO_STEP_SECONDS": 0.5, "LIMITS": limits}
    body = {"prompt": "hi", "max_tokens": 500, "ignore_eos": True}
    with (
        DaphneServer(settings={"STREAMSERVE": conf}) as server,
        httpx.Client(base_url=server.url, timeout=30, trust_env=False) as client,
        client.stream("POST", "/streams", json=body) as first,
    ):
        second = httpx.post(f"{server.url}/streams", json=body, timeout=30, trust_env=False)  # without a cookie, too
        assert (first.status_code, second.status_code) == (200, 429)
        assert second.reason_phrase == HTTPStatus(429).phrase
