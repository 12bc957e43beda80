"""Laws of suspects: a sequence whose steps have ended engines is computed alone, until it has a token."""

from __future__ import annotations

import pytest

from streamserve.engine.echo import EchoRunner
from streamserve.engine.plan import StepPlan
from streamserve.protocol.engine import SUSPECT_LOSSES
from tests.support.engines.cores import Drive, request
from tests.support.engines.runners import SmallRunner, WrappedRunner

BOTH_WAYS = pytest.mark.parametrize("overlap", [False, True])


class Counting(WrappedRunner):
    """Records, of each plan, its sequences and how many other plans were not collected yet."""

    def __init__(self, *, overlap: bool) -> None:
        super().__init__(EchoRunner(num_blocks=65, block_size=4, can_overlap=overlap))
        self.can_overlap = overlap
        self.launched: list[tuple[set[int], int]] = []
        self._num_open = 0

    def launch(self, plan: StepPlan) -> object:
        self.launched.append(({chunk.seq_id for chunk in plan.chunks}, self._num_open))
        self._num_open += 1
        return super().launch(plan)

    def collect(self, handle: object) -> object:
        self._num_open -= 1
        return super().collect(handle)


def drive_with(*num_losses: int, overlap: bool) -> tuple[Drive, Counting]:
    """Return a core with a sequence for each number of losses: ids 1, 2, ..."""
    runner = Counting(overlap=overlap)
    drive = Drive(runner=runner, overlap=overlap)
    drive.add(
        *(
            request(seq_id, range(20 * seq_id, 20 * seq_id + 20), num_losses=losses)
            for seq_id, losses in enumerate(num_losses, start=1)
        )
    )
    return drive, runner


@BOTH_WAYS
def test_a_suspect_is_computed_alone(overlap: bool) -> None:
    """Its step holds nothing else, and nothing else is in flight; afterwards it is scheduled as any other."""
    drive, runner = drive_with(0, SUSPECT_LOSSES, 0, overlap=overlap)
    drive.run()
    with_suspect = [launched for launched in runner.launched if 2 in launched[0]]
    assert with_suspect[0] == ({2}, 0)
    assert all({1, 3} < ids for ids, _ in with_suspect[1:9])


@BOTH_WAYS
def test_nothing_is_launched_over_a_suspect(overlap: bool) -> None:
    """A suspect admitted while others run waits for their step, and they for its step."""
    drive, runner = drive_with(0, 0, overlap=overlap)
    drive.step()
    drive.step()
    drive.add(request(9, range(100, 120), num_losses=SUSPECT_LOSSES))
    drive.run()
    place = next(place for place, (ids, _) in enumerate(runner.launched) if 9 in ids)
    assert runner.launched[place] == ({9}, 0)
    assert runner.launched[place + 1][1] == 0


@BOTH_WAYS
def test_suspects_are_tried_one_after_the_other(overlap: bool) -> None:
    """One a step, so that each result is passed on before the next one is tried; all other sequences run on."""
    drive, _ = drive_with(SUSPECT_LOSSES, SUSPECT_LOSSES + 1, 0, overlap=overlap)
    first = {update.seq_id for update in drive.step() if update.token_ids}
    assert 1 in first
    assert 2 not in first
    drive.step()
    assert drive.answers[2].token_ids
    assert drive.answers[3].token_ids


@BOTH_WAYS
def test_suspicion_changes_no_token(overlap: bool) -> None:
    """The answers are those of sequences without a past."""
    drive, _ = drive_with(0, SUSPECT_LOSSES, 0, SUSPECT_LOSSES, overlap=overlap)
    plain, _ = drive_with(0, 0, 0, 0, overlap=overlap)
    drive.run()
    plain.run()
    assert {one: answer.token_ids for one, answer in drive.answers.items()} == {
        one: answer.token_ids for one, answer in plain.answers.items()
    }
    drive.assert_empty()


def test_fewer_losses_are_no_suspicion() -> None:
    """One or two losses may have another sequence's cause: the batch is not taken apart for them."""
    drive, runner = drive_with(SUSPECT_LOSSES - 1, 0, overlap=False)
    drive.run()
    assert runner.launched[0][0] == {1, 2}


def test_a_suspect_that_needs_too_much_memory_is_halved() -> None:
    """As any step is."""
    runner = SmallRunner(EchoRunner(num_blocks=65, block_size=4), lambda plan: plan.num_tokens > 12)
    drive = Drive(runner=runner)
    drive.run(request(1, range(20), num_losses=SUSPECT_LOSSES))
    assert len(drive.answers[1].token_ids) == 10
    assert drive.answers[1].error is None
    assert drive.core.stats.out_of_memory > 0
