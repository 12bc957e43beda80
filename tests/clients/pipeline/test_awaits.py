"""Laws of the awaits of a run: deadline, stop and a reader who stays away reach each of them; an outage holds them."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import pytest

from streamserve.clients.pipeline.client import Pipeline, PipelineClient
from streamserve.clients.pipeline.run import Run
from streamserve.clients.pipeline.speech import MAX_WAITING
from streamserve.clients.thread.client import ThreadClient
from streamserve.protocol.events import Done, Error, Status, Token
from streamserve.protocol.requests import Admission
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import LogUnavailable
from streamserve.streams.reader.follow import collect
from streamserve.streams.registry import Streams
from tests.clients.pipeline.conftest import asked
from tests.support.streams.hand_made import StallingLog, until

Await = Callable[[Run], Awaitable[Any]]
LONG = {"ignore_eos": True, "max_tokens": 4000}


async def _side_by_side(run: Run) -> None:
    await asyncio.gather(run.generate("a", **LONG), run.generate("b", **LONG))


async def _emits(run: Run) -> None:
    while True:
        await run.say("word ")
        await asyncio.sleep(0)


async def _steps(run: Run) -> None:
    while True:
        await run.step("again", asyncio.sleep, 0)


# Each await of a run, so long that only a stop, a deadline or a leaving reader can end it.
AWAITS: dict[str, Await] = {
    "step": lambda run: run.step("waiting", asyncio.Event().wait),
    "step in a thread's place": lambda run: run.step("waiting", lambda: asyncio.Event().wait()),
    "steps": _steps,
    "generate": lambda run: run.generate("a", **LONG),
    "generate unseen": lambda run: run.generate("a", show=False, **LONG),
    "side by side": _side_by_side,
    "say": _emits,
    "its own": lambda run: asyncio.Event().wait(),
}


class Life:
    """One run that notes how its await ended."""

    def __init__(self, streams: Streams, echo: ThreadClient, work: Await) -> None:
        self.streams = streams
        self.reached, self.ended = asyncio.Event(), asyncio.Event()
        self.error: BaseException | None = None
        self._work = work
        one = Pipeline(name="p", function=self._run)
        streams.clients["p"] = PipelineClient(one, {"echo": echo}, default_model="echo")  # type: ignore[index]

    async def _run(self, run: Run) -> None:
        self.reached.set()
        try:
            await self._work(run)
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.ended.set()


@pytest.fixture
async def log() -> StallingLog:
    return StallingLog()


@pytest.fixture
async def streams(echo: ThreadClient, log: StallingLog) -> AsyncIterator[Streams]:
    streams = Streams({"echo": echo}, log, StreamConfig(first_reader_seconds=60, resume_window_seconds=0.05))
    yield streams
    await streams.aclose()


@pytest.mark.parametrize("name", AWAITS)
@pytest.mark.parametrize("how", ["stop", "deadline", "left", "closed"])
async def test_the_end_reaches_every_await(streams: Streams, echo: ThreadClient, name: str, how: str) -> None:
    """The await raises CancelledError, the engine has nothing of the run, and there is one terminal event."""
    life = Life(streams, echo, AWAITS[name])
    timeout = 600.0 if how == "deadline" else None
    stream = await streams.start(asked(timeout_seconds=timeout), Admission(owner="u", tenant="t"))
    async with asyncio.timeout(60):
        await life.reached.wait()
        if how == "stop":
            await stream.stop()
        elif how == "deadline":
            stream.transcript.timings.started_at -= 600.0  # it is over, now that the await is reached
            stream._timers.disarm("timeout")
            stream._arm_timeout()
        elif how == "left":
            stream.release()
        elif how == "closed":
            stream.shut_down()
        await life.ended.wait()
        await stream.ended.wait()
    assert isinstance(life.error, asyncio.CancelledError)
    end = stream.terminal
    got = end.finish_reason if isinstance(end, Done) else end.code if isinstance(end, Error) else None
    assert got == {"stop": "cancelled", "deadline": "timeout", "left": "abandoned", "closed": "engine_unavailable"}[how]
    await until(lambda: echo.stats().running == 0, "the engine computes nothing of it")


async def test_a_coroutine_that_comes_too_late_is_closed(streams: Streams, echo: ThreadClient) -> None:
    """A step's function on a thread returns it after the stop: Python would warn that it was never awaited."""
    has_begun, go = threading.Event(), threading.Event()
    made: list[Coroutine[Any, Any, Any]] = []

    def late() -> Any:
        has_begun.set()
        assert go.wait(60)
        made.append(asyncio.Event().wait())
        return made[0]

    life = Life(streams, echo, lambda run: run.step("waiting", late))
    stream = await streams.start(asked(), Admission(owner="u", tenant="t"))
    await until(has_begun.is_set, "the function runs")
    await stream.stop()
    async with asyncio.timeout(60):
        await life.ended.wait()
    go.set()
    await until(lambda: [inspect.getcoroutinestate(one) for one in made] == [inspect.CORO_CLOSED], "it is closed")


async def test_emits_wait_while_the_log_is_down(streams: Streams, echo: ThreadClient, log: StallingLog) -> None:
    """A run makes no more than `MAX_WAITING` events ahead of the log, and goes on as if nothing had been."""
    said, is_away = 0, asyncio.Event()
    enough = 2 * MAX_WAITING

    async def talks(run: Run) -> None:
        nonlocal said
        await run.step("talking", asyncio.sleep, 0)
        await is_away.wait()
        while said < enough:
            await run.say(f"{said} ")
            said += 1

    Life(streams, echo, talks)
    stream = await streams.start(asked(), Admission(owner="u", tenant="t"))
    await until(lambda: stream.last_seq == 2, "the step is shown")
    log.outage = LogUnavailable("away")
    is_away.set()
    await until(lambda: streams.writer.outage is not None, "the log is away")
    before = -1
    while said != before:  # until it stands still: each turn of the loop lets a run that is not held go on
        before = said
        for _ in range(50):
            await asyncio.sleep(0)
    assert said <= MAX_WAITING + 16 + 1  # and what the batch under way has taken
    log.outage = None
    events = [logged.event for logged in await collect(streams, stream)]
    text = "".join(event.text for event in events if isinstance(event, Token))
    assert text == "".join(f"{number} " for number in range(enough))
    assert [event.message for event in events if isinstance(event, Status) and event.status == "step"] == ["talking"]
    assert isinstance(events[-1], Done)
