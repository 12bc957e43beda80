"""Laws of the step-time model: which costs it finds, when it has none, and how it follows a changing machine."""

from __future__ import annotations

import random

import pytest

from streamserve.engine.step_time import StepTime, num_pairs, size_of
from tests.support.engines.desk import plan_of, teach

COSTS = {"base": 0.02, "per_token": 0.0005, "per_pair": 0.0000002}


def seconds(*sizes: tuple[int, int]) -> float:
    tokens, pairs = size_of(plan_of(*sizes).chunks)
    return COSTS["base"] + COSTS["per_token"] * tokens + COSTS["per_pair"] * pairs


def taught(**costs: float) -> StepTime:
    step_time = StepTime()
    teach(step_time, **(costs or COSTS))
    return step_time


def test_pairs_are_positions_attended_to() -> None:
    """The k-th token of a chunk sees all before it and itself; whole or in chunks, a prompt has the same pairs."""
    assert num_pairs(10, 3) == 11 + 12 + 13
    assert num_pairs(0, 50) == num_pairs(0, 20) + num_pairs(20, 30)


@pytest.mark.parametrize("size", [(0, 1), (0, 64), (0, 200), (500, 1), (1000, 100)])
def test_finds_the_costs_of_a_machine(size: tuple[int, int]) -> None:
    """Steps whose cost fits the model are predicted, also in new sizes."""
    assert taught().predict(plan_of(size)) == pytest.approx(seconds(size), rel=1e-3)


def test_predicts_a_noisy_machine() -> None:
    """With a tenth of noise the prediction is right within a tenth."""
    rng, step_time = random.Random(5), StepTime()
    for _ in range(400):
        sizes = [(rng.randrange(2000), 1) for _ in range(rng.randint(1, 8))]
        sizes += [(rng.randrange(1000), rng.randint(2, 500))] * rng.randint(0, 1)
        step_time.note(plan_of(*sizes), seconds(*sizes) * rng.uniform(0.9, 1.1))
    for sizes in ([(100, 1)], [(1500, 1)] * 8, [(0, 500)], [(1000, 1), (500, 250)]):
        assert step_time.predict(plan_of(*sizes)) == pytest.approx(seconds(*sizes), rel=0.1)


@pytest.mark.parametrize("num_tokens", [1, 8])
def test_steps_of_one_size_give_no_model(num_tokens: int) -> None:
    """Equal steps do not separate a token's cost from the base: no prediction."""
    step_time = StepTime()
    for _ in range(500):
        step_time.note(plan_of((0, num_tokens)), 0.01)
    assert step_time.predict(plan_of((0, 1))) is None
    assert step_time.tokens_within(1.0, tokens=0, pairs=0, start=0) is None
    assert step_time.seconds_for(100, 1) is None


def test_a_few_steps_give_no_model() -> None:
    """Before sixteen steps there is no model; the first two, which warm the machine up, are left out."""
    step_time = StepTime()
    for index in range(17):
        assert step_time.predict(plan_of((0, 1))) is None
        step_time.note(plan_of((0, 1 + 64 * (index % 2))), seconds((0, 1 + 64 * (index % 2))) if index > 1 else 60.0)
    step_time.note(plan_of((0, 1)), seconds((0, 1)))
    assert step_time.predict(plan_of((0, 32))) == pytest.approx(seconds((0, 32)), rel=0.01)


def test_steps_without_duration_give_no_model() -> None:
    """With a stopped clock there is no model."""
    assert taught(base=0.0, per_token=0.0, per_pair=0.0).predict(plan_of((0, 1))) is None


def test_decodes_do_not_make_it_forget_prefill() -> None:
    """After ten thousand decodes of one size it still predicts a prompt's cost."""
    step_time = taught()
    for _ in range(10_000):
        step_time.note(plan_of((300, 1)), seconds((300, 1)))
    assert step_time.predict(plan_of((0, 256))) == pytest.approx(seconds((0, 256)), rel=0.01)


def test_follows_a_machine_that_slows_down() -> None:
    """Half the speed is known after some dozens of steps of each size."""
    step_time = taught(base=0.02, per_token=0.0005)
    for _ in range(8):
        teach(step_time, base=0.04, per_token=0.001)
    assert step_time.predict(plan_of((0, 200))) == pytest.approx(0.04 + 0.2, rel=0.1)


def test_one_odd_step_changes_little() -> None:
    """A step of a minute (the machine was suspended) leaves the prediction within an eighth."""
    step_time = taught()
    for _ in range(64):
        step_time.note(plan_of((0, 64)), seconds((0, 64)))
    step_time.note(plan_of((0, 64)), 60.0)
    for _ in range(8):
        step_time.note(plan_of((0, 64)), seconds((0, 64)))
    assert step_time.predict(plan_of((0, 64))) == pytest.approx(seconds((0, 64)), rel=0.125)


@pytest.mark.parametrize("start", [0, 1000])
@pytest.mark.parametrize("per_pair", [0.0, 0.0000002, 0.00001])
def test_tokens_within_is_the_most_that_fits(start: int, per_pair: float) -> None:
    """So many tokens stay within the time, and one more would not."""
    step_time = taught(base=0.02, per_token=0.0005, per_pair=per_pair)
    tokens, pairs = size_of(plan_of((200, 1), (300, 1)).chunks)
    most = step_time.tokens_within(0.1, tokens=tokens, pairs=pairs, start=start)
    assert most is not None

    def predicted(num_tokens: int) -> float:
        value = step_time.predict(plan_of((200, 1), (300, 1), (start, num_tokens)))
        assert value is not None
        return value

    assert predicted(most) <= 0.1 + 1e-9
    assert predicted(most + 1) > 0.1


def test_few_dear_tokens_are_counted_with_their_own_position() -> None:
    """A token attends to itself, too: of n tokens n (n + 1) / 2 pairs are new, not n² / 2."""
    step_time = taught(base=0.0, per_token=0.001, per_pair=0.001)
    assert step_time.tokens_within(0.018, tokens=0, pairs=0, start=0) == 4  # 0.004 + 0.010; 5 cost 0.005 + 0.015
    assert step_time.tokens_within(0.021, tokens=0, pairs=0, start=0) == 5


def test_nothing_fits_when_the_time_is_up() -> None:
    """If the decodes alone take longer than the target, no token fits."""
    assert taught().tokens_within(0.01, tokens=8, pairs=800, start=0) == 0


def test_no_guess_is_far_from_what_was_seen() -> None:
    """However much time there is, at most twice the largest observed step is allowed."""
    assert taught().tokens_within(1e6, tokens=0, pairs=0, start=0) == 2 * 257


def test_queue_seconds_count_a_base_for_each_step() -> None:
    """A thousand tokens in four steps cost four bases."""
    step_time = taught(base=0.02, per_token=0.0005)
    assert step_time.seconds_for(1000, 4) == pytest.approx(4 * 0.02 + 0.5, rel=0.01)


def test_classes_of_sizes_are_bounded() -> None:
    """Any number of steps leaves at most some hundreds of means."""
    rng, step_time = random.Random(1), StepTime()
    for _ in range(3000):
        step_time.note(plan_of((rng.randrange(32768), rng.randint(1, 2048))), 0.1)
    assert len(step_time._classes) < 300
