"""A remote client against llama.cpp's own server: what it says, in one piece and continued after a cut, is the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from streamserve.clients.remote.client import RemoteClient
from streamserve.clients.remote.config import RemoteConfig
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.events import BlockText, Done, Event, Meta, Token
from streamserve.protocol.grammar import check_events
from streamserve.protocol.requests import (
    MODEL_DEFAULTS,
    START,
    GenerateRequest,
    Grammar,
    Resume,
    SamplingParams,
    ShownChoice,
)
from tests.support.engines.clients import collect, text
from tests.support.servers.upstreams import chat, llama_server, until

META = Meta(model="m", stream_id="s", created=1, has_token_ids=False)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with llama_server(tmp_path_factory.mktemp("gguf")) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[RemoteClient]:
    client = RemoteClient(RemoteConfig(alias="m", url=url, max_concurrent=2))
    client.start()
    await until(lambda: client.describe().state != "loading")
    yield client
    await client.aclose()


async def ask(client: RemoteClient, request: GenerateRequest, resume: Resume = START) -> list[Event]:
    events: list[Event] = await collect(await client.generate(request, resume=resume))  # type: ignore[arg-type]
    check_events([META, *events])
    return events


def direct(url: str, **fields: Any) -> dict[str, Any]:
    """Return what the server answers without us, as a whole."""
    out: dict[str, Any] = httpx.post(f"{url}/chat/completions", json=fields, timeout=60).raise_for_status().json()
    return out


def shown(so_far: str) -> tuple[ShownChoice, ...]:
    return (ShownChoice(blocks=(BlockText(index=0, kind="text", text=so_far, is_open=True),), num_tokens=len(so_far)),)


async def test_it_is_recognised(client: RemoteClient) -> None:
    """By its list of models, with its context length."""
    assert client.describe().state == "ready"
    assert (client.describe().dtype, client.describe().max_model_len) == ("llama-server", 1024)


async def test_the_answer_is_the_servers_own(client: RemoteClient, url: str) -> None:
    """Text, finish reason and usage equal those of a direct call."""
    events = await ask(client, chat("Hello", max_tokens=24))
    messages = [{"role": "user", "content": "Hello"}]
    whole = await asyncio.to_thread(direct, url, messages=messages, temperature=0, max_tokens=24)
    assert text(events) == whole["choices"][0]["message"]["content"]
    done = events[-1]
    assert isinstance(done, Done)
    assert done.finish_reason == whole["choices"][0]["finish_reason"] == "length"
    assert done.usage.completion_tokens == whole["usage"]["completion_tokens"] == 24
    assert done.usage.prompt_tokens == whole["usage"]["prompt_tokens"]


@pytest.mark.parametrize("num_chars", [1, 9, 23])
async def test_a_continued_answer_is_the_whole_one(client: RemoteClient, num_chars: int) -> None:
    """The server takes up the text so far; together they are what it says in one piece."""
    whole = text(await ask(client, chat("Hello", max_tokens=24)))
    assert len(whole) == 24  # a token is a letter, so a cut of letters is a cut of tokens
    rest = await ask(client, chat("Hello", max_tokens=24), Resume(shown=shown(whole[:num_chars])))
    assert whole[:num_chars] + text(rest) == whole


async def test_a_stop_string_and_a_seed(client: RemoteClient) -> None:
    """Fields of the request have their effect there."""
    whole = text(await ask(client, chat("Hello", max_tokens=24)))
    cut = await ask(client, chat("Hello", max_tokens=24, stop=(whole[5:8],)))
    assert text(cut) == whole[: whole.index(whole[5:8])]
    assert isinstance(cut[-1], Done)
    assert cut[-1].finish_reason == "stop"
    hot = [text(await ask(client, chat("Hello", temperature=1.0, seed=seed))) for seed in (5, 5, 6)]
    assert hot[0] == hot[1] != hot[2]


async def test_log_probabilities(client: RemoteClient) -> None:
    """The chosen token and the likeliest ones."""
    events = await ask(client, chat("Hello", max_tokens=3, logprobs=2))
    positions = [one for event in events if isinstance(event, Token) for one in event.logprobs or ()]
    assert [position.chosen.token for position in positions] == list(text(events))
    assert {len(position.top) for position in positions} == {2}


async def test_a_prompt(client: RemoteClient) -> None:
    """`/completions`, whole and continued."""
    request = GenerateRequest(model="m", prompt="Hello", sampling=SamplingParams(temperature=0.0, max_tokens=12))
    whole = text(await ask(client, request))
    rest = await ask(client, request, Resume(shown=shown(whole[:5])))
    assert whole[:5] + text(rest) == whole


async def test_a_prompt_that_never_fits_is_the_callers(client: RemoteClient) -> None:
    """The server's own sentence comes back as a 400."""
    with pytest.raises(BadRequest, match="exceeds the available context size"):
        await client.generate(chat("Hello " * 1000))


SCHEMA = '{"type":"object","properties":{"a":{"enum":["x","y"]}},"required":["a"],"additionalProperties":false}'
CHOICES = ('yes, "so"\n', "nö\\", "a/b\t\x7f\b")


def prompt(**fields: Any) -> GenerateRequest:
    return GenerateRequest(
        model="m", prompt="Hello", sampling=SamplingParams(temperature=1.0, seed=3, max_tokens=64), **fields
    )


@pytest.mark.parametrize(
    "make", [partial(chat, "Hello", seed=3, unset=MODEL_DEFAULTS[1:]), prompt], ids=["chat", "prompt"]
)
@pytest.mark.parametrize(
    ("grammar", "found"),
    [
        (Grammar(kind="json_schema", value=SCHEMA), ('{"a":"x"}', '{"a":"y"}')),
        (Grammar(kind="choice", value=json.dumps(CHOICES)), CHOICES),
    ],
    ids=["schema", "choice"],
)
async def test_a_grammar_is_kept_there(
    client: RemoteClient, make: Callable[..., GenerateRequest], grammar: Grammar, found: tuple[str, ...]
) -> None:
    """A random model obeys it, because the server masks what does not match; of chats and of prompts."""
    said = text(await ask(client, make(grammar=grammar)))
    assert (said if grammar.kind == "choice" else "".join(said.split())) in found


async def test_a_stop_frees_the_server(client: RemoteClient, url: str) -> None:
    """Both slots are taken, both are stopped, and the next two answers come."""
    running = [await client.generate(chat(str(number), max_tokens=900)) for number in range(2)]
    for generation in running:
        await anext(generation)
        generation.cancel()
    await until(lambda: client.stats().running == 0)
    answers = await asyncio.gather(*(ask(client, chat(str(number), max_tokens=4)) for number in range(2)))
    assert [len(text(events)) for events in answers] == [4, 4]
