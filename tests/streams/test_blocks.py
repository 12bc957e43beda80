"""An answer in blocks keeps its log whatever cuts it, a park or a lost engine, within a thought or a call too."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("regex", reason="needs the engine extra: pip install streamserve[engine]")

from streamserve.clients.base import EngineClient, Generation
from streamserve.clients.factory import echo_client
from streamserve.clients.process.client import ProcessClient
from streamserve.clients.thread.client import ThreadClient
from streamserve.dialects.fold import Answer
from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.protocol.engine import Park
from streamserve.protocol.events import BlockStart, Done, Event, Meta, Status, Token
from streamserve.protocol.grammar import check_events
from streamserve.protocol.ids import tool_call_id
from streamserve.protocol.requests import Admission, GenerateRequest, Message, Tool
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.registry import Streams
from streamserve.streams.store import answer_turn
from streamserve.streams.stream import Stream
from tests.support.engines.engine_processes import spec_in
from tests.support.streams.hand_made import ParkingSource, ask, until, untimed

ANSWER = (
    '<think>\nTwo calls.\n</think>\n\nI ask.<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
    '\n<tool_call>{"name": "add", "arguments": {"a":'
    " 3}}</tool_call>"
)
KINDS = ["thinking", "text", "tool_use", "tool_use"]
LOST = Park(reason="lost", is_counted=False)


def question(**fields: object) -> GenerateRequest:
    message = Message(role="user", content="add")
    return ask(**{"prompt": None, "messages": (message,), "tools": (Tool(name="add"),), "max_tokens": 400, **fields})


class CutSource(ParkingSource):
    """The events of a generation that ends after a number of events, whatever they are."""

    def _counts(self, event: Event) -> bool:
        return True


class CutClient:
    """An engine that is lost after `num_events` events of its first answer."""

    alias = "echo"

    def __init__(self, inner: EngineClient, num_events: int) -> None:
        self._inner, self._num_events = inner, num_events
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest, *rest: Any) -> Generation:
        self.requests.append(request)
        generation = await self._inner.generate(request, *rest)
        if len(self.requests) > 1:
            return generation
        return CutSource(generation, LOST, self._num_events).generation


async def ready_echo() -> ThreadClient:
    config = EngineConfig(check_integrity=True)
    client = echo_client(config=config, answers={"add": ANSWER}, format_name="qwen3")
    client.start()
    await until(lambda: client.describe().state == "ready", "the echo engine is ready")
    return client


async def log_of(client: EngineClient, **fields: object) -> tuple[list[Event], Stream]:
    """Return the events of a stream's log, without statuses, times and ids of calls."""
    async with aclosing(Streams({"echo": client}, MemoryLog())) as streams:
        stream = await streams.start(question(**fields), Admission(owner="u", tenant="t", on_disconnect="finish"))
        async with asyncio.timeout(60):
            await stream.ended.wait()
        events = [logged.event for logged in await streams.log.read(stream.log_id, 0)]
        check_events(events)
        return [unnamed(stream, event) for event in events if not isinstance(event, Meta | Status)], stream


def unnamed(stream: Stream, event: Event) -> Event:
    """Return an event without its times, or its call's id, which the stream, the seed and the place make."""
    if isinstance(event, BlockStart) and event.kind == "tool_use":
        assert event.id == tool_call_id(f"{stream.id}/1", event.choice, event.index)
        return replace(event, id=None)
    return untimed(event)


def answer_text(events: list[Event]) -> str:
    """Return the text of the text blocks."""
    answer = Answer()
    for event in events:
        answer.feed(event)
    return answer.choices[0].text


async def test_a_lost_engine_changes_no_block() -> None:
    """Wherever the engine is lost, the log is the one of an answer that was not cut; the row names its need."""
    async with aclosing(await ready_echo()) as client:
        whole, stream = await log_of(client)
        assert [event.kind for event in whole if isinstance(event, BlockStart)] == KINDS
        assert stream.request.needs == ("blocks",)
        done = whole[-1]
        assert isinstance(done, Done)
        assert done.finish_reason == "tool_calls"
        index = next(event.index for event in whole if isinstance(event, BlockStart) and event.kind == "thinking")
        thought = sum(len(event.token_ids) for event in whole if isinstance(event, Token) and event.index == index)
        assert done.usage.reasoning_tokens == thought > len("Two calls.")
        places = [place for place, event in enumerate(whole, 1) if not isinstance(event, Token)]
        near = {place + step for place in places for step in (-1, 0, 1)}
        for num_events in sorted({one for one in near if 0 < one < len(whole)} | set(range(1, len(whole), 23))):
            cut = CutClient(client, num_events)
            again, stream = await log_of(cut)
            assert again == whole, num_events
            if len(cut.requests) > 1:
                assert cut.requests[1].needs == ("blocks",)


async def test_choices_have_their_own_blocks() -> None:
    """Each choice numbers its blocks, and its calls have ids of their own."""
    async with aclosing(await ready_echo()) as client:
        events, _ = await log_of(client, n=2)
        starts = [event for event in events if isinstance(event, BlockStart)]
        for choice in (0, 1):
            assert [event.kind for event in starts if event.choice == choice] == KINDS


async def test_stop_strings_end_text_only() -> None:
    """A stop string in a thought and in arguments stops nothing; in text it does."""
    async with aclosing(await ready_echo()) as client:
        kept, _ = await log_of(client, stop=("Two", '"a"'))
        assert [event.kind for event in kept if isinstance(event, BlockStart)] == KINDS
        events, _ = await log_of(client, stop=("ask",))
        assert answer_text(events) == "I "
        done = events[-1]
        assert isinstance(done, Done)
        assert done.finish_reason == "stop"


async def test_no_tools_no_calls() -> None:
    """Without tools, or with tool_choice none, the tags of calls are text."""
    async with aclosing(await ready_echo()) as client:
        events, _ = await log_of(client, tools=())
        assert [event.kind for event in events if isinstance(event, BlockStart)] == ["thinking", "text"]
        assert answer_text(events) == ANSWER.partition("</think>\n\n")[2]


async def test_an_answer_is_a_turn_with_its_calls() -> None:
    """What is asked next has the answer's text and its whole calls, and no thought; a call that was cut is left out."""
    async with aclosing(await ready_echo()) as client, aclosing(Streams({"echo": client}, MemoryLog())) as streams:
        for max_tokens, arguments in ((400, ['{"a": 2}', '{"a": 3}']), (ANSWER.index(" 3"), ['{"a": 2}'])):
            stream = await streams.start(
                question(max_tokens=max_tokens), Admission(owner="u", tenant="t", on_disconnect="finish")
            )
            async with asyncio.timeout(60):
                await stream.ended.wait()
            turn = await answer_turn(streams.log, stream.log_id)
            assert turn.content == "I ask."
            assert [call["function"]["arguments"] for call in turn.extra["tool_calls"]] == arguments
            assert {call["function"]["name"] for call in turn.extra["tool_calls"]} == {"add"}


async def test_an_engine_process_gives_the_same_blocks(tmp_path: Path) -> None:
    """Blocks go through an engine process as they come from one on a thread."""
    model = ModelConfig(alias="echo", path="echo", answers={"add": ANSWER}, format="qwen3")
    async with (
        aclosing(await ready_echo()) as thread,
        aclosing(ProcessClient(spec_in(tmp_path, model=model))) as client,
    ):
        client.start()
        await until(lambda: client.describe().state == "ready", "the engine's process is ready")
        assert (await log_of(client))[0] == (await log_of(thread))[0]
