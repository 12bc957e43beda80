"""Laws of parking in the core: when a sequence parks, what it frees, and that a resume continues."""

from __future__ import annotations

from dataclasses import replace

import pytest

from streamserve.engine.config import Policy
from streamserve.engine.sequence import SequenceRequest
from streamserve.protocol.engine import Park
from tests.support.engines.cores import PATIENT, Drive, alone, request, resuming, sampling

LONG = sampling(max_tokens=60)


def again(one: SequenceRequest, seq_id: int, shown: list[int]) -> SequenceRequest:
    """The same request with the shown tokens, all of which its reader has read."""
    return resuming(replace(one, seq_id=seq_id), output_token_ids=tuple(shown), reader_tokens=len(shown))


@pytest.mark.parametrize("overlap", [False, True])
def test_sequence_is_held_while_its_reader_is_too_far_behind(overlap: bool) -> None:
    """It stops with the token that reaches the limit, keeps its blocks, and the engine rests; reports alone move it."""
    drive = Drive(lead_tokens=8, overlap=overlap)
    answer = drive.run(request(1, sampling=LONG, reader_tokens=0))[1]
    num_steps, num_blocks = drive.core.stats.steps, drive.core.stats.blocks_used
    assert (answer.token_ids, answer.park) == (alone(request(1, sampling=LONG))[:8], None)
    assert (drive.core.has_work, drive.core.is_resting, num_blocks) == (False, True, 7)
    drive.step()
    assert (drive.core.stats.steps, drive.core.stats.blocks_used) == (num_steps, num_blocks)
    for num_read in range(3, 60, 3):
        drive.core.reader_at(1, num_read)
        assert drive.core.has_work
        drive.run()
        assert len(answer.token_ids) == min(60, num_read + 8)
    assert (answer.token_ids, answer.finish_reason) == (alone(request(1, sampling=LONG)), "length")
    assert (drive.core.stats.parks, drive.core.stats.recomputed_tokens) == (0, 0)
    drive.assert_empty()


@pytest.mark.parametrize("overlap", [False, True])
def test_sequence_whose_reader_does_not_move_parks(overlap: bool) -> None:
    """After half a minute without a report it gives its blocks back; before that a report begins the time anew."""
    drive = Drive(lead_tokens=8, overlap=overlap)
    answer = drive.run(request(1, sampling=LONG, reader_tokens=0))[1]
    drive.clock.advance(29)
    drive.core.reader_at(1, 1)
    drive.run()
    drive.clock.advance(29)
    drive.step()
    assert (answer.park, len(answer.token_ids)) == (None, 9)
    drive.clock.advance(1.5)
    drive.step()
    assert answer.park == Park(reason="lead", resume_at_lead=4)
    assert drive.core.stats.parks == 1
    drive.assert_empty()


def test_held_sequence_still_ends() -> None:
    """An abort, a deadline and an operator's pause reach a sequence that waits for its reader."""
    drive = Drive(lead_tokens=8)
    deadline = drive.clock() + 50.0
    drive.run(*(request(number, sampling=LONG, reader_tokens=0, deadline=deadline) for number in (1, 2, 3)))
    drive.core.abort(1)
    assert drive.core.has_work
    drive.run()
    drive.core.reader_at(2, None)
    assert drive.run()[2].finish_reason == "length"
    drive.clock.advance(60)
    drive.step()
    assert drive.answers[3].error == "timeout"
    drive.run(request(4, sampling=LONG, reader_tokens=0))
    drive.core.pause()
    assert drive.run()[4].park == Park(reason="paused")
    drive.assert_empty()


@pytest.mark.parametrize("overlap", [False, True])
def test_held_sequences_park_for_memory(overlap: bool) -> None:
    """For a waiting sequence those that are held park, furthest ahead first (the newest), and no more than needed."""
    drive, how = Drive(lead_tokens=8, num_blocks=35, overlap=overlap), sampling(max_tokens=16)
    for number in (1, 2, 3):
        drive.run(request(number, range(number, number + 20), sampling=how, reader_tokens=0))
        drive.clock.advance(0.05)
    assert not any(answer.park for answer in drive.answers.values())
    drive.run(request(4, range(50, 100), sampling=sampling(max_tokens=4)))
    parks = {seq_id: answer.park for seq_id, answer in drive.answers.items() if answer.park}
    assert parks == {3: Park(reason="lead", resume_at_lead=4)}
    assert drive.answers[4].finish_reason == "length"


@pytest.mark.parametrize("overlap", [False, True])
def test_held_sequence_parks_before_another_is_preempted(overlap: bool) -> None:
    """The next token of a running sequence needs a block: the one that waits for its reader gives its own."""
    drive = Drive(lead_tokens=8, num_blocks=18, overlap=overlap)
    drive.run(request(1, sampling=LONG, reader_tokens=0))
    drive.core.scheduler._reserve._share = 0.0
    answers = drive.run(request(2, range(30, 50), sampling=sampling(max_tokens=40)))
    assert (answers[1].park, answers[2].finish_reason) == (Park(reason="lead", resume_at_lead=4), "length")
    assert drive.core.stats.preemptions == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_parked_and_asked_again_gives_the_whole_answer(overlap: bool) -> None:
    """Park after park, the tokens are those of a sequence that never parked."""
    drive = Drive(lead_tokens=8, policy=Policy(stalled_seconds=0.0), overlap=overlap)
    one, shown, seq_id = request(1, sampling=LONG, reader_tokens=0), [], 1
    while True:
        answer = drive.run(again(one, seq_id, shown))[seq_id]
        shown += answer.token_ids
        if answer.park is None:
            break
        seq_id += 1
    assert shown == alone(request(1, sampling=LONG))
    assert seq_id == 8


