"""Laws of prompts that come together: they are packed into one step's prefill, as many as the budget holds."""

from __future__ import annotations

import pytest

from tests.support.engines.cores import Drive, request

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
