"""`ModelRunner` keeps the `Runner` contract: ints in, ints out, one bad sequence costs only itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.engine.model import runner as runner_module
from streamserve.engine.model.batch import SHORTEST_GROUP_BITS, build_batch
from streamserve.engine.model.load.start import load_runner
from streamserve.engine.plan import Chunk, SampleSpec, StepPlan
from tests.support.engines.specs import spec_of
from tests.support.models.model_driver import Driver, load_tiny, prompts
from tests.support.models.tiny_models import VOCAB_SIZE

SHORTEST = 2**SHORTEST_GROUP_BITS  # up to here contexts are one group
GREEDY = {"temperature": 0.0}


@pytest.fixture(scope="module")
def llama(tiny_folder: Callable[[str], Path]) -> Any:
    runner = load_tiny(tiny_folder("llama"))
    yield runner
    runner.close()


def spec(position: int, **fields: Any) -> SampleSpec:
    return spec_of(position, **{"temperature": 0.0, **fields})


def test_results_stand_in_the_plans_order(llama: Any) -> None:
    """One entry for each chunk that samples, in the plan's order, whatever order the batch has inside."""
    chunks = (
        Chunk(seq_id=5, start=0, token_ids=(3, 4, 5), block_table=(1,), samples=(spec(3),)),
        Chunk(seq_id=2, start=0, token_ids=(7,), block_table=(2,), samples=(spec(1),)),
        Chunk(seq_id=9, start=0, token_ids=(3, 4), block_table=(3,)),
        Chunk(seq_id=1, start=0, token_ids=(8,), block_table=(4,), samples=(spec(1),)),
    )
    result = llama.collect(llama.launch(StepPlan(step_id=77, chunks=chunks)))
    assert result.step_id == 77
    assert [sampled.seq_id for sampled in result.sampled] == [5, 2, 1]
    assert all(len(sampled.token_ids) == 1 for sampled in result.sampled)


def test_a_plan_may_sample_nothing(llama: Any) -> None:
    """A step of chunks in mid-prompt gives no tokens."""
    chunk = Chunk(seq_id=5, start=0, token_ids=(3, 4, 5), block_table=(1,))
    assert llama.collect(llama.launch(StepPlan(step_id=0, chunks=(chunk,)))).sampled == ()


def test_a_poisoned_sequence_fails_alone(llama: Any) -> None:
    """NaN in one sequence's own block fails that sequence; its batch mate's tokens do not change."""
    healthy = Driver(llama, seed=3).run(prompts(VOCAB_SIZE)[:1], max_tokens=6, chunk=64)[0]
    driver = Driver(llama, seed=3)
    good, bad = (driver.start(i, prompts(VOCAB_SIZE)[0], 6, **GREEDY) for i in range(2))
    driver.step([good, bad], 64)
    llama.kv.fill_block(bad.tables[0][0], math.nan)
    found = driver.step([good, bad], 64)
    assert (found[1].token_ids, found[1].error) == ((), "numerical_error")
    for _ in range(4):
        driver.step([good], 64)
    assert [*(sampled.token_ids[0] for sampled in good.sampled)] == healthy
    llama.kv.fill_block(bad.tables[0][0], 0.0)


def test_a_chunk_that_fails_without_sampling_is_reported(llama: Any) -> None:
    """Non-finite values in mid-prompt come back at once, so that the chunk's blocks are never cached."""
    driver = Driver(llama)
    one = driver.start(0, prompts(VOCAB_SIZE)[0], 1, **GREEDY)
    driver.step([one], 16)
    llama.kv.fill_block(one.tables[0][1], math.inf)
    found = driver.step([one], 16)
    assert found[0].error == "numerical_error"
    llama.kv.fill_block(one.tables[0][1], 0.0)


def test_freed_pages_poisoned(llama: Any) -> None:
    """With NaN in every unowned block, and in the unwritten rest of owned ones, answers are the same."""
    wanted = Driver(llama, seed=1).run(prompts(VOCAB_SIZE), max_tokens=6, chunk=7)
    for block_id in range(llama.num_blocks):
        llama.kv.fill_block(block_id, math.nan)
    assert Driver(llama, seed=2).run(prompts(VOCAB_SIZE), max_tokens=6, chunk=7) == wanted
    for block_id in range(llama.num_blocks):
        llama.kv.fill_block(block_id, 0.0)


