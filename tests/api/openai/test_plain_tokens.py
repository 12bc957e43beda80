"""`/v1/completions/stream`: the stream that tutorials read, by POST and by GET."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from django.test.utils import override_settings

from streamserve.web import site
from tests.conftest import Caller, body_of, until, until_ready
from tests.support.checks.stream_checks import parse_sse

pytestmark = pytest.mark.django_db(transaction=True)

PATH = "/v1/completions/stream"
ASK: dict[str, Any] = {"prompt": "The quiet river", "max_tokens": 12, "seed": 7, "ignore_eos": True}
QUERY = "?prompt=The+quiet+river&max_tokens=12&seed=7&ignore_eos=true"
EVENT_SOURCE = {"accept": "text/event-stream"}


@pytest.fixture
def caller(engine: None, alice_key: str) -> Caller:
    return Caller(key=alice_key)


def tutorial_reader(body: bytes) -> tuple[str, bool]:
    """Read as a page does that splits lines: text, and whether `[DONE]` came."""
    text = ""
    for line in body.decode().split("\n"):
        if line.startswith("data: "):
            if line[6:] == "[DONE]":
                return text, True
            text += json.loads(line[6:])["token"]
    return text, False


async def test_posted_it_is_the_text_of_the_completion(caller: Caller) -> None:
    """Every line is data or an id; the text is that of `/v1/completions`; a chat is taken too."""
    response = await caller.post(PATH, ASK)
    assert response["Content-Type"].startswith("text/event-stream")
    body = await body_of(response)
    whole = (await caller.post("/v1/completions", ASK)).json()
    assert tutorial_reader(body) == (whole["choices"][0]["text"], True)
    assert {line.split(":")[0] for line in body.decode().splitlines() if line} == {"data", "id"}
    assert body.startswith(b'data: {"token":""}\n\n')
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    text, is_done = tutorial_reader(await body_of(await caller.post(PATH, chat)))
    assert text
    assert is_done


async def test_by_get_it_is_off_unless_the_site_allows_it(caller: Caller) -> None:
    """The prompt would be in access logs: 403; an EventSource, which cannot read a 403, gets it as an event."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True}):
        await until_ready()
        refused = await caller.get(PATH + QUERY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "prompt_in_url_off")
        assert refused.json()["error"]["type"] == "permission_error"
        event = await caller.get(PATH + QUERY, **EVENT_SOURCE)
        [frame] = parse_sse(await body_of(event))
        assert (event.status_code, frame.event, frame.json["error"]["code"]) == (200, "error", "prompt_in_url_off")
        assert (await caller.get(PATH + QUERY, **EVENT_SOURCE, **{"last-event-id": frame.id})).status_code == 204
        assert site.get_site().streams.all() == []
        await site.reset()


async def test_by_get_it_is_the_same_stream(caller: Caller) -> None:
    """Where the site allows it; a wrong field is named."""
    posted = await body_of(await caller.post(PATH, ASK))
    assert tutorial_reader(await body_of(await caller.get(PATH + QUERY))) == tutorial_reader(posted)
    wrong = await caller.get(PATH + QUERY + "&temperature=9", **EVENT_SOURCE)
    [frame] = parse_sse(await body_of(wrong))
    assert (frame.event, frame.json["error"]["param"]) == ("error", "temperature")


async def test_an_event_source_resumes_and_never_starts_again(caller: Caller) -> None:
    """From any id the rest of the same bytes; after the end, and for an unknown id, a 204, which ends its attempts."""
    response = await caller.post(PATH, {**ASK, "interval_ms": 0})
    frames = parse_sse(await body_of(response))
    with_ids = [frame for frame in frames if frame.id]
    assert len(with_ids) > 4
    for place, frame in enumerate(with_ids):
        resumed = await caller.get(PATH + QUERY, **EVENT_SOURCE, **{"last-event-id": frame.id})
        rest = [one for one in parse_sse(await body_of(resumed)) if one.id] if resumed.status_code == 200 else []
        assert "".join(one.data for one in rest).count("[DONE]") == (place < len(with_ids) - 1)
        assert resumed.status_code == (200 if rest else 204)
    foreign = with_ids[0].id.replace(with_ids[0].id[0], "0" if with_ids[0].id[0] != "0" else "1", 1)
    assert (await caller.get(PATH, **EVENT_SOURCE, **{"last-event-id": foreign})).status_code == 204
    assert len(site.get_site().streams.all()) == 1


async def test_a_keepalive_is_a_token_without_text(caller: Caller) -> None:
    """After the silence that the reader chooses; it has no id."""
    silence = threading.Event()  # ends when a second one has come: the first bytes are one too
    site.get_site().clients["echo"]._thread.engine.runner._pause = lambda: silence.wait(60)
    body = b""
    async for chunk in await caller.post(PATH, {**ASK, "max_tokens": 2, "keepalive_seconds": 1}):
        body += chunk
        if body.count(b'data: {"token":""}\n\n') == 2:
            silence.set()
    assert silence.is_set()
    assert {frame.id for frame in parse_sse(body) if frame.data == '{"token":""}'} == {""}


async def test_an_answer_that_is_stopped_is_an_error_event(caller: Caller) -> None:
    """With the error's shape of this API, an id, and no `[DONE]`."""
    await site.reset()
    with override_settings(STREAMSERVE={"TESTING": True, "ECHO_STEP_SECONDS": 0.02}):
        await until_ready()
        response = await caller.post(PATH, {**ASK, "max_tokens": 500})
        stream_id = response["X-Stream-Id"]
        await until(lambda: site.get_site().streams.find(stream_id).usage.completion_tokens > 2)
        await caller.post(f"/streams/{stream_id}/stop")
        frames = parse_sse(await body_of(response))
        assert (frames[-1].event, frames[-1].json["error"]["code"]) == ("error", "cancelled")
        assert {"message", "type", "param", "code"} == set(frames[-1].json["error"])
        last = {"last-event-id": frames[-1].id}
        assert (await caller.get(PATH, **EVENT_SOURCE, **last)).status_code == 204
        await site.reset()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": 1}, "logprobs"),
        ({"keepalive_seconds": 0.5}, "keepalive_seconds"),
        ({"keepalive_seconds": 301}, "keepalive_seconds"),
        ({"interval_ms": -1}, "interval_ms"),
        ({"interval_ms": 5001}, "interval_ms"),
        ({"format": "text"}, "format"),
        ({"on_disconnect": "finish"}, "on_disconnect"),
    ],
)
async def test_wrong_fields_are_named(caller: Caller, fields: dict[str, Any], param: str) -> None:
    """A 400 in the OpenAI shape, before anything starts."""
    refused = await caller.post(PATH, {**ASK, **fields})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert refused.json()["error"]["type"] == "invalid_request_error"
