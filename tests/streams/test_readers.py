"""Laws of the lag: how many tokens each reader has, and how often the engine gets a new position."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from streamserve.clients.engine_run import EngineRun
from streamserve.protocol.engine import Accepted
from streamserve.protocol.errors import QuotaExceeded
from streamserve.protocol.events import ChoiceDone, Status
from streamserve.protocol.requests import NO_CALLER, START, Resume
from streamserve.streams.readers import Attachment, ReaderLag, Readers
from streamserve.streams.transcript import Transcript
from tests.support.streams.hand_made import ScriptedClient, ScriptedSource, ask, tok


def make_transcript(n: int = 1) -> Transcript:
    return Transcript(Accepted(num_prompt_tokens=3, max_tokens=99, seed=1), n, started_at=0.0)


def make_lag(transcript: Transcript, *readers: Attachment, is_bounded: bool = True) -> ReaderLag:
    attached = Readers()
    for reader in readers:
        attached.add(reader)
    return ReaderLag(transcript, attached, is_bounded)


class Engine(EngineRun):
    """An answer that runs, and knows the position `known`."""

    def __init__(self, lag: ReaderLag, *, known: int, clock: Callable[[], float] = time.monotonic) -> None:
        client, request, resume = ScriptedClient(), ask(), Resume(reader_tokens=(known,))
        self.scripted = ScriptedSource(request)
        super().__init__(client, request, NO_CALLER, lag, self.scripted.generation, resume=resume, clock=clock)

    async def begin_anew(self) -> None:
        """Have the engine resume the answer, as after a park."""
        self.cancel()
        self.take(await self.ask(START, 0.0))
        self.scripted = self.client.last


def test_tokens_delivered_are_those_of_the_events_so_far() -> None:
    """For every seq the count equals that of a plain loop; events that are no tokens count nothing."""
    dice = random.Random(3)
    transcript, counts, after = make_transcript(n=2), [0, 0], [(0, 0)]
    for seq in range(1, 200):
        choice, num_tokens = dice.randrange(2), dice.randrange(4)
        is_token = dice.random() < 0.7
        transcript.note(
            tok("x", *range(1, num_tokens + 1), choice=choice) if is_token else Status(status="resumed"), seq
        )
        counts[choice] += (num_tokens or 1) * is_token
        after.append((counts[0], counts[1]))
    assert [transcript.delivered(seq) for seq in range(200)] == after
    assert transcript.delivered(10**6) == after[-1]
    assert sum(map(len, transcript.token_ids)) == transcript.num_tokens == sum(counts)


def test_finished_choices_are_not_waited_for() -> None:
    """The lag is that of the choice that still runs and is furthest ahead."""
    transcript = make_transcript(n=3)
    for choice, num_tokens in enumerate((9, 4, 2)):
        transcript.note(tok("x", *range(num_tokens), choice=choice), choice + 1)
    assert transcript.num_unread((0, 0, 0)) == 9
    transcript.note(ChoiceDone(choice=0, finish_reason="stop"), 4)
    assert transcript.num_unread((0, 1, 0)) == 3


def test_the_furthest_of_the_owners_readers_counts() -> None:
    """The owner's furthest reader counts, a watcher never does, and a reader of the whole answer lifts the bound."""
    transcript = make_transcript()
    for seq in range(1, 11):
        transcript.note(tok("x"), seq)
    readers = Attachment(received_seq=3), Attachment(received_seq=7), Attachment(received_seq=9, is_watcher=True)
    assert make_lag(transcript, *readers).reader_tokens == (7,)
    assert make_lag(transcript, *readers).num_unread == 3
    assert make_lag(transcript, Attachment(received_seq=9, is_watcher=True)).reader_tokens == (0,)
    unbounded = [
        make_lag(transcript, *readers, Attachment(is_paced=False)),
        make_lag(transcript, *readers, is_bounded=False),
    ]
    assert [(lag.reader_tokens, lag.num_unread) for lag in unbounded] == [(None, 0)] * 2


def test_the_engine_gets_positions_in_steps() -> None:
    """The engine gets a position every five tokens, whichever way, and at once if the bound is lifted."""
    transcript, reader, readers = make_transcript(), Attachment(), Readers()
    for seq in range(1, 101):
        transcript.note(tok("x"), seq)
    readers.add(reader)
    engine = Engine(ReaderLag(transcript, readers, is_bounded=True), known=0)
    source = engine.scripted
    for reader.received_seq in (*range(1, 101), 99, 60):
        engine.report()
    assert source.positions == [(seq,) for seq in range(5, 101, 5)] + [(60,)]
    reader.received_seq = 100
    engine.report()
    for seq in range(101, 113):
        transcript.note(tok("x"), seq)
        reader.received_seq = seq
        engine.report()
    assert source.positions[21:] == [(100,), (105,), (110,)]
    readers.add(Attachment(is_paced=False))
    for _ in range(2):
        engine.report()
    assert source.positions[24:] == [None]
    assert not any(source.are_away)


