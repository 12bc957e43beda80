"""Laws of `SequenceSource`, fed with updates by hand: its events, its parks, and what it asks of the engine."""

from __future__ import annotations

from typing import Any

import pytest

from streamserve.clients.thread.source import SequenceSource
from streamserve.clients.timings import RequestTimes
from streamserve.engine.echo import EchoTokenizer
from streamserve.engine.output import SequenceUpdate
from streamserve.engine.text.choice import Choice
from streamserve.protocol.engine import Accepted, Park
from streamserve.protocol.events import ChoiceDone, Done, Error, Token
from streamserve.protocol.requests import SamplingParams
from tests.support.engines.clients import collect, text

LEAD = Park(reason="lead", resume_at_lead=128)


class RecordingEngine:
    """Takes the engine's place: records the source's calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def abort(self, seq_id: int) -> None:
        self.calls.append(("abort", seq_id))

    def stop(self, seq_id: int, at: int) -> None:
        self.calls.append(("stop", seq_id, at))

    def reader_at(self, seq_id: int, num_tokens: int | None, is_away: bool = False) -> None:
        self.calls.append(("reader_at", seq_id, num_tokens, is_away))


def source_of(engine: RecordingEngine, *, n: int = 1, shown: str = "", **sampling: Any) -> SequenceSource:
    """Return a source whose sequences are 10, 11, ..."""
    params = SamplingParams(max_tokens=99, seed=1, **sampling)
    tokenizer = EchoTokenizer()
    choices = {
        10 + index: Choice(tokenizer, params, index=index, shown_token_ids=tuple(shown.encode())) for index in range(n)
    }
    accepted = Accepted(num_prompt_tokens=3, max_tokens=99, seed=1)
    return SequenceSource(accepted, choices, times=RequestTimes(0.0), engine=engine)


def update(letters: str = "", *, seq_id: int = 10, **fields: Any) -> SequenceUpdate:
    return SequenceUpdate(seq_id=seq_id, at=1.0, token_ids=tuple(letters.encode()), scheduled_at=0.5, **fields)


async def test_park_ends_the_iterator_after_what_was_queued() -> None:
    """The tokens come, no terminal event does, and `parked` has the reason."""
    engine = RecordingEngine()
    source = source_of(engine)
    generation = source.generation
    source.take(update("ab"))
    source.take(update("c", park=LEAD))
    events = await collect(generation)
    assert text(events) == "abc"
    assert all(isinstance(event, Token) for event in events)
    assert (generation.parked, generation.is_open, engine.calls) == (LEAD, False, [])


async def test_one_parked_choice_parks_all() -> None:
    """The other choices are aborted, and their later updates are not shown."""
    engine = RecordingEngine()
    source = source_of(engine, n=3)
    generation = source.generation
    source.take(update("a", seq_id=10))
    source.take(update("b", seq_id=11, park=LEAD))
    source.take(update("c", seq_id=12))
    events = await collect(generation)
    assert [text(events, choice) for choice in range(3)] == ["a", "b", ""]
    assert engine.calls == [("abort", 10), ("abort", 12)]
    assert generation.parked == LEAD


async def test_a_choice_that_is_over_does_not_park() -> None:
    """A stop string in the token that reached the lead limit is the end of the choice, not a park."""
    engine = RecordingEngine()
    source = source_of(engine, stop=("!",))
    generation = source.generation
    source.take(update("a!", park=LEAD))
    *_, done = await collect(generation)
    assert isinstance(done, Done)
    assert (done.finish_reason, generation.parked, engine.calls) == ("stop", None, [])


async def test_finished_choices_do_not_keep_the_others_from_parking() -> None:
    """One choice has ended, the last one parks: the generation parks after the `choice_done` of the first."""
    source = source_of(RecordingEngine(), n=2)
    generation = source.generation
    source.take(update("a", finish_reason="length"))
    source.take(update("b", seq_id=11, park=LEAD))
    events = await collect(generation)
    assert [event.choice for event in events if isinstance(event, ChoiceDone)] == [0]
    assert generation.parked == LEAD


async def test_held_back_text_stays_held_across_a_park() -> None:
    """A park releases no held text: the resumed choice holds it back as before, and the whole text is equal."""
    first = source_of(RecordingEngine(), stop=("bcd",))
    first.take(update("ab", park=LEAD))
    before = await collect(first.generation)
    second = source_of(RecordingEngine(), shown="ab", stop=("bcd",))
    second.take(update("cx", finish_reason="length"))
    after = await collect(second.generation)
    assert (text(before), text(after)) == ("a", "bcx")


async def test_nothing_follows_an_end() -> None:
    """A park after an error, and an error after a park, change nothing."""
    failed, parked = source_of(RecordingEngine()), source_of(RecordingEngine())
    failed.take(update(error="numerical_error"))
    failed.take(update(park=LEAD))
    parked.take(update(park=LEAD))
    parked.fail(Error(code="engine_died", message="late"))
    assert failed.generation.parked is None
    assert [type(event) for event in await collect(failed.generation)] == [Error]
    assert await collect(parked.generation) == []


async def test_an_ended_sequence_is_not_aborted() -> None:
    """An ended sequence needs no abort: unknown ids remain a sign of a fault."""
    engine = RecordingEngine()
    source_of(engine).take(update(error="numerical_error"))
    source_of(engine).take(update("a", finish_reason="length"))
    assert engine.calls == []


async def test_a_failed_choice_aborts_the_others() -> None:
    """One choice fails: the request ends, and the engine aborts the rest, once."""
    engine = RecordingEngine()
    source = source_of(engine, n=3)
    generation = source.generation
    source.take(update(seq_id=11, error="numerical_error"))
    generation.cancel()
    assert engine.calls == [("abort", 10), ("abort", 12)]


async def test_an_update_without_text_is_no_news() -> None:
    """An update that a sequence was scheduled is not announced."""
    source = source_of(RecordingEngine())
    generation = source.generation
    calls: list[None] = []
    generation.on_news = lambda: calls.append(None)
    source.take(update(num_cached_tokens=2))
    assert calls == []
    assert generation.num_cached_tokens == 2


async def test_reader_positions_reach_what_still_runs() -> None:
    """Each choice has its own position; finished ones need none; None frees all. Whether it looks goes along."""
    engine = RecordingEngine()
    source = source_of(engine, n=3)
    generation = source.generation
    source.take(update(seq_id=11, finish_reason="length"))
    generation.reader_at((5, 6, 7), is_away=True)
    generation.reader_at(None)
    generation.cancel()
    generation.reader_at((9, 9, 9))
    assert engine.calls[:4] == [
        ("reader_at", 10, 5, True),
        ("reader_at", 12, 7, True),
        ("reader_at", 10, None, False),
        ("reader_at", 12, None, False),
    ]
    assert engine.calls[4:] == [("abort", 10), ("abort", 12)]


@pytest.mark.parametrize(("shown", "park", "is_whole"), [("", None, True), ("", LEAD, False), ("a", None, False)])
async def test_only_whole_runs_count_as_answers(shown: str, park: Park | None, is_whole: bool) -> None:
    """A run before or after a park does not measure a whole answer."""
    source = source_of(RecordingEngine(), shown=shown)
    source.take(update("b", park=park, finish_reason=None if park else "length"))
    assert source.is_whole is is_whole
