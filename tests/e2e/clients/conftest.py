"""A daphne-served site whose engine process has the trained model of tests/support/models/thinking_model.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.docs.demo_site import end_engines
from tests.support.models.thinking_model import thinking_model
from tests.support.models.thinking_world import tool
from tests.support.plugins.migrated import KEY, MAKE_KEY, Migrate
from tests.support.servers.web_servers import ROOT, Server, daphne, wait_until_ready

MODEL = "thinker"
WEATHER = [tool("set_light"), tool("get_weather"), tool("put_record")]
OSLO: list[Any] = [{"role": "user", "content": "Tell me the weather in Oslo."}]
JSON: list[Any] = [{"role": "user", "content": "As JSON: Rome, sunny."}]
HELLO: list[Any] = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="package")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of the site, with a state folder of its own."""
    return {
        "DJANGO_SETTINGS_MODULE": "tests.support.sites.thinker_settings",
        "STREAMSERVE_STATE_DIR": str(tmp_path_factory.mktemp("state")),
        "THINKER": str(thinking_model()),
    }


@pytest.fixture(scope="package")
def site(env: dict[str, str], migrated: Migrate) -> Iterator[Server]:
    """The site, with its model loaded: one for all tests."""
    migrated(Path(env["STREAMSERVE_STATE_DIR"]), MAKE_KEY)
    with daphne("project.asgi:application", env=env) as server:
        wait_until_ready(server.url)
        yield server
    end_engines(Path(env["STREAMSERVE_STATE_DIR"]))


@pytest.fixture(scope="package")
def key() -> str:
    """An API key of the site."""
    return KEY


def manage(env: dict[str, str], *arguments: str) -> str:
    """Run a management command of the site; return what it prints."""
    command = [sys.executable, str(ROOT / "manage.py"), *arguments]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def client(site: Server, key: str) -> Iterator[openai.OpenAI]:
    """The official client."""
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{site.url}/v1", api_key=key, max_retries=0, http_client=http) as client:
        yield client


@pytest.fixture
def ask(client: openai.OpenAI) -> Any:
    """Ask for a greedy answer."""

    def create(messages: list[Any], **fields: Any) -> Any:
        fields = {"temperature": 0, "max_tokens": 120, **fields}
        return client.chat.completions.create(model=MODEL, messages=messages, **fields)

    return create


def calls_of(message: Any) -> list[tuple[str, Any]]:
    """Return the name and the arguments of each call."""
    return [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls or []]


def result(call: Any, content: str) -> dict[str, str]:
    return {"role": "tool", "tool_call_id": call.id, "content": content}


def folded(stream: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return what the deltas of the first choice make, as a client would fold them, and all chunks."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    chunks = list(stream)
    for delta in (chunk.choices[0].delta for chunk in chunks if chunk.choices):
        message["content"] += delta.content or ""
        message["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            if call.index == len(message["tool_calls"]):
                message["tool_calls"].append({"id": call.id, "name": call.function.name, "arguments": ""})
            message["tool_calls"][call.index]["arguments"] += call.function.arguments or ""
    return message, chunks
