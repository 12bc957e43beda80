"""One of two daphnes shuts down: each of its readers gets the place to resume at, and the whole answer at the other."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.checks.stream_checks import (
    check_native,
    check_native_part,
    check_openai,
    going_away_of,
    parse_sse,
    text_of,
)
from tests.support.docs.demo_site import end_engines, environment
from tests.support.plugins.migrated import KEY, MAKE_KEY, prepare
from tests.support.servers.web_servers import Server, daphne, wait_until_ready

SETTINGS = {"DJANGO_SETTINGS_MODULE": "tests.support.sites.workers.short_drain_site"}
NUM_TOKENS = 600  # six seconds at least, of which the drain waits one
DEADLINE_SECONDS = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("site")
    prepare(folder, MAKE_KEY)
    yield folder
    end_engines(folder)


@pytest.fixture
def staying(folder: Path) -> Iterator[Server]:
    """The worker that stays."""
    with daphne("project.asgi:application", env=environment(folder, **SETTINGS)) as server:
        wait_until_ready(server.url)
        yield server


def client(server: Server) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.AsyncClient(base_url=server.url, headers=headers, trust_env=False, timeout=DEADLINE_SECONDS)


def asked(**fields: object) -> dict[str, object]:
    return {"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 3, **fields}


class Reading:
    """One request, read until the connection ends; httpx raises if that end is not a proper one."""

    def __init__(self, http: httpx.AsyncClient, url: str, body: dict[str, object]) -> None:
        self.data = bytearray()
        self.id = ""
        self.has_begun = asyncio.Event()
        self.task = asyncio.create_task(self._read(http, url, body))

    async def _read(self, http: httpx.AsyncClient, url: str, body: dict[str, object]) -> None:
        async with http.stream("POST", url, json=body) as response:
            assert response.status_code == 200, await response.aread()
            self.id = response.headers["x-stream-id"]
            async for piece in response.aiter_bytes():
                self.data += piece
                if len(self.data) > 600:
                    self.has_begun.set()


async def down(server: Server) -> int:
    """Shut a server down; return its exit code."""
    server.process.send_signal(signal.SIGTERM)
    return await asyncio.to_thread(server.process.wait, DEADLINE_SECONDS)


@pytest.mark.cut_streams("tokens and text have no farewell")
async def test_readers_of_a_worker_that_goes_down(folder: Path, staying: Server) -> None:
    """Each response ends correctly in its dialect; native and tokens resume at the other worker without a gap."""
    with daphne("project.asgi:application", env=environment(folder, **SETTINGS)) as leaving:
        wait_until_ready(leaving.url)
        async with client(leaving) as http, client(staying) as other:
            reference = Reading(other, "/streams", asked(prompt="A long story"))
            native = Reading(http, "/streams", asked(prompt="A long story"))
            tokens = Reading(http, "/streams", asked(prompt="A long story", format="tokens"))
            text = Reading(http, "/streams", asked(prompt="A long story", format="text"))
            messages = [{"role": "user", "content": "A long story"}]
            chat = Reading(http, "/v1/chat/completions", asked(messages=messages, stream=True))
            leavers = [native, tokens, text, chat]
            async with asyncio.timeout(DEADLINE_SECONDS):
                await asyncio.gather(*(one.has_begun.wait() for one in leavers))
                code = await down(leaving)
                await asyncio.gather(*(one.task for one in leavers))
            assert code == 0, leaving.output()
            assert "Traceback" not in leaving.output()
            frames = check_native_part(bytes(native.data))
            farewell = going_away_of(bytes(native.data))
            assert farewell is not None
            assert farewell.json["id"] == native.id
            seen_tokens = parse_sse(bytes(tokens.data))
            assert {*seen_tokens[-1].json} == {"token"}
            assert text.data.endswith(b"\n[error engine_unavailable: The server is shutting down.]\n")
            assert check_openai(bytes(chat.data))[-1]["error"]["code"] == "engine_unavailable"
            rest = await went_on(other, native.id, farewell.json["event_id"])
            more_tokens = await went_on(other, tokens.id, seen_tokens[-1].id, "tokens")
            await reference.task
    whole = text_of(check_native(bytes(reference.data)))
    assert text_of(frames + check_native(rest, after=frames[-1].seq)) == whole
    joined = [frame.json["token"] for frame in [*seen_tokens, *parse_sse(more_tokens)] if frame.data != "[DONE]"]
    assert "".join(joined) == whole


async def went_on(http: httpx.AsyncClient, stream_id: str, event_id: str, format_: str = "native") -> bytes:
    """Return the events after that one, to the end."""
    url = f"/streams/{stream_id}/events?format={format_}"
    response = await http.get(url, headers={"Last-Event-ID": event_id})
    assert response.status_code == 200, response.text
    return response.content
