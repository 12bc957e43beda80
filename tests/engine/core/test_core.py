"""Laws of the core: when a sequence ends, and what an end leaves behind."""

from __future__ import annotations

import pytest

from streamserve.engine.echo import EOS, EchoRunner
from streamserve.engine.plan import Sampled, StepPlan, StepResult
from streamserve.engine.sequence import SequenceRequest
from tests.support.engines.cores import Drive, request, sampling
from tests.support.engines.runners import FaultyRunner, WrappedRunner


class Scripted(WrappedRunner):
    """Samples the given tokens, by output position."""

    def __init__(self, script: list[int]) -> None:
        super().__init__(EchoRunner(num_blocks=65, block_size=4))
        self._script = script

    def launch(self, plan: StepPlan) -> object:
        sampled = tuple(
            Sampled(seq_id=chunk.seq_id, token_ids=(self._script[chunk.samples[0].position - 20],))
            for chunk in plan.chunks
            if chunk.samples
        )
        return StepResult(step_id=plan.step_id, sampled=sampled)


def scripted(script: list[int], one: SequenceRequest) -> tuple[list[int], str | None]:
    answer = Drive(runner=Scripted(script)).run(one)[one.seq_id]
    return answer.token_ids, answer.finish_reason


def with_eos(**fields: object) -> SequenceRequest:
    return request(1, eos_token_ids=frozenset({EOS}), sampling=sampling(**fields))


def test_max_tokens_ends_with_length() -> None:
    """A sequence has exactly max_tokens tokens unless something else ends it."""
    answer = Drive().run(request(1))[1]
    assert (len(answer.token_ids), answer.finish_reason) == (10, "length")


def test_eos_ends_and_is_the_last_token() -> None:
    """The eos token is reported and counted; the text side leaves it out."""
    assert scripted([1, 2, EOS, 4], with_eos()) == ([1, 2, EOS], "stop")


def test_ignore_eos() -> None:
    """With ignore_eos the eos token is a token like any other."""
    assert scripted([1, EOS, 3], with_eos(ignore_eos=True, max_tokens=3)) == ([1, EOS, 3], "length")


def test_stop_token_ids() -> None:
    """A stop id ends like eos, also when eos is ignored."""
    for ignore_eos in (False, True):
        one = with_eos(stop_token_ids=(7,), ignore_eos=ignore_eos)
        assert scripted([1, 7, 3], one) == ([1, 7], "stop")


def test_eos_on_the_last_allowed_token_is_a_stop() -> None:
    """If eos comes as the last token max_tokens allows, the answer was whole."""
    assert scripted([1, EOS], with_eos(max_tokens=2)) == ([1, EOS], "stop")


def test_min_tokens_bans_the_ends() -> None:
    """Before min_tokens the eos and stop ids are banned; afterwards they are not."""
    drive = Drive()
    drive.run(with_eos(min_tokens=3, stop_token_ids=(7,)))
    banned = [chunk.samples[0].banned_token_ids for plan in drive.plans for chunk in plan.chunks if chunk.samples]
    assert banned == [(7, EOS)] * 3 + [()] * 7


def test_model_length_ends_with_length() -> None:
    """A sequence never grows beyond the model."""
    answer = Drive(max_model_len=25).run(request(1))[1]
    assert (len(answer.token_ids), answer.finish_reason) == (5, "length")


def test_prefill_only_fills_the_cache() -> None:
    """max_tokens 0 computes the prompt, gives no token, and the next request finds it cached."""
    drive = Drive()
    answer = drive.run(request(1, sampling=sampling(max_tokens=0)))[1]
    assert (answer.token_ids, answer.finish_reason) == ([], "length")
    assert drive.run(request(2))[2].num_cached_tokens == 16


@pytest.mark.parametrize("at_step", range(8))
def test_abort_at_every_point_leaves_an_empty_pool(at_step: int) -> None:
    """Queued, mid-chunk, decoding or in its last step: an aborted sequence is in no later plan and holds nothing."""
    drive = Drive(max_num_batched_tokens=8)
    drive.add(request(1, sampling=sampling(max_tokens=5)))
    for _ in range(at_step):
        drive.step()
    drive.core.abort(1)
    num_plans = len(drive.plans)
    drive.step()
    assert len(drive.plans) == num_plans
    assert not drive.core.has_work
    drive.assert_empty()


