"""Hand-made engines and logs for the stream tests: a generation that yields what is pushed, and a log that stalls."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

from streamserve.clients.base import EngineClient, Generation, Source
from streamserve.clients.factory import echo_client
from streamserve.clients.thread.client import ThreadClient
from streamserve.engine.config import EngineConfig
from streamserve.engine.plan import StepPlan
from streamserve.protocol.engine import Accepted, ModelDescription, Park
from streamserve.protocol.events import Done, Event, LoggedEvent, Token
from streamserve.protocol.requests import NO_CALLER, START, Admission, GenerateRequest, Resume, SamplingParams
from streamserve.streams.log.base import Batch, LogUnavailable, MemoryLog, Result

_DEADLINE_SECONDS = 90.0


def tok(text: str, *ids: int, choice: int = 0) -> Token:
    """Return a token event."""
    return Token(text=text, token_ids=ids or (7,), choice=choice)


def ask(
    model: str = "echo", *, max_tokens: int = 24, prompt: str = "hello", n: int = 1, **rest: object
) -> GenerateRequest:
    """Return a request with a fixed seed; `rest` are GenerateRequest's fields or SamplingParams'."""
    fields = {name: rest.pop(name) for name in list(rest) if name in GenerateRequest.__slots__}
    sampling = SamplingParams(**{"seed": 1, "max_tokens": max_tokens, **rest})
    return GenerateRequest(model=model, prompt=prompt, n=n, sampling=sampling, **fields)


def untimed(event: Event) -> Event:
    """Return a `done` without the times that the stream gives it."""
    return replace(event, latency=0.0, breakdown={}, phases=None) if isinstance(event, Done) else event


async def until(claim: Callable[[], bool], what: str) -> None:
    """Wait until `claim` holds; name `what` in the failure. For state that has no event to wait on."""
    try:
        async with asyncio.timeout(_DEADLINE_SECONDS):
            while not claim():  # noqa: ASYNC110 - engine threads have no asyncio.Event to set
                await asyncio.sleep(0.001)
    except TimeoutError:
        raise AssertionError(f"not within {_DEADLINE_SECONDS:.0f} s: {what}") from None


class ScriptedSource(Source):
    """Yields what the test pushes, and ends where the test ends it."""

    def __init__(self, request: GenerateRequest, *, can_park: bool = True, has_token_ids: bool = True) -> None:
        max_tokens = request.sampling.max_tokens or 99
        super().__init__(Accepted(num_prompt_tokens=3, max_tokens=max_tokens, seed=11, has_token_ids=has_token_ids))
        self.positions: list[tuple[int, ...] | None] = []  # the arguments of `reader_at`
        self.are_away: list[bool] = []
        self.is_cancelled = False
        self._can_park = can_park
        self._park: Park | None = None
        self._script: deque[Event | BaseException | None] = deque()

    @property
    def can_park(self) -> bool:
        return self._can_park

    def push(self, *script: Event | BaseException | None) -> None:
        """Yield these next; an exception is raised, None ends the iteration."""
        self._script.extend(script)
        self.generation.announce()

    def park(self, park: Park) -> None:
        """End like an engine that parks the sequences, after what was pushed."""
        self._park = park
        self.push(None)

    def pull(self, most: int | None) -> list[Event]:
        events: list[Event] = []
        while self._script and len(events) != most and self.generation.is_open:
            if isinstance(self._script[0], BaseException):
                if events:  # it is raised by the next call
                    asyncio.get_running_loop().call_soon(self.generation.announce)
                    break
                raise self._script.popleft()
            item = self._script.popleft()
            if item is None:
                self.generation.close(parked=self._park)
            else:
                events.append(item)
        return events

    def reader_at(self, num_tokens: Sequence[int] | None, is_away: bool) -> None:
        self.positions.append(None if num_tokens is None else tuple(num_tokens))
        self.are_away.append(is_away)

    def cancel(self) -> None:
        self.is_cancelled = True
        self._script.clear()


class ScriptedClient:
    """An engine whose acceptance the test decides: `answers` are raised in turn before requests are accepted."""

    alias = "scripted"

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.admissions: list[Admission] = []
        self.resumes: list[Resume] = []
        self.sources: list[ScriptedSource] = []
        self.refusals: deque[Exception] = deque()
        self.hold: asyncio.Event | None = None
        self.description = ModelDescription(alias=self.alias, state="ready")

    def start(self) -> None:
        """Nothing is loaded here."""

    def wake(self) -> None:
        """It never sleeps."""

    def describe(self) -> ModelDescription:
        return self.description

    async def generate(
        self, request: GenerateRequest, admission: Admission = NO_CALLER, resume: Resume = START
    ) -> Generation:
        self.requests.append(request)
        self.admissions.append(admission)
        self.resumes.append(resume)
        if self.hold is not None:
            await self.hold.wait()
        if self.refusals:
            raise self.refusals.popleft()
        self.sources.append(self._source(request))
        return self.last.generation

    def _source(self, request: GenerateRequest) -> ScriptedSource:
        return ScriptedSource(request)

    @property
    def last(self) -> ScriptedSource:
        return self.sources[-1]


class ParkingSource(Source):
    """The events of a real generation that is parked after a number of token events, as an engine may park it."""

    def __init__(self, inner: Generation, park: Park, num_tokens: int) -> None:
        super().__init__(inner.accepted)
        inner.on_news = self.generation.announce
        self._inner, self._park = inner, park
        self._num_left = num_tokens

    def pull(self, most: int | None) -> list[Event]:
        out: list[Event] = []
        while self._num_left and len(out) != most and (events := self._inner.ready(1)):
            out += events
            self._num_left -= self._counts(events[0])
        if not self._num_left:
            self._inner.cancel()
            self.generation.close(parked=self._park)
        elif not self._inner.is_open and len(out) != most:
            self.generation.close(parked=self._inner.parked)
        self.generation.num_cached_tokens = self._inner.num_cached_tokens
        return out

    def reader_at(self, num_tokens: Sequence[int] | None, is_away: bool) -> None:
        self._inner.reader_at(num_tokens, is_away)

    def cancel(self) -> None:
        self._inner.cancel()

    def _counts(self, event: Event) -> bool:
        return isinstance(event, Token)


class ParkingClient:
    """An engine that parks every generation after `num_tokens` token events, for the reasons given, in turn."""

    alias = "parking"

    def __init__(self, inner: EngineClient, parks: Iterable[Park], *, num_tokens: int = 1) -> None:
        self.num_requests = 0
        self._inner, self._parks = inner, cycle(parks)
        self._num_tokens = num_tokens

    async def generate(self, *asked: Any) -> Generation:
        self.num_requests += 1
        return ParkingSource(await self._inner.generate(*asked), next(self._parks), self._num_tokens).generation


class StallingLog(MemoryLog):
    """A log whose commits take as long as the test sets, and which can fail or be away."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.go.set()
        self.batches: list[list[Event]] = []  # what was committed
        self.num_commits = self.num_reads = 0
        self.is_broken = False
        self.outage: LogUnavailable | None = None  # raised by commits and reads while it is set

    async def commit(self, batches: Sequence[Batch]) -> list[Result]:
        self.num_commits += 1
        await self.go.wait()
        if self.outage is not None:
            raise self.outage
        if self.is_broken:
            raise OSError("no space left on device")
        self.batches += [list(batch.events) for batch in batches]
        return await super().commit(batches)

    async def read(self, log_id: str, after: int, limit: int = 512) -> list[LoggedEvent]:
        self.num_reads += 1
        if self.outage is not None:
            raise self.outage
        return await super().read(log_id, after, limit)


