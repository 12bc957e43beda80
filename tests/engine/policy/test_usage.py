"""Laws of the counts behind the live page: what was computed, computed again, and how the readers are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streamserve.engine.config import Policy
from streamserve.engine.policy.backlog import Rank, Ticket
from streamserve.engine.policy.usage import Usage
from streamserve.engine.sequence import Sequence
from tests.support.engines.cores import Drive, request, resuming, sampling

LONG = sampling(max_tokens=60)


def test_a_token_is_counted_once() -> None:
    """An answer alone: its prompt, and each token of it but the last, which nothing follows."""
    drive = Drive()
    drive.run(request(1, sampling=LONG))
    stats = drive.core.stats
    assert (stats.computed_tokens, stats.recomputed_tokens) == (20 + 59, 0)


def test_what_a_preemption_drops_is_counted_again() -> None:
    """Preempted with 40 computed tokens and no cache: these are recomputed, and no others."""
    drive = Drive(prefix_caching=False)
    drive.add(request(1, sampling=LONG))
    while drive.core.scheduler.running == [] or drive.core.scheduler.running[0].num_computed_tokens < 40:
        drive.step()
    drive.core.scheduler.forced_preempt = lambda running: running
    drive.step()
    drive.core.scheduler.forced_preempt = None
    while drive.core.has_work:
        drive.step()
    stats = drive.core.stats
    assert (stats.computed_tokens, stats.recomputed_tokens) == (20 + 59 + 40, 40)


def test_a_resumed_answer_recomputes_what_the_cache_lacks() -> None:
    """After a park in another engine all is computed again; where the blocks are still cached, hardly anything is."""
    for has_cache in (False, True):
        drive = Drive(lead_tokens=8, policy=Policy(stalled_seconds=0.0), prefix_caching=has_cache)
        one = request(1, sampling=LONG, reader_tokens=0)
        shown = drive.run(one)[1].token_ids
        before = drive.core.stats
        drive.run(resuming(replace(one, seq_id=2), output_token_ids=tuple(shown), reader_tokens=None))
        after = drive.core.stats
        recomputed = after.recomputed_tokens - before.recomputed_tokens
        assert before.recomputed_tokens == 0
        assert recomputed <= 4 if has_cache else recomputed == 20 + 7


def test_busy_seconds_are_those_of_steps() -> None:
    """A clock that stands still while the engine idles and moves while it steps."""
    drive = Drive()
    drive.run(request(1))
    busy = drive.core.stats.busy_seconds
    drive.clock.advance(100.0)
    assert drive.core.stats.busy_seconds == busy


def begun(num_tokens: int, num_read: int, *, is_away: bool = False) -> Sequence:
    """An answer that had its first token, and then a report of its reader, at second 0."""
    sequence = Sequence(request(1, sampling=LONG, reader_tokens=0))
    sequence.first_token_at = 0.0
    sequence.token_ids += range(num_tokens)
    sequence.reader.begin(1, 0.0)
    sequence.reader.report(num_read, num_tokens, 0.0, is_away=is_away)
    return sequence


def test_readers_are_counted_by_how_long_they_can_go_on() -> None:
    """At 20 tokens a second; a prompt has no reader yet. They are looked at four times a second at most."""
    usage, prompt = Usage(1.0), Sequence(request(2, sampling=LONG))
    running = [begun(10, 10), begun(40, 0), begun(55, 0), begun(10, 10, is_away=True), prompt]
    usage.look(running, 0.5)
    assert usage.readers(running) == {"hungry": 1, "ahead": 2, "away": 1}
    usage.look(running, 1.6)
    assert usage.readers(running) == {"late": 1, "hungry": 1, "ahead": 1, "away": 1}
    usage.look([], 1.7)
    assert usage.readers(running).total() == 4


def test_only_running_answers_have_readers_that_count() -> None:
    """One that has ended since the last look is not counted, nor is one that has begun."""
    usage, staying, leaving, coming = Usage(1.0), begun(10, 10), begun(10, 10), begun(10, 10)
    usage.look([staying, leaving], 0.5)
    assert usage.readers([staying, coming]) == {"hungry": 1}


def test_the_pace_is_of_the_readers_that_read() -> None:
    """A reader that is away reads nothing, and a row of a batch has no reader: it is never late."""
    usage, row = Usage(1.0), begun(10, 10)
    row.ticket = Ticket(order_key=(Rank.ROWS, 0.0, 1))
    running = [begun(10, 10), begun(40, 0), begun(10, 10, is_away=True), row]
    usage.look(running, 100.0)
    assert usage.readers(running) == {"late": 2, "away": 1, "row": 1}
    assert usage.readers_pace(running) == pytest.approx(sum(one.reader.pace for one in running[:2]))
    assert usage.readers_pace([]) == 0.0  # they have ended since the look


def test_an_idle_engine_has_no_readers() -> None:
    """No step looks at the readers of answers that have ended; the last look would be shown until the next answer."""
    drive = Drive()
    drive.add(request(1, sampling=LONG, reader_tokens=0))
    drive.step()
    drive.clock.advance(5.0)
    drive.step()
    counts = ("readers_away", "readers_late", "readers_hungry", "readers_ahead")
    assert sum(getattr(drive.core.stats, name) for name in counts) == 1
    drive.core.abort(1)
    drive.step()
    assert {name: getattr(drive.core.stats, name) for name in counts} == dict.fromkeys(counts, 0)


def test_a_request_that_waits_too_long_is_counted() -> None:
    """It expired; none of its tokens was computed."""
    drive = Drive(max_num_seqs=1, max_admitted=1)
    drive.add(request(1, sampling=LONG))
    drive.step()
    drive.add(request(2, queue_seconds=1.0))
    drive.step()
    drive.clock.advance(5.0)
    drive.step()
    assert drive.answers[2].error == "queue_timeout"
    assert drive.core.stats.expired == 1
