"""An answer that begins with its prompt, over HTTP: a park shows nothing of it twice."""

from __future__ import annotations

from typing import Any

import pytest

from streamserve.web import site
from tests.conftest import Caller, body_of, until, until_ready
from tests.support.checks.stream_checks import parse_sse
from tests.support.streams.hand_made import Gate

pytestmark = pytest.mark.django_db(transaction=True)

ASK: dict[str, Any] = {"prompt": "The quiet river", "max_tokens": 30, "seed": 7, "ignore_eos": True, "echo": True}


def texts_of(body: bytes, n: int) -> list[str]:
    tokens = [frame.json for frame in parse_sse(body) if frame.event == "token"]
    return ["".join(one["text"] for one in tokens if one["choice"] == choice) for choice in range(n)]


@pytest.mark.parametrize("n", [1, 2])
async def test_a_parked_answer_shows_its_prompt_once(engine: None, alice_key: str, site_gate: Gate, n: int) -> None:
    """Its reader leaves and returns: the whole is what it would have been."""
    caller = Caller(key=alice_key)
    whole = texts_of(await body_of(await caller.post("/streams", {**ASK, "n": n})), n)
    assert all(text.startswith("The quiet river") and len(text) > 40 for text in whole)
    await site.reset()
    await until_ready()
    site_gate.allow(8)
    response = await caller.post("/streams", {**ASK, "n": n})
    chunks, seen = aiter(response), b""
    while seen.count(b"event: token") < n:  # the prompt of each choice
        seen += await anext(chunks)
    await chunks.aclose()
    stream = site.get_site().streams.find(response["X-Stream-Id"])
    assert stream is not None
    await until(lambda: stream.state == "parked")
    site_gate.open()
    replayed = await body_of(await caller.get(f"/streams/{stream.id}/events"))
    assert stream.engine.parking.num_parks == 1
    assert texts_of(replayed, n) == whole
    await site.reset()
