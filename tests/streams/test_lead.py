"""Laws of the lead: what each reader has, in tokens, and how often the engine hears of it."""

from __future__ import annotations

import random

from streamserve.protocol.events import ChoiceDone, Status
from streamserve.protocol.park import Accepted
from streamserve.streams.lead import Lead
from streamserve.streams.readers import Reader, Readers
from streamserve.streams.transcript import Transcript
from tests.support.streams import ScriptedGeneration, ask, tok


def make_tally(n: int = 1) -> Transcript:
    return Transcript(Accepted(num_prompt_tokens=3, max_tokens=99, seed=1), n, started_at=0.0)


def make_lead(tally: Transcript, *readers: Reader, is_bounded: bool = True) -> Lead:
    attached = Readers()
    for reader in readers:
        attached.add(reader)
    return Lead(tally, attached, is_bounded=is_bounded, told=(0,))


def test_tokens_delivered_are_those_of_the_events_so_far() -> None:
    """For every seq, as counting them one by one says; other events count nothing."""
    dice = random.Random(3)
    tally, counts, after = make_tally(n=2), [0, 0], [(0, 0)]
    for seq in range(1, 200):
        choice, num_tokens = dice.randrange(2), dice.randrange(4)
        is_token = dice.random() < 0.7
        tally.note(tok("x", *range(1, num_tokens + 1), choice=choice) if is_token else Status(status="resumed"), seq)
        counts[choice] += (num_tokens or 1) * is_token
        after.append((counts[0], counts[1]))
    assert [tally.delivered(seq) for seq in range(200)] == after
    assert tally.delivered(10**6) == after[-1]
    assert sum(map(len, tally.token_ids)) == tally.num_tokens == sum(counts)


def test_finished_choices_are_not_waited_for() -> None:
    """The lead is that of the choice that still runs and is furthest ahead."""
    tally = make_tally(n=3)
    for choice, num_tokens in enumerate((9, 4, 2)):
        tally.note(tok("x", *range(num_tokens), choice=choice), choice + 1)
    assert tally.num_unread((0, 0, 0)) == 9
    tally.note(ChoiceDone(choice=0, finish_reason="stop"), 4)
    assert tally.num_unread((0, 1, 0)) == 3


def test_the_furthest_of_the_owners_readers_counts() -> None:
    """Watchers never do; and who wants all at once lifts the bound."""
    tally = make_tally()
    for seq in range(1, 11):
        tally.note(tok("x"), seq)
    readers = Reader(seq=3), Reader(seq=7), Reader(seq=9, is_watcher=True)
    assert make_lead(tally, *readers).reader_tokens == (7,)
    assert make_lead(tally, *readers).num_unread == 3
    assert make_lead(tally, Reader(seq=9, is_watcher=True)).reader_tokens == (0,)
    unbounded = [make_lead(tally, *readers, Reader(is_paced=False)), make_lead(tally, *readers, is_bounded=False)]
    assert [(lead.reader_tokens, lead.num_unread) for lead in unbounded] == [(None, 0)] * 2


def test_the_engine_hears_of_reading_in_steps() -> None:
    """Every 32 tokens behind the end, every 8 at the end, and at once of a reader that is not waited for."""
    tally, reader, generation = make_tally(), Reader(), ScriptedGeneration(ask())
    for seq in range(1, 101):
        tally.note(tok("x"), seq)
    readers = Readers()
    readers.add(reader)
    lead = Lead(tally, readers, is_bounded=True, told=(0,))
    for reader.seq in (*range(1, 101), 99, 60):
        lead.tell(generation)
    assert generation.positions == [(32,), (64,), (96,), (60,)]
    reader.seq = 100
    lead.tell(generation)
    for seq in range(101, 121):
        tally.note(tok("x"), seq)
        reader.seq = seq
        lead.tell(generation)
    assert generation.positions[4:] == [(100,), (108,), (116,)]
    readers.add(Reader(is_paced=False))
    for _ in range(2):
        lead.tell(generation)
    assert generation.positions[7:] == [None]


def test_a_new_generation_knows_what_it_was_asked_with() -> None:
    """The same position is not told twice."""
    tally, generation = make_tally(), ScriptedGeneration(ask())
    for seq in range(1, 101):
        tally.note(tok("x"), seq)
    lead = make_lead(tally, Reader(seq=50))
    lead.begin((50,))
    lead.tell(generation)
    assert generation.positions == []
