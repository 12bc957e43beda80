"""A site without DEBUG and without an engine: every caller gets the command that starts it, at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from streamserve.models import ApiKey
from tests.support.servers.web_servers import daphne

WORDS = "No engine runs for the model 'chat'. Start it with: manage.py streamserve_engine chat"


@pytest.mark.django_db(transaction=True)
def test_a_missing_engine_is_named_with_its_command(tmp_path: Path, transactional_db: Any) -> None:
    """The first request is a 503 with the command, not "loading"; so is every later one, and /readyz."""
    from django.db import connection

    env = {
        "DJANGO_SETTINGS_MODULE": "tests.support.sites.pages.engineless_site",
        "DATABASE": str(connection.settings_dict["NAME"]),
        "STATE": str(tmp_path),
    }
    key = ApiKey.objects.make(name="test", scopes=["chat", "ops"])[1]
    with daphne("streamserve.routing:application", env=env) as server:
        headers = {"Authorization": f"Bearer {key}"}
        with httpx.Client(base_url=server.url, headers=headers, timeout=30, trust_env=False) as client:
            for path, body in (
                ("/streams", {"prompt": "a"}),
                ("/v1/chat/completions", CHAT),
                ("/streams", {"prompt": "b"}),
            ):
                refused = client.post(path, json=body)
                error = refused.json()["error"]
                assert (refused.status_code, error["code"], error["message"]) == (503, "no_engine", WORDS)
            ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["reason"]) == (503, "chat has no engine")
        assert ready.json()["models"][0]["message"] == WORDS


CHAT = {"model": "chat", "messages": [{"role": "user", "content": "a"}]}
