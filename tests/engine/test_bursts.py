"""Laws of prompts that come together: a step takes what pays for its start; until costs are known, all that fits."""

from __future__ import annotations

import pytest

from tests.support.engines.cores import Drive, request
from tests.support.engines.desk import Desk, teach

PROMPT_LEN, BUDGET = 89, 2048


@pytest.mark.parametrize("num_prompts", [8, 23])
def test_a_burst_within_the_budget_is_one_step(num_prompts: int) -> None:
    """All prompts are whole in it, and all have their first token after it."""
    drive = Drive(num_blocks=600, block_size=8, max_num_seqs=64, max_num_batched_tokens=BUDGET)
    drive.add(*(request(n, range(1000 * n, 1000 * n + PROMPT_LEN)) for n in range(num_prompts)))
    updates = drive.step()
    assert drive.planned() == dict.fromkeys(range(num_prompts), PROMPT_LEN)
    assert [len(update.token_ids) for update in updates] == [1] * num_prompts


def test_a_longer_burst_fills_the_budget() -> None:
    """No token of the step is left empty, and at most one prompt besides the shortest rest is cut."""
    drive = Drive(num_blocks=600, block_size=8, max_num_seqs=64, max_num_batched_tokens=BUDGET)
    drive.add(*(request(n, range(1000 * n, 1000 * n + PROMPT_LEN)) for n in range(32)))
    drive.step()
    lengths = list(drive.planned().values())
    assert sum(lengths) == BUDGET
    assert sum(length < PROMPT_LEN for length in lengths) <= 2


@pytest.mark.parametrize(("base", "num_together"), [(0.0, 1), (0.01, 1), (0.03, 3), (0.06, 5)])
def test_prompts_that_pay_for_a_step_do_not_wait_for_others(base: float, num_together: int) -> None:
    """A step takes further prompts until it takes eight times its base: the first are answered before the last."""
    desk = Desk(num_blocks=400, block_size=8, max_step_seconds=9.0, itl_target_seconds=9.0)
    teach(desk.scheduler.step_time, base=base, per_token=0.001)
    desk.add(*(request(n, range(1000 * n, 1000 * n + PROMPT_LEN)) for n in range(8)))
    desk.step()
    assert desk.planned() == dict.fromkeys(range(num_together), PROMPT_LEN)
    desk.step()
    prompts = {seq_id for seq_id, num_tokens in desk.planned().items() if num_tokens == PROMPT_LEN}
    assert min(prompts) == num_together


def test_a_cut_prompt_leaves_its_block_however_large_the_step() -> None:
    """What pays for its start still holds a block of a prompt behind the long prompt that fills it."""
    desk = Desk(num_blocks=400, block_size=8, max_step_seconds=0.3)
    teach(desk.scheduler.step_time, base=0.01, per_token=0.001)
    desk.add(request(1, range(1000)), request(2, range(2000, 2008)))
    desk.step()
    assert desk.planned() == {1: 281, 2: 8}
