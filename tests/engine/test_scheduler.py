"""Laws of the scheduler, read off the plans of a driven core."""

from __future__ import annotations

import pytest

from streamserve.engine.capacity import max_servable_tokens
from tests.support.engines.cores import Drive, request, sampling


def first_steps(drive: Drive) -> list[int]:
    """The sequences in order of their first step."""
    return list(dict.fromkeys(chunk.seq_id for plan in drive.plans for chunk in plan.chunks))


def test_lone_prompt_is_one_chunk() -> None:
    """With nothing else to do, a prompt takes the whole budget at once."""
    drive = Drive(prefill_chunk=4)
    drive.add(request(1, range(50)))
    drive.step()
    assert drive.planned() == {1: 50}


def test_prompt_beyond_the_budget_is_chunked() -> None:
    """No step computes more tokens than the budget; only the last chunk samples."""
    drive = Drive(max_num_batched_tokens=16)
    drive.run(request(1, range(40), sampling=sampling(max_tokens=1)))
    assert [plan.num_tokens for plan in drive.plans] == [16, 16, 8]
    assert [bool(plan.chunks[0].samples) for plan in drive.plans] == [False, False, True]


def test_decodes_come_first_and_prefill_is_capped() -> None:
    """Beside decodes, each step decodes every sequence and prefills at most one chunk."""
    drive = Drive(prefill_chunk=8)
    drive.add(request(1), request(2, range(50, 70)))
    drive.step()
    drive.add(request(3, range(100, 130)))
    drive.step()
    assert list(drive.planned().items()) == [(1, 1), (2, 1), (3, 8)]
    drive.step()
    assert list(drive.planned().items()) == [(1, 1), (2, 1), (3, 8)]


def test_every_running_sequence_decodes_in_every_step() -> None:
    """No decode is left out for a prompt, though this one is first in order and could take every step whole."""
    drive = Drive(prefill_chunk=1000, max_num_batched_tokens=10, num_blocks=200)
    drive.add(request(1, range(3)), request(2, range(3)))
    drive.step()
    drive.add(request(0, range(100, 160)))
    num_beside = 0
    while not all(drive.answers[seq_id].finish_reason for seq_id in (1, 2)):
        drive.step()
        assert drive.planned()[1] == drive.planned()[2] == 1
        num_beside += drive.planned().get(0, 0)
    assert num_beside == 60 + 1  # 8 a step beside the decodes


def test_waiting_are_admitted_in_order_of_arrival() -> None:
    """First come, first served, whatever the order of the calls."""
    drive = Drive(max_num_seqs=1)
    drive.run(request(3, arrived_at=3.0), request(1, arrived_at=1.0), request(2, arrived_at=2.0))
    assert first_steps(drive) == [1, 2, 3]


def test_class_gives_a_head_start() -> None:
    """A chat goes before a document that came up to 2.5 s earlier, and not before an older one."""
    drive = Drive(max_num_seqs=1)
    documents = [request(seq_id, arrived_at=at, latency_class="document") for seq_id, at in ((1, 0.0), (2, 97.0))]
    chats = [request(3, arrived_at=99.4), request(4, arrived_at=99.6)]
    drive.run(*documents, *chats)
    assert first_steps(drive) == [1, 3, 2, 4]


def test_no_more_than_max_num_seqs_run() -> None:
    """The batch has a bound; the rest waits."""
    drive = Drive(max_num_seqs=3)
    drive.add(*(request(seq_id) for seq_id in range(6)))
    drive.step()
    assert (drive.core.stats.running, drive.core.stats.waiting) == (3, 3)
    drive.run()
    assert max(len(plan.chunks) for plan in drive.plans) == 3


def test_whole_prompt_must_fit_before_its_first_chunk() -> None:
    """A prompt that does not fit waits, and so do all behind it."""
    drive = Drive(num_blocks=17, max_num_batched_tokens=16)
    drive.add(request(1, range(40)))
    drive.step()
    drive.add(request(2, range(100, 140)), request(3, range(4)))
    drive.step()
    assert set(drive.planned()) == {1}
    drive.run()
    drive.assert_empty()


def test_admission_keeps_room_for_growth() -> None:
    """Part of the running sequences' remaining max_tokens is kept free."""
    drive = Drive(num_blocks=31)  # 30 blocks of 4; each asks for 2 + 20
    for seq_id in (1, 2, 3):
        drive.add(request(seq_id, range(8), sampling=sampling(max_tokens=80), salt=str(seq_id)))
    drive.step()
    assert drive.core.stats.running < 3


def test_reserve_decays() -> None:
    """In steps without a preemption the reserve shrinks, and a waiting sequence is admitted before another ends."""
    drive = Drive(num_blocks=201)
    for seq_id in (1, 2, 3):
        drive.add(request(seq_id, range(8), sampling=sampling(max_tokens=400), salt=str(seq_id)))
    drive.step()
    assert drive.core.stats.running == 2
    while drive.core.stats.waiting:
        drive.step()
    assert drive.core.stats.running == 3


