"""Layers that look back only so far: their old blocks are freed, and no token changes.

The windowed echo engine draws each token by what every group of layers sees, and lost blocks are poisoned.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

from streamserve.engine.kv.groups import Windows, most_in_window
from streamserve.engine.sequence import Sequence, SequenceRequest
from tests.support.engines.cores import Drive, request, resuming, sampling
from tests.support.engines.runners import SmallRunner
from tests.support.engines.windows import WindowedEcho

BLOCK = 4
GREEDY = sampling(max_tokens=60)
GROUPS = pytest.mark.parametrize("windows", [(6,), (None, 9), (None, 5, 5, 12), (2, 7)], ids=str)
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])


def requests(how: object = GREEDY) -> list[SequenceRequest]:
    """Prompts that share prefixes, of odd lengths, most of them longer than the windows."""
    prompts = [range(53), range(20), [*range(16), 99, *range(17, 33)], range(50, 57), [3], range(61)]
    return [request(seq_id, prompt, sampling=how) for seq_id, prompt in enumerate(prompts, start=1)]


def windowed(windows: Windows, *, num_blocks: int = 1_200, overlap: bool = False, **config: object) -> Drive:
    """A core over a windowed echo engine whose lost blocks are poisoned."""
    echo = WindowedEcho(windows, num_blocks=num_blocks, block_size=BLOCK, can_overlap=overlap)
    return Drive(runner=echo, on_evict=echo.poison, overlap=overlap, **config)  # type: ignore[arg-type]


@cache
def references(windows: Windows) -> dict[int, list[int]]:
    return {one.seq_id: windowed(windows, prefix_caching=False).tokens(one)[one.seq_id] for one in requests()}


@GROUPS
@OVERLAP
@pytest.mark.parametrize("chunk", [1, 7, 16, 4096])
@pytest.mark.parametrize("caching", [True, False])
def test_chunks_and_cache(windows: Windows, chunk: int, caching: bool, overlap: bool) -> None:
    """Chunked or whole, cached or not, cold or warm: the same tokens."""
    drive = windowed(
        windows,
        overlap=overlap,
        max_num_seqs=min(chunk, 8),
        max_num_batched_tokens=max(chunk, 1),
        prefill_chunk=chunk,
        prefix_caching=caching,
    )
    assert drive.tokens(*requests()) == references(windows)
    again = {one.seq_id + 10: one for one in requests()}
    found = drive.tokens(*(request(seq_id, one.prompt_token_ids, sampling=GREEDY) for seq_id, one in again.items()))
    assert {seq_id - 10: found[seq_id] for seq_id in again} == references(windows)
    assert (drive.answers[11].num_cached_tokens > 0) is caching
    drive.assert_empty()


@GROUPS
@OVERLAP
@pytest.mark.parametrize("every", [2, 3, 5])
def test_forced_preemption(windows: Windows, every: int, overlap: bool) -> None:
    """Preempting every sequence every few steps changes no token."""
    drive = windowed(windows, overlap=overlap)

    def preempt(running: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
        return running if len(drive.plans) % (every + overlap) == 0 else ()

    drive.core.scheduler.forced_preempt = preempt
    assert drive.tokens(*requests()) == references(windows)
    drive.assert_empty()


@GROUPS
@OVERLAP
@pytest.mark.parametrize("num_blocks", [1.2, 1.6, 2.5], ids=lambda share: f"{share} of one")
def test_short_memory(windows: Windows, num_blocks: float, overlap: bool) -> None:
    """In memory for hardly more than the longest answer all are served, with the same tokens."""
    longest, step = 61 + 60, 16
    bounds = [most_in_window(window, BLOCK, step) if window else 99 for window in windows]
    least = sum(min(-(-longest // BLOCK), bound) for bound in bounds) + 1
    drive = windowed(
        windows,
        num_blocks=int(num_blocks * least),
        overlap=overlap,
        max_num_seqs=4,
        max_num_batched_tokens=step,
        prefill_chunk=step,
    )
    assert drive.tokens(*requests()) == references(windows)
    drive.assert_empty()


@GROUPS
@OVERLAP
@pytest.mark.parametrize("every", [2, 7])
def test_park_and_resume(windows: Windows, every: int, overlap: bool) -> None:
    """Aborted and submitted again with the shown tokens, an answer has the same tokens."""
    drive = windowed(windows, overlap=overlap)
    for one in requests():
        shown: list[int] = []
        for number in range(100):
            again = resuming(one, output_token_ids=tuple(shown))
            seq_id = 100 * one.seq_id + number
            drive.add(request(seq_id, one.prompt_token_ids, sampling=GREEDY, output_token_ids=again.output_token_ids))
            for _ in range(every + overlap):
                drive.step()
            shown += drive.answers[seq_id].token_ids
            if drive.answers[seq_id].finish_reason:
                break
            drive.core.abort(seq_id)
            drive.step()
        assert shown == references(windows)[one.seq_id]


@GROUPS
@OVERLAP
@pytest.mark.parametrize("at_collect", [False, True], ids=["", "late"])
def test_steps_that_run_out_of_memory(windows: Windows, overlap: bool, at_collect: bool) -> None:
    """A step that is tried again in halves changes no token, also where blocks were freed since it was planned."""
    echo = WindowedEcho(windows, num_blocks=1_200, block_size=BLOCK, can_overlap=overlap)
    runner = SmallRunner(echo, lambda plan: plan.step_id % 5 == 2, at_collect=at_collect)
    drive = Drive(runner=runner, on_evict=echo.poison, overlap=overlap, max_num_batched_tokens=64)
    assert drive.tokens(*requests()) == references(windows)
    assert drive.core.stats.out_of_memory > 0


@OVERLAP
@pytest.mark.parametrize("length", [1, 40, 200])
def test_holds_the_window_only(length: int, overlap: bool) -> None:
    """However long prompt and answer are, a sequence holds the blocks of its windows, and of what a step computes."""
    window, step = 9, 16
    drive = windowed((window, window), overlap=overlap, max_num_batched_tokens=step, prefill_chunk=step)
    drive.add(request(1, range(length), sampling=sampling(max_tokens=600)))
    held = []
    while drive.core.has_work:
        drive.step()
        held.append(drive.core.stats.blocks_used)
    assert len(drive.answers[1].token_ids) == 600
    assert max(held) <= 2 * most_in_window(window, BLOCK, (1 + overlap) * step)
    assert max(held[-400:]) <= 2 * (-(-window // BLOCK) + 2)


def test_a_full_group_keeps_everything() -> None:
    """Beside groups with windows, what the full group holds grows with the answer."""
    drive = windowed((None, 9, 9))
    drive.add(request(1, range(10), sampling=sampling(max_tokens=500)))
    held = []
    while drive.core.has_work:
        drive.step()
        held.append(drive.core.stats.blocks_used)
    whole = -(-509 // BLOCK)
    assert whole <= max(held) <= whole + 2 * 5
    assert all(after - before <= 3 for before, after in pairwise(held))


@GROUPS
def test_prefix_found_after_freeing(windows: Windows) -> None:
    """A prompt whose first blocks were freed long ago is found up to its last block."""
    drive = windowed(windows)
    one = drive.tokens(request(1, range(53), sampling=GREEDY))[1]
    two = drive.tokens(request(2, range(53), sampling=GREEDY))[2]
    whole = [*range(53), *one]
    three = drive.tokens(request(3, whole, sampling=GREEDY))
    assert one == two
    assert [drive.answers[seq_id].num_cached_tokens for seq_id in (2, 3)] == [52, 112]
    assert three[3] == windowed(windows, prefix_caching=False).tokens(request(1, whole, sampling=GREEDY))[1]


def test_prompts_beside_each_other_share() -> None:
    """Prompts that come together compute what they share once, also beyond the window."""
    drive = windowed((None, 9), max_num_batched_tokens=16, prefill_chunk=16)
    prompts = [[*range(60), seq_id] for seq_id in range(4)]
    found = drive.tokens(*(request(index, prompt, sampling=GREEDY) for index, prompt in enumerate(prompts)))
    alone = [windowed((None, 9), prefix_caching=False).tokens(request(0, one, sampling=GREEDY))[0] for one in prompts]
    assert list(found.values()) == alone
    computed = sum(plan.num_tokens for plan in drive.plans)
    assert computed <= 60 + 4 * (1 + 60 + 4)


@GROUPS
@OVERLAP
def test_proposals(windows: Windows, overlap: bool) -> None:
    """Tokens that are proposed and refused change nothing."""
    quoting = [*range(30), *range(30), *range(30)]
    how = sampling(max_tokens=120)
    plain = windowed(windows, prefix_caching=False, speculation="off").tokens(request(1, quoting, sampling=how))[1]
    answer = plain[:60]
    prompt = [*quoting, *answer, *quoting]
    wanted = windowed(windows, speculation="off").tokens(request(1, prompt, sampling=how))[1]
    drive = windowed(windows, overlap=overlap, speculation="lookup")
    one = request(1, prompt, sampling=how, prediction_token_ids=(*wanted[:40], 5, *wanted[41:]))
    assert drive.tokens(one)[1] == wanted
    assert overlap or sum(drive.core.stats.accepted_tokens.values()) > 0
