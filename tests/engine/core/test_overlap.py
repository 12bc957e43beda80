"""Laws of overlap: a step is launched before the one before it is collected, and the answers are unchanged."""

from __future__ import annotations

import pytest

from streamserve.engine.config import EngineConfig
from streamserve.engine.core import EngineCore
from streamserve.engine.echo import EOS, EchoRunner
from streamserve.engine.plan import PENDING, Sampled, StepPlan, StepResult
from tests.support.engines.cores import Drive, alone, request, sampling
from tests.support.engines.runners import FakeClock, FaultyRunner, WrappedRunner


class Counting(WrappedRunner):
    """Counts launched and uncollected steps; samples EOS at the output positions it is given."""

    def __init__(self, eos_at: int | None = None, *, can_overlap: bool = True) -> None:
        super().__init__(EchoRunner(num_blocks=65, block_size=4, can_overlap=can_overlap))
        self.num_in_flight = 0
        self.most_in_flight = 0
        self._eos_at = eos_at

    def launch(self, plan: StepPlan) -> object:
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        return plan, self.inner.launch(plan)

    def collect(self, handle: object) -> StepResult:
        assert isinstance(handle, tuple)
        self.num_in_flight -= 1
        plan, result = handle[0], self.inner.collect(handle[1])
        ending = {c.seq_id for c in plan.chunks if c.samples and c.samples[0].position - 20 == self._eos_at}
        sampled = (
            Sampled(seq_id=one.seq_id, token_ids=(EOS,)) if one.seq_id in ending else one for one in result.sampled
        )
        return StepResult(step_id=result.step_id, sampled=tuple(sampled))


def overlapping(eos_at: int | None = None, **config: object) -> Drive:
    return Drive(runner=Counting(eos_at), **config)


def test_one_step_is_in_flight_while_the_next_is_planned() -> None:
    """Two launched steps at most, and no more steps than without overlap."""
    runner = Counting()
    drive = Drive(runner=runner)
    drive.run(request(1, sampling=sampling(max_tokens=12)))
    assert (runner.most_in_flight, runner.num_in_flight) == (2, 0)
    assert len(drive.plans) == 12


def test_without_overlap_a_step_is_collected_at_once() -> None:
    """overlap=False holds also for a runner that could."""
    runner = Counting()
    core = EngineCore(runner, EngineConfig(overlap=False), FakeClock())
    core.add(request(1))
    while core.has_work:
        core.step()
    assert runner.most_in_flight == 1


def test_overlap_needs_a_runner_that_can() -> None:
    """overlap=True with a runner that cannot is a ValueError."""
    with pytest.raises(ValueError, match="one step at a time"):
        EngineCore(EchoRunner(), EngineConfig(overlap=True), FakeClock())


def test_token_in_flight_is_pending_in_the_next_plan() -> None:
    """The plan names the token that is not known yet, where it will stand."""
    drive = overlapping()
    drive.run(request(1, sampling=sampling(max_tokens=4)))
    starts = [(chunk.start, chunk.token_ids) for plan in drive.plans for chunk in plan.chunks]
    assert starts == [(0, tuple(range(20))), (20, (PENDING,)), (21, (PENDING,)), (22, (PENDING,))]


@pytest.mark.parametrize("fields", [{"presence_penalty": 0.5}, {"repetition_penalty": 1.2}])
def test_penalties_take_no_more_steps(fields: dict[str, float]) -> None:
    """A sequence with penalties is in each step of its batch, though its newest token is not known on the CPU."""
    drive = overlapping()
    how = sampling(max_tokens=6, **fields)
    drive.run(request(1, sampling=how), request(2, range(50, 70), sampling=sampling(max_tokens=6)))
    assert [len(plan.chunks) for plan in drive.plans] == [2] * 6
    mine = [chunk.token_ids for plan in drive.plans for chunk in plan.chunks if chunk.seq_id == 1]
    assert mine[1:] == [(PENDING,)] * 5


def test_eos_one_step_late_drops_the_token_after_it() -> None:
    """The extra token is in no update and in no cached block."""
    drive = overlapping(eos_at=3)
    one = request(1, eos_token_ids=frozenset({EOS}), sampling=sampling(max_tokens=30))
    answer = drive.run(one)[1]  # tokens 20 to 23; the step of token 24 was launched
    assert (len(answer.token_ids), answer.token_ids[-1], answer.finish_reason) == (4, EOS, "stop")
    assert drive.core.stats.generation_tokens == 4
    drive.assert_empty()
    again = drive.run(request(2, [*range(20), *answer.token_ids, 9]))[2]
    assert again.num_cached_tokens == 20  # the block of tokens 20 to 23 was full only with the late step


@pytest.mark.parametrize("at_step", range(1, 7))
def test_abort_keeps_out_of_every_later_plan(at_step: int) -> None:
    """Also with a step in flight, whose late result is dropped."""
    drive = overlapping(max_num_batched_tokens=8)
    drive.add(request(1, sampling=sampling(max_tokens=30)))
    for _ in range(at_step):
        drive.step()
    drive.core.abort(1)
    num_plans, num_updates = len(drive.plans), len(drive.answers[1].updates)
    while drive.core.has_work:
        drive.step()
    assert (len(drive.plans), len(drive.answers[1].updates)) == (num_plans, num_updates)
    drive.assert_empty()


def test_blocks_of_an_aborted_sequence_serve_the_next_at_once() -> None:
    """A step still writes to them: later writes come later."""
    drive = Drive(num_blocks=9, overlap=True)  # room for one
    drive.add(request(1, sampling=sampling(max_tokens=12)))
    for _ in range(3):
        drive.step()
    drive.core.abort(1)
    assert drive.tokens(request(2, range(40, 60)))[2] == alone(request(2, range(40, 60)))


def test_late_stop_string_drops_what_is_in_flight() -> None:
    """Tokens after the stop, known or in flight, are in no block that is found."""
    drive = Drive(overlap=True)
    drive.add(request(1, range(6), sampling=sampling(max_tokens=30)))
    for _ in range(13):
        drive.step()
    tokens = drive.answers[1].token_ids
    drive.core.stop(1, 3)
    drive.run()
    assert drive.answers[1].finish_reason == "stop"
    assert drive.run(request(2, [*range(6), *tokens]))[2].num_cached_tokens == 8


def test_failed_token_takes_the_step_after_it_along() -> None:
    """The step computed from a failed token is dropped; the neighbour gets the tokens it gets alone."""
    echo = EchoRunner(num_blocks=65, block_size=4, can_overlap=True)
    drive = Drive(runner=FaultyRunner(echo, lambda step, seq_id: (step, seq_id) == (3, 2)))
    answers = drive.run(request(1), request(2, range(40, 60)))
    assert answers[2].error == "numerical_error"
    assert answers[1].token_ids == alone(request(1))
    drive.assert_empty()


def test_update_times_are_those_of_the_collected_step() -> None:
    """The first token is in the update one step after the launch of its step."""
    drive = Drive(overlap=True)
    drive.add(request(1))
    assert drive.step() == ()
    (update,) = drive.step()
    assert len(update.token_ids) == 1
    assert (update.scheduled_at, update.first_token_at) == (100.01, drive.clock.now)