def test_sampled_answers_do_not_depend_on_the_batch(llama: Any) -> None:
    """With a seed, a sequence gets the same tokens alone and in a batch, chunked and whole."""
    how = {"temperature": 0.9, "top_p": 0.9, "seed": 5}
    together = Driver(llama, seed=1).run(prompts(VOCAB_SIZE), max_tokens=10, chunk=7, **how)
    alone = [Driver(llama, seed=2).run([prompt], max_tokens=10, chunk=64, **how)[0] for prompt in prompts(VOCAB_SIZE)]
    assert together == alone
    assert together != Driver(llama).run(prompts(VOCAB_SIZE), max_tokens=10, chunk=7, **{**how, "seed": 6})


def test_logprobs_come_with_the_token(llama: Any) -> None:
    """The chosen token's log probability leads the top ones when it is the likeliest."""
    driver = Driver(llama)
    one = driver.start(0, prompts(VOCAB_SIZE)[1], 1, logprobs=4)
    sampled = driver.step([one], 64)[0]
    assert sampled.logprobs[0] is not None
    assert len(sampled.logprobs[0].top) == 4
    assert sampled.logprobs[0].top[0] == (sampled.token_ids[0], pytest.approx(sampled.logprobs[0].chosen))


def test_contexts_of_very_different_length_decode_together(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes far apart in length are computed in groups, in one step, and answer as they would alone."""
    lengths = [3, 70, SHORTEST + 40, 2 * SHORTEST + 40, 4 * SHORTEST + 40]
    num_groups: list[int] = []

    def noting(*args: Any, **options: Any) -> Any:
        batch = build_batch(*args, **options)
        num_groups.append(len(batch.decodes))
        return batch

    long = load_tiny(tiny_folder("llama"), num_blocks=2000)
    try:
        texts = prompts(VOCAB_SIZE, lengths)
        wanted = [Driver(long).run([text], max_tokens=8, chunk=9999)[0] for text in texts]
        monkeypatch.setattr(runner_module, "build_batch", noting)
        assert Driver(long, seed=4).run(texts, max_tokens=8, chunk=9999) == wanted
    finally:
        long.close()
    assert max(num_groups) == len({max(SHORTEST_GROUP_BITS, length.bit_length()) for length in lengths}) > 2


@pytest.mark.parametrize("how", [GREEDY, {"temperature": 0.9, "top_p": 0.9, "seed": 5}], ids=["greedy", "seeded"])
def test_pending_tokens(llama: Any, how: dict[str, Any]) -> None:
    """Steps launched before the last one is collected, in changing batches, give the tokens of steps in turn."""
    lengths = [10, 7, 4, 2]
    wanted = Driver(llama, seed=1).run(prompts(VOCAB_SIZE), max_tokens=10, chunk=7, **how)
    found = Driver(llama, seed=2).run_overlapped(prompts(VOCAB_SIZE), max_tokens=lengths, **how)
    assert found == [tokens[:length] for tokens, length in zip(wanted, lengths, strict=True)]


def test_a_pending_token_after_a_numerical_error(llama: Any) -> None:
    """A step launched on the token of a poisoned sequence runs, and its batch mates' answers do not change."""
    wanted = Driver(llama, seed=3).run(prompts(VOCAB_SIZE)[:1], max_tokens=3, chunk=64)[0]
    driver = Driver(llama, seed=3)
    good, bad = (driver.start(i, prompts(VOCAB_SIZE)[0], 6, **GREEDY) for i in range(2))
    driver.step([good, bad], 64)
    llama.kv.fill_block(bad.tables[0][0], math.nan)
    first, second = driver.launch([good, bad]), driver.launch([good, bad])
    found = [llama.collect(handle).sampled for handle in (first, second)]
    assert [sampled[1].error for sampled in found] == ["numerical_error", "numerical_error"]
    assert [good.sampled[0].token_ids[0], *(sampled[0].token_ids[0] for sampled in found)] == wanted
    llama.kv.fill_block(bad.tables[0][0], 0.0)


def test_overlap_is_for_gpus_unless_asked(tiny_folder: Callable[[str], Path]) -> None:
    """A runner on a CPU reports that it gains nothing from overlap; the config can override it."""
    model = ModelConfig(alias="m", path=str(tiny_folder("llama")), device="cpu")
    runners = [load_runner(model, EngineConfig(num_blocks=20, overlap=overlap)) for overlap in (None, False, True)]
    assert [runner.can_overlap for runner in runners] == [False, False, True]