def test_abort_while_the_step_runs() -> None:
    """An abort that comes during a step is in force before its results are: no update, no block."""

    class Aborting(WrappedRunner):
        def collect(self, handle: object) -> StepResult:
            drive.core.abort(1)
            return self.inner.collect(handle)

    drive = Drive(runner=Aborting(EchoRunner(num_blocks=65, block_size=4)))
    drive.add(request(1))
    assert drive.step() == ()
    drive.assert_empty()
    assert drive.run(request(2, sampling=sampling(max_tokens=0)))[2].num_cached_tokens == 0


@pytest.mark.parametrize("end", ["pause", "stop"])
def test_abort_goes_before_an_end_of_the_same_step(end: str) -> None:
    """A sequence aborted before the step gets no update, also when it would have ended in that step."""
    drive = Drive()
    drive.add(request(1), request(2))
    drive.step()
    drive.core.pause() if end == "pause" else drive.core.stop(1, 1)
    drive.core.abort(1)
    assert 1 not in {update.seq_id for update in drive.step()}


def test_unknown_ids_are_ignored_and_counted() -> None:
    """A second abort, or one for an unknown id, only increments a counter."""
    drive = Drive()
    drive.add(request(1))
    drive.step()
    for seq_id in (1, 1, 77):
        drive.core.abort(seq_id)
    drive.core.stop(78, 3)
    drive.step()
    assert drive.core.stats.unknown_ids == 3
    drive.assert_empty()


def test_abort_does_not_change_the_other_sequences() -> None:
    """With and without a neighbour that leaves, the same tokens come."""
    undisturbed = Drive().tokens(request(1))[1]
    drive = Drive()
    drive.add(request(1), request(2, range(30, 50)))
    drive.step()
    drive.step()
    drive.core.abort(2)
    assert drive.tokens()[1] == undisturbed


def test_late_stop_drops_tokens_and_their_blocks() -> None:
    """A stop string found late: a block that holds a later token is not in the cache; earlier ones are."""
    drive = Drive()
    drive.add(request(1, range(6), sampling=sampling(max_tokens=30)))
    for _ in range(13):
        drive.step()
    tokens = drive.answers[1].token_ids
    drive.core.stop(1, 3)  # keeps tokens 0 to 8: two full blocks
    (update,) = drive.step()
    assert (update.finish_reason, update.token_ids) == ("stop", ())
    drive.assert_empty()
    again = drive.run(request(2, [*range(6), *tokens]))[2]
    assert again.num_cached_tokens == 8


def test_late_stop_of_a_preempted_sequence_forgets_too() -> None:
    """The same while the sequence is back in the queue and holds nothing."""
    drive = Drive()
    drive.add(request(1, range(6), sampling=sampling(max_tokens=30)))
    for _ in range(13):
        drive.step()
    tokens = drive.answers[1].token_ids
    drive.core.scheduler._put_back(drive.core.scheduler.running[0])
    drive.core.stop(1, 3)
    drive.step()
    assert drive.run(request(2, [*range(6), *tokens]))[2].num_cached_tokens == 8


def test_failed_sequence_costs_only_itself() -> None:
    """The error ends one sequence; its batch mate gets the tokens it gets alone."""
    runner = FaultyRunner(EchoRunner(num_blocks=65, block_size=4), lambda step, seq_id: (step, seq_id) == (3, 2))
    drive = Drive(runner=runner)
    answers = drive.run(request(1), request(2, range(40, 60)))
    assert answers[2].error == "numerical_error"
    assert answers[1].token_ids == Drive().tokens(request(1))[1]
    drive.assert_empty()


