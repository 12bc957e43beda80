"""Every wrong body, over the wire to a real daphne: a 4xx in the dialect each, and the engine serves on."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from streamserve.models import ApiKey
from streamserve.testing import DaphneServer
from tests.support.bodies.bad_bodies import bad_bodies
from tests.support.bodies.bad_fields import NATIVE, OPENAI, BadBody
from tests.support.bodies.wrong_bodies import ANTHROPIC, bad_messages
from tests.support.checks.stream_checks import check_native

PATHS = {NATIVE: "/streams", OPENAI: "/v1/chat/completions", ANTHROPIC: "/v1/messages"}
GOOD = {"prompt": "still there?", "max_tokens": 8, "seed": 7}


def post(client: httpx.Client, dialect: str, bad: BadBody) -> list[str]:
    """Post one body; return what is wrong with the answer."""
    response = client.post(PATHS[dialect], content=bad.body, headers={"Content-Type": bad.content_type})
    if bad.content_type.startswith("multipart/") and response.status_code == 400:
        return []  # Twisted reads forms itself, and refuses this one before any application is asked
    try:
        error: dict[str, Any] = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return [f"{dialect} {bad.name}: {response.status_code} {response.text[:200]!r} is no error object"]
    wrong = []
    if response.status_code != bad.status:
        wrong.append(f"status {response.status_code}, not {bad.status}")
    if error.get("code") != bad.code:
        wrong.append(f"code {error.get('code')}, not {bad.code}")
    if bad.param is not None and error.get("param") != bad.param:
        wrong.append(f"param {error.get('param')}, not {bad.param}")
    if not error.get("message"):
        wrong.append("no message")
    return [f"{dialect} {bad.name}: {one} ({error})" for one in wrong]


@pytest.mark.django_db(transaction=True)
def test_no_body_is_a_500_and_the_engine_survives_them_all(hard_server: DaphneServer) -> None:
    """At least 100 bodies a dialect; the right code and param; then an answer streams as ever."""
    _row, key = ApiKey.objects.make()
    corpus = bad_bodies()
    wrong: list[str] = []
    headers = {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=hard_server.url, headers=headers, timeout=30, trust_env=False) as client:
        for dialect in PATHS:
            bodies = bad_messages() if dialect == ANTHROPIC else [bad for bad in corpus if bad.is_for(dialect)]
            assert len(bodies) >= (100 if dialect == ANTHROPIC else 200)
            for bad in bodies:
                wrong += post(client, dialect, bad)
        answer = client.post("/streams", json=GOOD)
        ready = client.get("/readyz")
    assert wrong == []
    assert check_native(answer.content)[-1].json["totalTokens"] == 8
    assert ready.json()["ready"] is True
    assert "Traceback" not in hard_server.log()
