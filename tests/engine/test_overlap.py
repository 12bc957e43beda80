"""Laws of planning a step while the one before is under way."""

from __future__ import annotations

import pytest

from streamserve.engine.plan import PENDING, Chunk
from streamserve.engine.sequence import SequenceRequest, State
from tests.support.engines.cores import request, sampling
from tests.support.engines.desk import Desk


def chunks_of(desk: Desk, seq_id: int) -> list[Chunk]:
    return [chunk for schedule in desk.schedules for chunk in schedule.chunks if chunk.seq_id == seq_id]


def test_pending_token_is_planned_before_it_is_known() -> None:
    """The step after the prompt computes the token that the prompt's step gives, at the position it will have."""
    desk = Desk(overlap=True)
    desk.add(request(1))
    first, second = desk.step().chunks[0], desk.step().chunks[0]
    assert bool(first.samples)
    assert bool(second.samples)
    assert (second.start, second.token_ids) == (20, (PENDING,))
    assert (first.samples[0].position, second.samples[0].position) == (20, 21)


def test_every_step_has_work_until_the_last_token() -> None:
    """A lone sequence takes no more steps than without overlap, and none goes beyond max_tokens."""
    plain, overlapping = Desk(), Desk(overlap=True)
    for desk in (plain, overlapping):
        desk.add(request(1))
        desk.run()
    positions = [
        [chunk.samples[0].position for chunk in chunks_of(desk, 1) if chunk.samples] for desk in (plain, overlapping)
    ]
    assert positions[0] == positions[1] == list(range(20, 30))


def test_prompt_continues_while_its_chunk_is_in_flight() -> None:
    """Chunks of a prompt follow each other without waiting, and no token is computed twice."""
    desk = Desk(overlap=True, max_num_batched_tokens=16)
    desk.add(request(1, range(40), sampling=sampling(max_tokens=1)))
    desk.run()
    assert [(chunk.start, len(chunk.token_ids)) for chunk in chunks_of(desk, 1)] == [(0, 16), (16, 16), (32, 8)]
    assert [bool(chunk.samples) for chunk in chunks_of(desk, 1)] == [False, False, True]


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_a_penalty_waits_for_no_token(penalty: str) -> None:
    """The pending token is counted where it is made: its sequence is in every step, and its row is begun once."""
    desk = Desk(overlap=True)
    desk.add(request(1, sampling=sampling(**{penalty: 1.5})))
    desk.run()
    plans = [schedule.chunks for schedule in desk.schedules if schedule.chunks]
    assert [len(chunks) for chunks in plans] == [1] * 10
    assert [chunks[0].token_ids == (PENDING,) for chunks in plans] == [False, *[True] * 9]
    specs = [chunk.samples[0] for chunk in chunks_of(desk, 1) if chunk.samples]
    assert [(spec.penalty_slot, len(spec.prompt_token_ids)) for spec in specs] == [(0, 20), *[(0, 0)] * 9]


def test_penalised_sequences_form_one_batch() -> None:
    """Two cohorts would alternate to the end: admitted together or a step apart, all are in every step."""
    desk = Desk(overlap=True)
    how = sampling(max_tokens=12, repetition_penalty=1.1)
    desk.add(request(1, sampling=how), request(2, range(40, 60), sampling=how))
    desk.step()
    desk.add(request(3, range(60, 80), sampling=how), request(4, range(80, 100), sampling=how))
    desk.run()
    sizes = [len(schedule.chunks) for schedule in desk.schedules if schedule.chunks]
    assert sizes == [2, *[4] * 11, 2]


def test_a_row_of_counts_is_begun_again_after_a_preemption() -> None:
    """With all known tokens at that time: the token in flight at the preemption is drawn again, and counted once."""
    desk = Desk(overlap=True)
    desk.add(request(1, sampling=sampling(frequency_penalty=1.0)))
    for _ in range(4):
        desk.step()
    desk.scheduler.forced_preempt = lambda running: running
    (spec,) = desk.step().chunks[0].samples
    desk.scheduler.forced_preempt = None
    assert spec is not None
    assert (spec.position, len(spec.prompt_token_ids), len(spec.output_token_ids)) == (23, 20, 3)


