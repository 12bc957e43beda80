"""The billing assistant for tests: its passages in the database, and its pipeline over an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from asgiref.sync import sync_to_async

from project.help.assistant import billing
from project.help.knowledge_files import KNOWLEDGE, read_passages, toml_files
from project.help.models import Passage, Topic
from streamserve.clients.base import EngineClient
from streamserve.clients.factory import hf_client
from streamserve.clients.pipeline.client import Pipeline, PipelineClient
from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.protocol.events import Citation, Done, Event, Status, Token
from streamserve.protocol.requests import GenerateRequest, Message
from tests.support.streams.hand_made import until


def load_knowledge() -> None:
    """Save the demo's passages, where a flush of the database has taken them away."""
    entries = list(read_passages(toml_files([KNOWLEDGE])))
    if Passage.objects.count() != len(entries):
        Passage.objects.all().delete()
        topics = {entry["topic"]: Topic.objects.get_or_create(name=entry["topic"])[0] for entry in entries}
        Passage.objects.bulk_create(Passage(**{**entry, "topic": topics[entry["topic"]]}) for entry in entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """An answer of the assistant, whole."""

    events: tuple[Event, ...]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Token))

    @property
    def cited(self) -> list[str]:
        return [event.id for event in self.events if isinstance(event, Citation)]

    @property
    def steps(self) -> list[str | None]:
        return [event.message for event in self.events if isinstance(event, Status) and event.status == "step"]


Ask = Callable[..., Awaitable[Answered]]


async def _call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return await sync_to_async(function)(*args, **options)


async def _ask(client: PipelineClient, *turns: str, **fields: Any) -> Answered:
    """Ask with the turns of a conversation: the visitor's and the assistant's by turns."""
    roles = ("user", "assistant")
    messages = tuple(Message(role=roles[at % 2], content=text) for at, text in enumerate(turns))
    request = GenerateRequest(model=client.alias, messages=messages or None, **fields)
    events = [event async for event in await client.generate(request)]
    assert isinstance(events[-1], Done), events[-1]
    return Answered(events=tuple(events))


@asynccontextmanager
async def shipped_model() -> AsyncIterator[EngineClient]:
    """Yield the demo model in the engine, ready."""
    from benchmarks.demo_model.quality import HELPDESK

    model = ModelConfig(alias="helpdesk", path=str(HELPDESK), dtype="float32", num_threads=1)
    client = hf_client(model, EngineConfig())
    client.start()
    try:
        await until(lambda: client.describe().state != "loading", "the demo model is loaded")
        yield client
    finally:
        await client.aclose()


@asynccontextmanager
async def assistant_over(model: EngineClient, function: Callable[..., Awaitable[Any]] = billing) -> AsyncIterator[Ask]:
    """Yield a function that asks the assistant over a model that is ready."""
    pipeline = Pipeline(name=function.__name__, function=function)
    client = PipelineClient(pipeline, {model.alias: model}, default_model=model.alias, call=_call)
    try:
        yield partial(_ask, client)
    finally:
        await client.aclose()