@pytest.mark.parametrize("at_step", [0, 1, 2])
def test_failed_step_is_never_cached(at_step: int) -> None:
    """After a failure, in a middle or a last chunk or a decode, no block of the sequence is found."""
    runner = FaultyRunner(EchoRunner(num_blocks=65, block_size=4), lambda step, seq_id: step == at_step)
    drive = Drive(runner=runner, max_num_batched_tokens=12)
    assert drive.run(request(1))[1].error == "numerical_error"
    assert drive.core.stats.blocks_cached == 0
    assert drive.run(request(2))[2].num_cached_tokens == 0


def test_runner_that_forgets_an_answer() -> None:
    """A missing entry ends that sequence with an error, and nothing hangs."""

    class Forgetful(WrappedRunner):
        def collect(self, handle: object) -> StepResult:
            return StepResult(step_id=0, sampled=())

    drive = Drive(runner=Forgetful(EchoRunner(num_blocks=65, block_size=4)))
    assert drive.run(request(1))[1].error == "runner_error"


def test_deadline_ends_waiting_and_running() -> None:
    """Past its deadline a sequence ends within one step, wherever it is."""
    drive = Drive(max_num_seqs=1)
    long = sampling(max_tokens=200)
    drive.add(*(request(seq_id, deadline=105.0, sampling=long) for seq_id in (1, 2)), request(3, sampling=long))
    drive.step()
    drive.clock.advance(5)
    drive.step()
    assert [drive.answers[seq_id].error for seq_id in (1, 2, 3)] == ["timeout", "timeout", None]
    assert set(drive.planned()) == {3}


def test_times_are_reported() -> None:
    """Updates carry when the sequence was scheduled and when its first token came."""
    drive = Drive(max_num_batched_tokens=8)
    answer = drive.run(request(1))[1]
    before = [update for update in answer.updates if not update.token_ids]
    after = [update for update in answer.updates if update.token_ids]
    assert {(update.scheduled_at, update.first_token_at) for update in after} == {(100.01, after[0].at)}
    assert {(update.scheduled_at, update.first_token_at) for update in before} == {(100.01, None)}
    assert [update.num_prefilled for update in before] == [8, 16]


def test_stats_count_tokens_and_steps() -> None:
    """The statistics after the last step."""
    drive = Drive()
    drive.run(request(1), request(2, range(50, 70)))
    stats = drive.core.stats
    assert (stats.prompt_tokens, stats.generation_tokens, stats.steps) == (40, 20, 10)


def test_penalties_send_the_tokens_once() -> None:
    """Only a sequence with a penalty has its tokens in a plan, and only in that of its first draw."""
    drive = Drive()
    drive.run(request(1, range(3), sampling=sampling(max_tokens=2)))
    drive.run(request(2, range(3), sampling=sampling(max_tokens=2, presence_penalty=0.5)))
    specs = [spec for plan in drive.plans for chunk in plan.chunks for spec in chunk.samples or [None]]
    counts = [(len(spec.prompt_token_ids), len(spec.output_token_ids)) for spec in specs if spec]
    assert counts == [(0, 0), (0, 0), (3, 0), (0, 0)]
    assert [spec.penalty_slot for spec in specs if spec] == [None, None, 0, 0]


def test_step_time_is_that_of_the_whole_step() -> None:
    """A CPU computes in `launch`, a GPU until `collect`: the step-time model learns the same of both."""

    class Slow(WrappedRunner):
        launch_seconds = collect_seconds = 0.0

        def launch(self, plan: StepPlan) -> object:
            drive.clock.advance(self.launch_seconds)
            return super().launch(plan)

        def collect(self, handle: object) -> StepResult:
            drive.clock.advance(self.collect_seconds)
            return super().collect(handle)

    predicted = []
    for where in ("launch_seconds", "collect_seconds"):
        runner = Slow(EchoRunner(num_blocks=65, block_size=4))
        setattr(runner, where, 1.0)
        drive = Drive(runner=runner, max_num_batched_tokens=8)
        drive.run(request(1, range(60), sampling=sampling(max_tokens=40)))
        predicted.append(drive.core.scheduler.step_time.predict(drive.plans[-1]))
    assert predicted[0] == predicted[1]
    assert predicted[0]
