"""Laws of the token budget: which tokens join a step, and the budget after a step ran out of memory."""

from __future__ import annotations

from streamserve.engine.budget import StepBudget, TokenBudget
from streamserve.engine.config import CLASSES, EngineConfig
from streamserve.engine.sequence import State
from tests.support.engines.cores import request
from tests.support.engines.desk import Desk, teach


def lowered(**config: int) -> TokenBudget:
    return TokenBudget(EngineConfig(**config), 32)


def test_budget_is_halved() -> None:
    """The next steps compute at most half of what was too much: the smaller of step and budget."""
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
    """With a small batch a whole block still fits into a step; never more than the configured budget."""
    budget, small = lowered(max_num_seqs=2), lowered(max_num_seqs=2, max_num_batched_tokens=8)
    for _ in range(20):
        budget.lower(1)
        small.lower(1)
    assert (budget.num_tokens, small.num_tokens) == (32, 8)


def test_budget_recovers_slowly() -> None:
    """It doubles after 500 steps without another reduction, up to its configured value."""
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


def test_prefill_alone_keeps_the_longest_step() -> None:
    """Without decodes their target bounds nothing, and 0.3 s bound every step: 0.01 s + 1 ms a token leave 289."""
    desk = Desk(num_blocks=400, itl_target_seconds=0.001)
    teach(desk.scheduler.step_time)
    desk.add(request(1, range(1000)))
    desk.step()
    assert desk.planned() == {1: 289}


def test_a_block_may_take_longer_than_the_longest_step() -> None:
    """However slow the machine, a step computes a block."""
    desk = Desk(num_blocks=400, max_step_seconds=0.001)
    teach(desk.scheduler.step_time)
    desk.add(request(1, range(1000)))
    desk.step()
    assert desk.planned() == {1: 4}


def test_prompts_share_what_may_join() -> None:
    """The target bounds all prefill of a step together; the first prompt leaves a block of it to the next."""
    desk = busy(itl_target_seconds=0.2, max_num_seqs=3)
    teach(desk.scheduler.step_time)
    desk.add(request(3, range(500, 560)), request(4, range(700, 760)))
    desk.step()
    assert desk.planned() == {1: 1, 2: 185, 3: 4}


def shares(**config: float) -> Desk:
    """A prompt of 1,000 tokens has begun."""
    desk = Desk(**{"num_blocks": 2000, "max_num_batched_tokens": 100, **config})
    desk.add(request(1, range(1000)))
    desk.step()
    return desk


def test_the_shortest_prompt_takes_the_share() -> None:
    """The rest of the first prompt's share goes to the prompts with the least left to compute, whatever their waits."""
    desk = shares()
    desk.add(request(2, range(2000, 2500)))
    desk.step()
    assert desk.planned() == {1: 96, 2: 4}
    desk.add(request(3, range(3000, 3003)), request(4, range(4000, 4001)))
    desk.step()
    assert desk.planned() == {1: 96, 3: 3, 4: 1}
    desk.step()
    assert desk.planned() == {3: 1, 4: 1, 1: 94, 2: 4}


def test_the_unused_part_of_a_share_is_returned() -> None:
    """The first prompt has the whole step except what the others can use, or where none of them can start."""
    desk = shares()
    desk.add(request(2, range(2000, 2001)))
    desk.step()
    assert desk.planned() == {2: 1, 1: 99}
    full = shares(max_num_seqs=1)
    full.add(request(2, range(2000, 2500)))
    full.step()
    assert full.planned() == {1: 100}


def test_a_share_is_at_most_half() -> None:
    """Where a step has room for a block only, the first prompt and the next take turns inside it."""
    desk = shares(max_num_batched_tokens=8, num_blocks=400)
    desk.add(request(2, range(2000, 2100)))
    desk.step()
    assert desk.planned() == {1: 4, 2: 4}
    small = shares(max_num_batched_tokens=5, max_num_seqs=5)
    small.add(request(2, range(2000, 2100)))
    small.step()
    assert small.planned() == {1: 3, 2: 2}


def test_chats_do_not_wait_for_a_document() -> None:
    """16,384 tokens at 1 ms each have begun when five chats of 50 come: they have their first tokens within 2.5 s."""
    desk = Desk(num_blocks=600, block_size=32, classes=CLASSES, max_model_len=20_000)
    teach(desk.scheduler.step_time, base=0.0)
    (document,) = desk.add(request(1, range(16_384), arrived_at=desk.now, latency_class="document"))
    while desk.now < 104.0:  # longer than the head start of a chat
        desk.step(desk_seconds(desk))
    chats = desk.add(*(request(seq_id, range(50), arrived_at=desk.now, salt=str(seq_id)) for seq_id in range(2, 7)))
    num_before = document.num_computed_tokens
    while any(one.first_token_at is None for one in chats):
        desk.step(desk_seconds(desk))
        assert not desk.scheduler.queue.expired(desk.now)
        assert desk.planned().get(1, 0) >= 32
    assert max(one.first_token_at or 0.0 for one in chats) - chats[0].request.arrived_at <= 2.5
    assert document.num_computed_tokens - num_before > 1000  # and the document went on


def desk_seconds(desk: Desk) -> float:
    """The duration of the step before, at 1 ms a token."""
    return sum(desk.planned().values()) / 1000 if desk.schedules else 0.0


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
    budget.add(prompt, 63, is_prefill=True)
    assert budget.num_tokens == 0
    budget.remove(prompt)
    assert (budget.num_tokens, list(budget.chunks)) == (63, [1])
    budget.remove(decoding)
    assert ((budget.num_tokens, budget.num_prefill_tokens(0)), budget.chunks) == (before, {})