def test_one_that_waits_a_step_still_bounds_prefill() -> None:
    """Its reader waits for the next step, so no prompt may make that long."""
    desk = Desk(overlap=True, prefill_chunk=8)
    desk.add(request(1, sampling=sampling(max_tokens=1)))
    desk.step()
    desk.add(request(2, range(100, 150)))
    desk.step()
    assert desk.planned() == {2: 8}


@pytest.mark.parametrize("max_model_len", [None, 25])
def test_last_token_is_not_computed(max_model_len: int | None) -> None:
    """At max_tokens, or at the model's length, nothing is planned on top of the last token."""
    desk = Desk(overlap=True, max_model_len=max_model_len)
    desk.add(request(1))
    desk.run()
    assert chunks_of(desk, 1)[-1].start == (28 if max_model_len is None else 23)


def test_ends_are_banned_by_count() -> None:
    """min_tokens needs no token on the CPU: the ban holds for the same positions as without overlap."""
    bans = []
    for overlap in (False, True):
        desk = Desk(overlap=overlap)
        desk.add(request(1, eos_token_ids=frozenset({3}), sampling=sampling(min_tokens=4)))
        desk.run()
        bans.append([chunk.samples[0].banned_token_ids for chunk in chunks_of(desk, 1) if chunk.samples])
    assert bans[0] == bans[1] == [(3,)] * 4 + [()] * 6


def test_preempted_in_flight_starts_afresh() -> None:
    """The result of its step is dropped: the position is sampled again, from the known tokens."""
    desk = Desk(overlap=True)
    desk.add(request(1))
    for _ in range(3):
        desk.step()
    desk.scheduler.forced_preempt = lambda running: running
    chunk = desk.step().chunks[0]
    desk.scheduler.forced_preempt = None
    assert PENDING not in chunk.token_ids
    assert bool(chunk.samples)
    assert chunk.samples[0].position == 22
    desk.run()
    assert desk.sequences[1].num_output_tokens == 10


def test_finished_in_flight_holds_nothing() -> None:
    """An aborted sequence is in no later plan; its late result changes nothing, and its blocks can be given out."""
    desk = Desk(overlap=True, num_blocks=9)
    (sequence,) = desk.add(request(1))
    desk.step()
    desk.scheduler.finish(sequence)
    desk.add(request(2, range(50, 70)))
    assert desk.step().chunks[0].seq_id == 2
    desk.run()
    assert (sequence.state, sequence.num_output_tokens) == (State.FINISHED, 0)
    assert (sequence.num_launched_tokens, sequence.num_computed_tokens) == (0, 0)


def test_launch_can_be_taken_back() -> None:
    """After a failed launch the same chunk is planned again."""
    desk = Desk()
    (sequence,) = desk.add(request(1))
    first = desk.scheduler.schedule(desk.now).chunks[0]
    sequence.launch(len(first.token_ids), num_rows=1)
    assert desk.scheduler.schedule(desk.now).chunks[0].token_ids == (PENDING,)
    sequence.take_back(len(first.token_ids))
    assert desk.scheduler.schedule(desk.now).chunks == (first,)


@pytest.mark.parametrize("num_blocks", [200, 24])
def test_same_positions_with_and_without_overlap(num_blocks: int) -> None:
    """Each sequence's chunks that count cover the same positions in the same order, preempted or not."""

    def sampled(overlap: bool) -> dict[int, list[int]]:
        desk = Desk(overlap=overlap, num_blocks=num_blocks)
        desk.add(*mixed())
        desk.run()
        return {seq_id: sequence.token_ids for seq_id, sequence in desk.sequences.items()}

    assert sampled(True) == sampled(False)


def mixed() -> list[SequenceRequest]:
    """Prompts of many lengths, with and without penalties."""
    return [
        request(
            seq_id,
            range(seq_id * 10, seq_id * 10 + 1 + seq_id * 7 % 30),
            sampling=sampling(max_tokens=1 + seq_id * 5 % 21, presence_penalty=float(seq_id % 2)),
        )
        for seq_id in range(1, 13)
    ]
