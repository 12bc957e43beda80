"""A daphne-served site with the trained model of tests/support/thinking_model.py."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from streamserve.models import ApiKey
from streamserve.testing import DaphneServer
from tests.support.thinking_model import thinking_model

MODEL = "thinker"
_READY_SECONDS = 120.0


@pytest.fixture(scope="session")
def site(django_db_setup: None) -> Iterator[DaphneServer]:
    """The site, with its model loaded. One for all tests; each empties the database after itself."""
    models = {MODEL: {"PATH": str(thinking_model()), "ENGINE": {"NUM_BLOCKS": 1024}}}
    conf = {"MODELS": models, "CLIENT": "thread", "LOG": "memory", "STORE": True}
    with DaphneServer(settings={"STREAMSERVE": conf}) as server:
        deadline = time.monotonic() + _READY_SECONDS
        while httpx.get(f"{server.url}/readyz", trust_env=False).status_code != 200:
            assert time.monotonic() < deadline, server.log()
        yield server


@pytest.fixture
def key(transactional_db: Any) -> str:
    return ApiKey.objects.make(name="clients")[1]


@pytest.fixture
def client(site: DaphneServer, key: str) -> Iterator[openai.OpenAI]:
    """The official client."""
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key=key, max_retries=0, http_client=http) as client:
        yield client
