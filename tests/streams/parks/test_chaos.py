"""Whatever happens to a stream, in any order: one end, dense seqs, no token twice, none missing, nothing left."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing

from hypothesis import given, settings
from hypothesis import strategies as st

from streamserve.clients.thread.client import ThreadClient
from streamserve.protocol.engine import Park
from streamserve.protocol.errors import Overloaded
from streamserve.protocol.events import Done, Meta, Token, is_terminal
from streamserve.protocol.requests import Admission
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.reader.follow import follow
from streamserve.streams.readers import Attachment
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.support.streams.hand_made import ScriptedClient, ask, tok, until

ACTIONS = (
    "attach", "attach watcher", "detach", "release", "token", "token", "tokens", "done", "crash", "vanish",
    "refuse", "stop", "turn", "turn", "turns", "move", "move", "lead", "ahead", "paused", "lost",
)  # fmt: skip
# The acts that end the stream are rare, so that most runs are long.
ENDS = {"done", "crash", "vanish", "stop"}


class Chaos:
    """Acts on one stream. The engine's tokens are their own positions, so that a gap or a repeat is visible."""

    def __init__(self) -> None:
        self.client = ScriptedClient()
        self.streams = Streams({"scripted": self.client}, MemoryLog())
        self.readers: list[Attachment] = []
        self.positions: dict[int, int] = {}

    async def act(self, stream: Stream, action: str) -> None:
        """Perform one act."""
        match action:
            case "attach" | "attach watcher":
                self.readers.append(Attachment(is_watcher=action != "attach"))
                stream.attach(self.readers[-1])
            case "detach" if self.readers:
                stream.detach(self.readers.pop(0))
            case "release":
                stream.release()
            case "token" | "tokens":
                self._push(1 if action == "token" else 5)
            case "done":
                self.client.last.push(Done(finish_reason="stop"))
            case "crash" | "vanish":
                self.client.last.push(ValueError("broken") if action == "crash" else None)
            case "move" if self.readers:
                stream.moved(self.readers[0], stream.last_seq)
            case "lead" | "ahead" | "paused" | "lost":
                self.client.last.park(Park(reason=action))
            case "refuse":
                self.client.refusals.append(Overloaded("full", retry_after=1))
            case "stop":
                stopping = asyncio.create_task(stream.stop(3))
                await asyncio.sleep(0)
                stopping.cancel()
                await asyncio.gather(stopping, return_exceptions=True)
            case "turn" | "turns":
                for _ in range(1 if action == "turn" else 10):
                    await asyncio.sleep(0)

    def _push(self, num_tokens: int) -> None:
        number = len(self.client.sources) - 1
        shown = self.client.resumes[-1].output_token_ids or ((),)
        position = self.positions.setdefault(number, len(shown[0]))
        self.client.last.push(*(tok("x", position + offset) for offset in range(num_tokens)))
        self.positions[number] += num_tokens


@settings(max_examples=200)
@given(st.lists(st.sampled_from(ACTIONS), max_size=40), st.sampled_from(["park", "abort", "finish"]), st.integers(0, 9))
def test_any_order_of_acts(actions: list[str], on_disconnect: str, keep_ends: int) -> None:
    """Readers, stops, crashes and refusals in any order keep the laws of a stream."""
    kept = [action for action in actions if action not in ENDS or keep_ends == 0]
    asyncio.run(_any_order(kept, on_disconnect))


async def _any_order(actions: list[str], on_disconnect: str) -> None:
    chaos = Chaos()
    stream = await chaos.streams.start(ask("scripted"), Admission(owner="u1", tenant="t1", on_disconnect=on_disconnect))
    for action in actions:
        await chaos.act(stream, action)
    async with asyncio.timeout(60):
        await stream.stop()
    logged = await chaos.streams.log.read(stream.log_id, 0)
    events = [entry.event for entry in logged]
    assert [entry.seq for entry in logged] == list(range(1, len(logged) + 1))
    assert isinstance(events[0], Meta)
    assert [event for event in events if is_terminal(event)] == events[-1:] == [stream.terminal]
    ids = [token_id for event in events if isinstance(event, Token) for token_id in event.token_ids]
    assert ids == list(range(len(ids)))
    await chaos.streams.aclose()
    assert len(asyncio.all_tasks()) == 1


async def test_many_readers_come_and_go(echo: ThreadClient) -> None:
    """Forty streams whose readers leave at random and return: each text is uninterrupted, and nothing leaks."""
    dice = random.Random(4)
    streams = Streams({"echo": echo}, MemoryLog(), StreamConfig(coalesce_tokens=2))
    prompts = [f"question {number}" for number in range(8)]
    references = {prompt: await _read(streams, prompt, None) for prompt in prompts}
    texts = await asyncio.gather(*(_read(streams, prompt, dice) for prompt in prompts * 5))
    for prompt, text in zip(prompts * 5, texts, strict=True):
        assert text == references[prompt], f"seed 4, {prompt}"
    await until(lambda: echo.stats().running == 0, "no sequence runs")
    assert echo.stats().blocks_used == echo.stats().waiting == 0
    await streams.aclose()
    assert len(asyncio.all_tasks()) == 1


async def _read(streams: Streams, prompt: str, dice: random.Random | None) -> str:
    """Read one answer; with `dice`, leave after about every fifth event and return after a while."""
    stream = await streams.start(ask(prompt=prompt, max_tokens=60), Admission(owner="u1", tenant="t1"))
    text, after = "", 0
    while stream.terminal is None or after < stream.last_seq:
        async with aclosing(follow(streams, stream, after)) as events:
            async for logged in events:
                after = logged.seq
                text += logged.event.text if isinstance(logged.event, Token) else ""
                if dice is not None and dice.random() < 0.2:
                    break
        await asyncio.sleep(0.001 if dice is not None and dice.random() < 0.5 else 0)
    return text
