"""The engine's guarantee: whatever is done to a sequence, its tokens are those it would have had alone.

The echo runner's next token is a hash of all tokens read back through the block table, and freed blocks are poisoned:
any wrong block, slot, position, order or missing token changes the text.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import pytest

from streamserve.engine.sequence import Sequence, SequenceRequest
from tests.support.engines.cores import Drive, alone, request, sampling

GREEDY = sampling(max_tokens=40)
SEEDED = sampling(max_tokens=40, temperature=1.0, seed=1234)
BOTH = pytest.mark.parametrize("how", [GREEDY, SEEDED], ids=["greedy", "seeded"])
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])


def requests(how: object) -> list[SequenceRequest]:
    """Prompts that share prefixes, differ early, differ late, and are of odd lengths."""
    prompts: list[Iterable[int]] = [range(33), range(20), [*range(16), 99, *range(17, 33)], range(50, 57), [3]]
    return [request(seq_id, prompt, sampling=how) for seq_id, prompt in enumerate(prompts, start=1)]


@cache
def references(how: object) -> dict[int, list[int]]:
    return {one.seq_id: alone(one, num_blocks=200) for one in requests(how)}


@BOTH
@OVERLAP
@pytest.mark.parametrize("chunk", [1, 7, 16, 4096])
@pytest.mark.parametrize("caching", [True, False])
def test_chunks_and_cache(how: object, chunk: int, caching: bool, overlap: bool) -> None:
    """Chunked or whole, cached or not, alone or in a mixed batch: the same tokens."""
    drive = Drive(
        num_blocks=200,
        max_num_seqs=min(chunk, 8),
        max_num_batched_tokens=max(chunk, 1),
        prefill_chunk=chunk,
        prefix_caching=caching,
        overlap=overlap,
    )
    assert drive.tokens(*requests(how)) == references(how)
    drive.assert_empty()


@BOTH
@OVERLAP
@pytest.mark.parametrize("every", [1, 2, 3, 5])
@pytest.mark.parametrize("caching", [True, False])
def test_forced_preemption(how: object, every: int, caching: bool, overlap: bool) -> None:
    """Preempting every sequence every few steps changes no token."""
    every += overlap  # a sequence that never completes a step cannot continue
    drive = Drive(num_blocks=200, prefix_caching=caching, overlap=overlap)

    def preempt(running: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
        return running if len(drive.plans) % every == 0 else ()

    drive.core.scheduler.forced_preempt = preempt
    assert drive.tokens(*requests(how)) == references(how)
    assert drive.core.stats.preemptions > 0
    drive.assert_empty()


@BOTH
@OVERLAP
@pytest.mark.parametrize("every", [1, 2, 3, 7])
@pytest.mark.parametrize("caching", [True, False])
def test_park_and_resume(how: object, every: int, caching: bool, overlap: bool) -> None:
    """Abort, and the same request again with the shown tokens: together the tokens of the uninterrupted sequence."""
    every += overlap
    drive = Drive(num_blocks=200, prefix_caching=caching, overlap=overlap)
    shown: dict[int, list[int]] = {one.seq_id: [] for one in requests(how)}
    todo = {one.seq_id: one for one in requests(how)}
    number = 0
    while todo:
        number += 1
        aliases = {seq_id * 1000 + number: seq_id for seq_id in todo}
        drive.add(*(resumed(todo[seq_id], alias, shown[seq_id]) for alias, seq_id in aliases.items()))
        for _ in range(every):
            drive.step()
        for alias, seq_id in aliases.items():
            answer = drive.answers[alias]
            shown[seq_id] += answer.token_ids
            drive.core.abort(alias)
            if answer.finish_reason is not None:
                assert answer.finish_reason == "length"
                del todo[seq_id]
    assert shown == references(how)
    drive.step()
    drive.assert_empty()


def resumed(one: SequenceRequest, seq_id: int, shown: list[int]) -> SequenceRequest:
    return request(
        seq_id, one.prompt_token_ids, sampling=one.sampling, output_token_ids=tuple(shown), arrived_at=one.arrived_at
    )


@BOTH
@OVERLAP
def test_too_little_memory(how: object, overlap: bool) -> None:
    """In a pool with a third of the blocks needed, every sequence gets the same tokens."""
    drive = Drive(num_blocks=24, overlap=overlap)
    drive.core.scheduler._reserve._share = 0.0
    assert drive.tokens(*requests(how)) == references(how)
    assert drive.core.stats.preemptions > 0
    drive.assert_empty()


@BOTH
@OVERLAP
@pytest.mark.parametrize("num_seqs", [1, 2, 3])
def test_batch_composition(how: object, num_seqs: int, overlap: bool) -> None:
    """The batch does not change a sequence's tokens."""
    assert Drive(num_blocks=200, max_num_seqs=num_seqs, overlap=overlap).tokens(*requests(how)) == references(how)