def test_sequence_whose_reader_keeps_up_is_never_parked() -> None:
    """The limit counts from the reader's position, not from the start."""
    drive = Drive(lead_tokens=8)
    drive.add(request(1, sampling=LONG, reader_tokens=0))
    while len(shown := drive.answers[1].token_ids) < 60:
        drive.core.reader_at(1, len(shown))
        drive.step()
    assert drive.answers[1].finish_reason == "length"


def test_sequence_without_a_reader_position_never_parks() -> None:
    """Sequences without a reader's position never park."""
    drive = Drive(lead_tokens=8)
    drive.add(request(1, sampling=LONG), request(2, sampling=LONG, reader_tokens=0))
    drive.step()
    drive.core.reader_at(2, None)
    assert {answer.finish_reason for answer in drive.run().values()} == {"length"}


def test_end_goes_before_park() -> None:
    """The last token ends the answer, though its reader is far behind."""
    answer = Drive(lead_tokens=8).run(request(1, sampling=sampling(max_tokens=8), reader_tokens=0))[1]
    assert (answer.finish_reason, answer.park) == ("length", None)


def test_neighbours_of_a_held_sequence_finish_in_fewer_steps() -> None:
    """A slow reader's sequence makes room: three answers in a batch of two take fewer steps than without the lead."""

    def num_steps(reader_tokens: int | None) -> int:
        drive = Drive(lead_tokens=8, max_num_seqs=2)
        slow = request(1, sampling=LONG, reader_tokens=reader_tokens)
        drive.run(slow, request(2, sampling=LONG), request(3, sampling=LONG))
        return len(drive.plans)

    assert num_steps(reader_tokens=0) * 1.5 < num_steps(reader_tokens=None)


def test_reader_of_an_ended_sequence_is_nothing_odd() -> None:
    """Answers end before they are read to the end: no unknown id is counted."""
    drive = Drive()
    drive.run(request(1))
    drive.core.reader_at(1, 10)
    drive.step()
    assert drive.core.stats.unknown_ids == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_pause_parks_everything_until_resume(overlap: bool) -> None:
    """A pause parks running, waiting and new sequences and frees all blocks; resumed ones continue."""
    drive = Drive(max_num_seqs=1, overlap=overlap)
    drive.add(request(1, sampling=LONG), request(2, sampling=LONG))
    for _ in range(5):
        drive.step()
    drive.core.pause()
    drive.run(request(3))
    assert {answer.park for answer in drive.answers.values()} == {Park(reason="paused")}
    assert drive.core.stats.is_paused
    drive.assert_empty()
    drive.core.resume()
    shown = drive.answers[1].token_ids
    answers = drive.run(request(4, sampling=LONG, output_token_ids=tuple(shown)), request(5))
    assert shown + answers[4].token_ids == alone(request(1, sampling=LONG))
    assert answers[5].finish_reason == "length"
    assert not drive.core.stats.is_paused


def test_paused_engine_still_ends_what_is_over() -> None:
    """An answer that lacks only its end gets it, instead of a park."""
    drive = Drive()
    shown = tuple(alone(request(1)))
    drive.core.pause()
    assert drive.run(request(2, output_token_ids=shown))[2].finish_reason == "length"


def test_abort_of_a_parked_sequence_is_late_and_counted() -> None:
    """After the park the engine no longer knows the sequence."""
    drive = Drive(lead_tokens=8, policy=Policy(stalled_seconds=0.0))
    drive.run(request(1, sampling=LONG, reader_tokens=0))
    drive.core.abort(1)
    drive.step()
    assert drive.core.stats.unknown_ids == 1


def test_sequence_ahead_of_its_reader_parks_for_a_waiting_one() -> None:
    """A sequence far ahead of its reader parks where a waiting one lacks memory, with the seconds until its resume."""
    drive = Drive(num_blocks=20, policy=Policy(min_ahead_seconds=1.0))
    drive.add(request(1, sampling=LONG, reader_tokens=0))
    for _ in range(30):
        drive.step()
    drive.run(request(2, range(50), sampling=sampling(max_tokens=4)))
    park = drive.answers[1].park
    assert park is not None
    assert park.reason == "ahead"
    assert 0.5 <= park.resume_seconds < 1.0
    assert drive.answers[2].finish_reason == "length"


def test_waiting_too_long_is_an_error() -> None:
    """A sequence not started within its class's time ends with queue_timeout, and does not block the queue."""
    classes = {**PATIENT, "chat": replace(PATIENT["chat"], max_queue_seconds=0.2)}
    drive = Drive(max_num_seqs=1, classes=classes)
    drive.add(request(1, sampling=LONG), request(2), request(3, latency_class="document"))
    drive.run()
    ends = [(answer.finish_reason, answer.error) for answer in drive.answers.values()]
    assert ends == [("length", None), (None, "queue_timeout"), ("length", None)]


def test_sequence_that_can_start_now_is_not_refused() -> None:
    """A late sequence that fits is started."""
    drive = Drive(classes={**PATIENT, "chat": replace(PATIENT["chat"], max_queue_seconds=0.2)})
    drive.add(request(1))
    drive.core._drain()
    drive.clock.advance(5)
    assert drive.run()[1].finish_reason == "length"


def test_resumed_sequence_keeps_the_time_of_its_first_token() -> None:
    """Time to the first token is that of the answer, not of the admission."""
    drive = Drive()
    shown = alone(request(1))[:3]
    answer = drive.run(request(2, output_token_ids=tuple(shown), first_token_at=42.0))[2]
    assert {update.first_token_at for update in answer.updates} == {42.0}
