"""Laws of a run's phases: they add up, one within another and side by side, and stand in `done`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamserve.clients.pipeline.phases import RunPhases
from streamserve.clients.pipeline.run import Run
from streamserve.clients.thread.client import ThreadClient
from streamserve.protocol.events import Done, Error
from tests.clients.pipeline.conftest import SHORT, Site


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def site(echo: ThreadClient) -> AsyncIterator[Site]:
    site = Site(echo)
    yield site
    await site.streams.aclose()


def test_the_innermost_phase_counts() -> None:
    """What a phase contains is not counted for it; what the engine measured divides an answer."""
    clock = Clock()
    phases = RunPhases(clock)
    clock.now += 1
    with phases.during("retrieval"):
        clock.now += 2
        answer = phases.begin("first_token")
        clock.now += 10
        phases.end(answer, {"queue": 3.0, "prefill": 1.0, "generation": 4.0})
        clock.now += 4
    wanted = {"other": 3.0, "retrieval": 6.0, "queue": 3.0, "prefill": 1.0, "generation": 4.0}
    assert phases.seconds() == wanted


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 10))))
def test_they_add_up_however_they_overlap(moves: list[tuple[int, float]]) -> None:
    """Phases that begin and end in any order."""
    clock = Clock()
    phases, is_open = RunPhases(clock), {}
    for number, seconds in moves:
        clock.now += seconds
        if number in is_open:
            phases.end(is_open.pop(number))
        else:
            is_open[number] = phases.begin(f"p{number}")
    assert sum(phases.seconds().values()) == pytest.approx(clock.now - 100.0)


@pytest.mark.parametrize("name", ["Retrieval", "two words", "1st", "x" * 33])
async def test_a_name_that_is_none_fails_the_run(site: Site, name: str) -> None:
    """A phase is a key of `done`: lower case, no spaces, short."""

    async def wrong(run: Run) -> None:
        await run.step("s", str, phase=name)

    end = (await site.run(wrong))[-1]
    assert isinstance(end, Error)
    assert end.code == "pipeline_failed"
    with pytest.raises(ValueError, match="is no phase"):
        RunPhases().begin(name)


def test_names_are_bounded() -> None:
    """They stand in `done`, and in the row."""
    phases = RunPhases()
    for number in range(31):  # and `other`
        phases.end(phases.begin(f"p{number}"))
    phases.end(phases.begin("p3"))
    with pytest.raises(ValueError, match="at most"):
        phases.begin("one_more")


async def test_done_has_the_author_s_phases_and_the_engine_s(site: Site) -> None:
    """Steps with a phase, `trim`, tools and answers; with the stream's own they add up to the latency."""

    async def search() -> str:
        await asyncio.sleep(0.01)
        return "found"

    async def answer(run: Run) -> None:
        await run.step("Looking", search, phase="retrieval")
        await run.step("Sorting", search, phase="rerank")
        await run.step("Reading", search)
        await run.trim(["a b", "c d"], 100)
        await run.step("Writing", run.generate, "x", phase="own_words", **SHORT)

    end = (await site.run(answer))[-1]
    assert isinstance(end, Done)
    assert end.phases is not None
    named = {"intake", "retrieval", "rerank", "context", "generation", "other"}
    assert named <= end.phases.keys()
    assert {name: end.phases[name] > 0.009 for name in ("retrieval", "rerank", "other")} == {
        "retrieval": True,
        "rerank": True,
        "other": True,
    }
    assert sum(end.phases.values()) == pytest.approx(end.latency, abs=1e-6)
    assert sum(end.payload()["phases"].values()) == pytest.approx(end.payload()["latency"], abs=1e-3)


async def test_answers_side_by_side_are_counted_once(site: Site) -> None:
    """Two answers at once take no more than the time they took."""

    async def both(run: Run) -> Any:
        await asyncio.gather(*(run.generate(word, show=show, **SHORT) for word, show in (("a", True), ("b", False))))

    end = (await site.run(both))[-1]
    assert isinstance(end, Done)
    assert end.phases is not None
    assert sum(end.phases.values()) == pytest.approx(end.latency, abs=1e-6)