def test_lone_sequence_needs_no_reserve() -> None:
    """A request that just fits by itself runs, without a preemption."""
    drive = Drive(num_blocks=11)
    answers = drive.run(request(1, range(8), sampling=sampling(max_tokens=32)))
    assert len(answers[1].token_ids) == 32
    assert drive.core.stats.preemptions == 0


def crowded() -> Drive:
    """Three sequences that will not fit together once they have grown; the reserve has been decayed away."""
    drive = Drive(num_blocks=13, max_num_seqs=3)
    drive.core.scheduler._reserve._share = 0.0
    for seq_id in (1, 2, 3):
        drive.add(request(seq_id, range(8), sampling=sampling(max_tokens=24), salt=str(seq_id)))
    return drive


def test_newest_is_preempted_and_finishes_later() -> None:
    """When memory runs out the last in order is preempted; all sequences get all tokens."""
    drive = crowded()
    victims: list[int] = []
    while drive.core.has_work:
        drive.step()
        victims += [one.seq_id for one in drive.core.scheduler.waiting if one.num_preemptions]
    assert drive.core.stats.preemptions > 0
    assert 1 not in victims
    assert [len(answer.token_ids) for answer in drive.answers.values()] == [24, 24, 24]
    drive.assert_empty()


def test_preempted_sequence_holds_nothing_and_goes_first() -> None:
    """A preempted sequence holds no block, and queues before those that never ran."""
    drive = crowded()
    drive.add(request(4, range(8), arrived_at=4.0))
    while not drive.core.stats.preemptions:
        drive.step()
    head = drive.core.scheduler.waiting[0]
    assert (head.seq_id, head.held.block_table, head.num_computed_tokens) == (3, [], 0)


def test_no_sequence_is_admitted_in_a_step_that_preempted() -> None:
    """A victim's blocks are for running sequences, not for the next one in the queue."""
    drive = crowded()
    drive.add(request(4, range(100, 103), arrived_at=4.0))
    while not drive.core.stats.preemptions:
        drive.step()
    assert set(drive.planned()) <= {1, 2}


def test_preempted_sequence_finds_its_own_blocks() -> None:
    """Recomputing after a preemption goes through the prefix cache, and is not counted as a hit."""
    drive = Drive()
    drive.add(request(1, range(20)))
    drive.step()
    drive.core.scheduler.forced_preempt = lambda running: running
    drive.step()
    assert drive.planned() == {1: 1}
    assert drive.plans[-1].chunks[0].start == 20
    assert drive.core.stats.prefix_hits == 0


def test_sampling_waits_for_the_last_known_token() -> None:
    """A recomputed sequence samples only after its known tokens."""
    drive = Drive(prefix_caching=False, max_num_batched_tokens=8)
    drive.add(request(1, range(6)))
    for _ in range(4):
        drive.step()
    drive.core.scheduler.forced_preempt = lambda running: running if len(drive.plans) == 4 else ()
    drive.step()
    drive.core.scheduler.forced_preempt = None
    drive.step()
    assert [bool(chunk.samples) for plan in drive.plans[-2:] for chunk in plan.chunks] == [False, True]


def test_budget_must_cover_the_batch() -> None:
    """A budget in which some sequence could never decode is refused by name."""
    with pytest.raises(ValueError, match="max_num_batched_tokens=4 is less than max_num_seqs=8"):
        Drive(max_num_batched_tokens=4)


@pytest.mark.parametrize(("model_len", "blocks", "limit"), [(100, 11, 40), (30, 11, 30), (40, 11, 40)])
def test_largest_request(model_len: int, blocks: int, limit: int) -> None:
    """The limit is the model's length or all blocks but the null one, and a request of just that size runs."""
    assert max_servable_tokens(model_len, blocks, 4) == limit
    drive = Drive(num_blocks=blocks, max_model_len=model_len)
    answer = drive.run(request(1, range(limit - 10)))[1]
    assert (len(answer.token_ids), answer.finish_reason) == (10, "length")


def test_never_fits_fails_alone() -> None:
    """A sequence that can never fit ends with its own error, and those behind it continue."""
    drive = Drive(num_blocks=5)
    answers = drive.run(request(1, range(40)), request(2, range(4)))
    assert answers[1].error == "never_fits"
    assert len(answers[2].token_ids) == 10


def test_chunk_covers_exactly_its_blocks() -> None:
    """A chunk's table has a block for each started page, and no more."""
    drive = Drive(max_num_batched_tokens=10)
    drive.run(request(1, range(33)))
    for plan in drive.plans:
        for chunk in plan.chunks:
            assert len(chunk.block_table) == -(-(chunk.start + len(chunk.token_ids)) // 4)


def test_core_has_no_clock_of_its_own() -> None:
    """Two cores given the same calls and times make the same plans."""

    def trace() -> list[object]:
        drive = Drive(num_blocks=20)
        drive.run(*(request(seq_id, range(seq_id, 25)) for seq_id in range(5)))
        return [*drive.plans, *(update for answer in drive.answers.values() for update in answer.updates)]

    assert trace() == trace()