@BOTH
@OVERLAP
def test_block_size(how: object, overlap: bool) -> None:
    """Neither does the size of a page."""
    for block_size in (1, 3, 32):
        assert Drive(num_blocks=400, block_size=block_size, overlap=overlap).tokens(*requests(how)) == references(how)


def test_seeds_matter_and_are_reproducible() -> None:
    """Another seed, another text; the same seed, the same text."""
    first, second, again = (
        Drive().tokens(request(1, sampling=sampling(max_tokens=20, temperature=1.0, seed=seed)))[1]
        for seed in (1, 2, 1)
    )
    assert first == again != second


def test_resume_after_the_last_token_computes_nothing() -> None:
    """An ended answer stays ended, for the same reason, without a step of the model."""
    drive = Drive()
    shown = tuple(alone(request(1)))
    answer = drive.run(request(2, output_token_ids=shown))[2]
    assert (answer.token_ids, answer.finish_reason) == ([], "length")
    assert drive.plans == []


def test_resume_keeps_min_tokens_and_max_tokens() -> None:
    """Shown tokens count: a resumed sequence is banned from ending as long as the uninterrupted one, and no longer."""
    how = sampling(max_tokens=6, min_tokens=4, stop_token_ids=(7,))
    shown = alone(request(1, sampling=how))
    drive = Drive()
    answer = drive.run(request(2, sampling=how, output_token_ids=tuple(shown[:3])))[2]
    assert answer.token_ids == shown[3:]
    specs = [spec for plan in drive.plans for chunk in plan.chunks for spec in chunk.samples or [None]]
    assert [spec.banned_token_ids for spec in specs if spec] == [(7,), (), ()]


def test_two_tenants_share_nothing() -> None:
    """The same prompt under two salts: no cached token across, and the same answers."""
    drive = Drive()
    drive.run(request(1, salt="a"))
    answers = drive.run(request(2, salt="b"), request(3, salt="a"))
    assert (answers[2].num_cached_tokens, answers[3].num_cached_tokens) == (0, 16)
    assert answers[1].token_ids == answers[2].token_ids == answers[3].token_ids


def test_equal_blocks_after_different_ones() -> None:
    """A block's hash covers all tokens before it: the same tokens after another prefix are another block."""
    one, other = range(40), [*range(4), 90, 91, 92, 93, *range(8, 40)]
    drive = Drive()
    drive.run(request(1, one))
    drive.run(request(2, other[:8]))
    answer = drive.run(request(3, other))[3]
    assert answer.num_cached_tokens == 8
    assert answer.token_ids == alone(request(3, other))


def test_two_revisions_share_nothing() -> None:
    """Another model revision gives every block another hash."""
    first, second = Drive(revision="1"), Drive(revision="2")
    first.run(request(1))
    second.run(request(1))
    assert not first.core.pool._by_hash.keys() & second.core.pool._by_hash.keys()


def test_logprobs_do_not_depend_on_the_batch() -> None:
    """Log-probabilities are those of the sequence alone, and exp of all of them sums to at most one."""
    how = sampling(max_tokens=12, logprobs=20)
    reference = Drive(num_blocks=200).run(request(1, sampling=how))[1].logprobs
    batched = Drive(num_blocks=200, max_num_batched_tokens=8).run(*requests(how))[1]
    assert len(batched.logprobs) == 12
    assert reference == Drive(num_blocks=200).run(request(1, sampling=how), *requests(how)[1:])[1].logprobs
