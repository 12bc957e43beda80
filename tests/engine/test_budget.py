"""Laws of the token budget: what joins a step, and what happens to it after one ran out of memory."""

from __future__ import annotations

from streamserve.engine.budget import StepBudget, TokenBudget
from streamserve.engine.config import EngineConfig
from streamserve.engine.sequence import State
from tests.support.cores import request
from tests.support.desk import Desk, teach


def lowered(**config: int) -> TokenBudget:
    return TokenBudget(EngineConfig(**config), 32)


def test_budget_is_halved() -> None:
    """The next steps compute at most half of what was too much, whichever was smaller: the step or the budget."""
    budget = lowered()
    budget.lower(600)
    assert budget.num_tokens == 300
    budget.lower(2000)
    assert budget.num_tokens == 150


def test_budget_never_leaves_a_decode_out() -> None:
    """However often it is lowered, every running sequence can decode in each step."""
    budget = lowered(max_num_seqs=48)
    for _ in range(20):
        budget.lower(1)
    assert budget.num_tokens == 48


def test_budget_covers_a_block() -> None:
    """With a small batch a block is left, so that a step is worth its while; never more than what is configured."""
    budget, small = lowered(max_num_seqs=2), lowered(max_num_seqs=2, max_num_batched_tokens=8)
    for _ in range(20):
        budget.lower(1)
        small.lower(1)
    assert (budget.num_tokens, small.num_tokens) == (32, 8)


def test_budget_recovers_slowly() -> None:
    """It doubles after 500 steps without another lowering, until it is what it was."""
    budget, seen = lowered(max_num_batched_tokens=1000), []
    budget.lower(500)
    for _ in range(1600):
        if not seen or seen[-1] != budget.num_tokens:
            seen.append(budget.num_tokens)
        budget.recover()
    assert seen == [250, 500, 1000]


def test_steps_keep_a_lowered_budget() -> None:
    """After memory ran out, no plan computes more than the new budget."""
    desk = Desk(max_num_batched_tokens=64, num_blocks=200)
    desk.scheduler.lower_budget(64)
    desk.add(request(1, range(100)))
    desk.step()
    assert desk.planned() == {1: 32} == {1: desk.scheduler.token_budget}


def busy(**config: float) -> Desk:
    """One sequence decodes, and a long prompt waits."""
    desk = Desk(num_blocks=400, **config)
    desk.add(request(1))
    desk.step()
    desk.add(request(2, range(1000)))
    return desk


def test_prefill_beside_decodes_keeps_the_step_within_the_target() -> None:
    """By the step-time model: 0.01 s + 1 ms a token, a decode among them, leave 189 tokens of 0.2 s."""
    desk = busy(itl_target_seconds=0.2)
    teach(desk.scheduler.step_time)
    desk.step()
    assert desk.planned() == {1: 1, 2: 189}


def test_prefill_chunk_holds_until_there_is_a_model() -> None:
    """Before enough steps were seen, a fixed number of prefill tokens joins."""
    desk = busy(prefill_chunk=40)
    desk.step()
    assert desk.planned() == {1: 1, 2: 40}


def test_prefill_gets_a_block_in_any_step() -> None:
    """When the decodes alone take longer than the target, prefill still gets a block's worth."""
    desk = busy(itl_target_seconds=0.001)
    teach(desk.scheduler.step_time)
    desk.step()
    assert desk.planned() == {1: 1, 2: 4}


def test_prefill_alone_takes_the_whole_budget() -> None:
    """Without decodes the target bounds nothing."""
    desk = Desk(num_blocks=400, itl_target_seconds=0.001)
    teach(desk.scheduler.step_time)
    desk.add(request(1, range(1000)))
    desk.step()
    assert desk.planned() == {1: 1000}


def test_prompts_share_what_may_join() -> None:
    """The target bounds all prefill of a step together."""
    desk = busy(itl_target_seconds=0.2, max_num_seqs=3)
    teach(desk.scheduler.step_time)
    desk.add(request(3, range(500, 560)), request(4, range(700, 760)))
    desk.step()
    assert desk.planned() == {1: 1, 2: 189}


def test_every_step_with_a_prompt_advances_it() -> None:
    """However slow the machine, each step computes at least a block of the prompt."""
    desk = busy(itl_target_seconds=0.0)
    teach(desk.scheduler.step_time)
    while desk.sequences[1].state is State.RUNNING:
        desk.step()
        assert desk.planned()[2] == 4


def test_a_parked_sequence_frees_its_budget() -> None:
    """A decode or a part of a prompt: the next one in the same step finds the budget as if it had never been there."""
    desk = busy()
    config = EngineConfig(max_num_batched_tokens=64)
    budget = StepBudget(64, config, 4, desk.scheduler.step_time)
    decoding, prompt = desk.sequences[1], desk.sequences[2]
    before = (budget.num_tokens, budget.num_prefill_tokens(0))
    budget.add(decoding, 1)
    budget.prefill(prompt)
    assert budget.num_tokens == 0
    budget.remove(prompt)
    assert (budget.num_tokens, [chunk.seq_id for chunk in budget.chunks]) == (63, [1])
    budget.remove(decoding)
    assert ((budget.num_tokens, budget.num_prefill_tokens(0)), budget.chunks) == (before, [])