def test_a_burst_is_one_position() -> None:
    """What a reader takes at once is one message, however many tokens it is."""
    transcript, reader = make_transcript(), Attachment()
    for seq in range(1, 101):
        transcript.note(tok("x"), seq)
    engine = Engine(make_lag(transcript, reader), known=0)
    for reader.received_seq in (90, 90, 91):
        engine.report()
    assert engine.scripted.positions == [(90,)]


class Acknowledging(Attachment):
    """Remembers what it acknowledged."""

    def __init__(self, id: str, *, is_watcher: bool = False) -> None:
        super().__init__(is_watcher=is_watcher)
        self.id = id
        self.acks: list[tuple[int, bool]] = []

    def ack(self, seq: int, *, is_away: bool = False) -> None:
        self.acks.append((seq, is_away))


def test_an_acknowledgement_is_for_one_of_the_owners_readers() -> None:
    """By its id, at most twenty a second for each; a watcher, an unknown id and none have no part in the pace."""
    readers, first, second = Readers(), Acknowledging("a"), Acknowledging("b")
    for reader in (first, second, Acknowledging("w", is_watcher=True), Attachment()):
        readers.add(reader)
    assert readers.ack("a", 3, is_away=False, now=1.0)
    assert readers.ack("b", 4, is_away=True, now=1.01)
    with pytest.raises(QuotaExceeded) as refused:
        readers.ack("a", 5, is_away=False, now=1.04)
    assert refused.value.code == "too_many_acks"
    readers.ack("a", 6, is_away=False, now=1.06)
    assert (first.acks, second.acks) == ([(3, False), (6, False)], [(4, True)])
    assert not [unknown for unknown in ("w", "c") if readers.ack(unknown, 1, is_away=False, now=9.0)]


def test_the_furthest_reader_that_looks_counts() -> None:
    """A reader that looks away counts only where all do; a watcher's looking counts nothing."""
    transcript = make_transcript()
    for seq in range(1, 11):
        transcript.note(tok("x"), seq)
    hidden, seen, behind = Attachment(received_seq=9), Attachment(received_seq=5), Attachment(received_seq=2)
    watcher = Attachment(received_seq=10, is_watcher=True)
    hidden.is_away = True
    readers = Readers()
    for reader in (hidden, watcher):
        readers.add(reader)
    assert (readers.furthest_seq, readers.are_away) == (9, True)
    for reader in (behind, seen):
        readers.add(reader)
    assert (readers.furthest_seq, readers.are_away) == (5, False)
    assert (Readers().furthest_seq, Readers().are_away) == (0, False)


async def test_the_engine_learns_who_looks_away() -> None:
    """At once, but not more than every half second; then with the next position. A new generation begins looked at."""
    transcript, reader = make_transcript(), Attachment(received_seq=50)
    for seq in range(1, 101):
        transcript.note(tok("x"), seq)
    readers, now = Readers(), [0.0]
    readers.add(reader)
    engine = Engine(ReaderLag(transcript, readers, is_bounded=True), known=50, clock=lambda: now[0])
    source, told = engine.scripted, []
    for now[0], reader.is_away, reader.received_seq in (
        (1.0, True, 50), (1.1, False, 50), (1.2, True, 50), (1.3, False, 51),
        (1.55, False, 51), (1.6, True, 60), (9.0, True, 61),
    ):  # fmt: skip
        engine.report()
        told.append(len(source.positions))
    assert told == [1, 1, 1, 1, 2, 3, 3]
    assert (source.positions, source.are_away) == ([(50,), (51,), (60,)], [True, False, True])
    await engine.begin_anew()
    engine.report()
    assert (engine.scripted.positions, engine.scripted.are_away) == ([(61,)], [True])


async def test_a_new_generation_knows_what_it_was_asked_with() -> None:
    """A new generation knows the position it was asked with and does not get it twice."""
    transcript = make_transcript()
    for seq in range(1, 101):
        transcript.note(tok("x"), seq)
    engine = Engine(make_lag(transcript, Attachment(received_seq=50)), known=0)
    await engine.begin_anew()
    engine.report()
    assert engine.scripted.positions == []