class Gate:
    """Holds the engine before a step runs, on its own thread, and can keep the plans. Open at first."""

    def __init__(self, *, keeps_plans: bool = True) -> None:
        self.plans: list[StepPlan] = []
        self._keeps_plans = keeps_plans
        self._condition = threading.Condition()
        self._allowed: int | None = None
        self._is_holding = False

    def __call__(self, plan: StepPlan) -> None:
        with self._condition:
            if self._keeps_plans:
                self.plans.append(plan)
            self._is_holding = True
            self._condition.wait_for(lambda: self._allowed is None or self._allowed > 0, timeout=_DEADLINE_SECONDS)
            self._is_holding = False
            if self._allowed is not None:
                self._allowed -= 1

    def allow(self, num_steps: int) -> None:
        """Let `num_steps` more steps run, then hold."""
        with self._condition:
            self._allowed = num_steps
            self._condition.notify_all()

    def open(self) -> None:
        """Hold no step."""
        with self._condition:
            self._allowed = None
            self._condition.notify_all()

    @property
    def is_holding(self) -> bool:
        with self._condition:
            return self._is_holding and self._allowed == 0


async def started_echo(gate: Gate | None = None, **config: object) -> ThreadClient:
    """Return an echo engine that is ready."""
    client = echo_client(config=EngineConfig(check_integrity=True, **config), on_plan=gate)
    _: EngineClient = client
    client.start()
    await until(lambda: client.describe().state == "ready", "the echo engine is ready")
    return client
