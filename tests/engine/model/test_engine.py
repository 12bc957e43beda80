"""The whole engine over a real model: scheduler, pool, prefix cache and runner answer as `transformers.generate`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from streamserve.engine.model.runner import ModelRunner
from streamserve.engine.plan import PENDING
from streamserve.engine.sequence import Sequence, SequenceRequest
from tests.engine.model.parity.test_parity import MAX_TOKENS, generate, references
from tests.support.engines.cores import Drive, request, resuming, sampling
from tests.support.engines.runners import ProposingRunner
from tests.support.models.model_driver import load_tiny, prompts
from tests.support.models.tiny_models import CONFIGS, VOCAB_SIZE, build_model

GREEDY = sampling(max_tokens=MAX_TOKENS, temperature=0.0)
PENALISED = sampling(
    max_tokens=MAX_TOKENS, temperature=0.0, frequency_penalty=0.8, repetition_penalty=1.2, min_tokens=5
)
SEEDED = sampling(max_tokens=MAX_TOKENS, temperature=0.9, top_p=0.9, seed=3)


# Each family with native kernels where they can be had, and some without.
LOADED = [*((name, True) for name in sorted(CONFIGS)), *((name, False) for name in ("gemma3_text", "qwen3", "smollm3"))]


@pytest.fixture(scope="module", params=LOADED, ids=lambda one: one[0] if one[1] else f"{one[0]} by torch")
def loaded(request: pytest.FixtureRequest, tiny_folder: Callable[[str], Path]) -> Any:
    model_type, native = request.param
    runner = load_tiny(tiny_folder(model_type), native=native)
    runner.can_overlap = True  # where a test asks for it
    yield model_type, runner
    runner.close()


def poison(runner: ModelRunner, block_id: int) -> None:
    """Overwrite an evicted block."""
    runner.kv.fill_block(block_id, float("nan"))


def make_drive(runner: ModelRunner, **config: Any) -> Drive:
    """A core over `runner` whose freed and evicted blocks are poisoned."""
    drive = Drive(runner=runner, **{"overlap": False, **config})
    drive.core.pool._on_evict = partial(poison, runner)  # `Drive` poisons only its own echo runner
    return drive


def requests(how: Any = GREEDY) -> list[Any]:
    return [request(i, prompt, sampling=how) for i, prompt in enumerate(prompts(VOCAB_SIZE))]


def answers(drive: Drive, how: Any = GREEDY) -> list[list[int]]:
    found = drive.tokens(*requests(how))
    drive.assert_empty()
    return [found[seq_id] for seq_id in sorted(found)]


@pytest.mark.covering(2)
@pytest.mark.parametrize("chunk", [1, 7, 16, 4096])
@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no cache"])
def test_equals_generate(loaded: Any, chunk: int, caching: bool) -> None:
    """Whatever the chunk size, with the prefix cache and without, cold and warm: the tokens of `generate`."""
    model_type, runner = loaded
    drive = make_drive(runner, prefill_chunk=chunk, prefix_caching=caching, max_num_batched_tokens=max(chunk, 8))
    assert answers(drive) == references(model_type)
    again = [request(seq_id + 100, one.prompt_token_ids, sampling=GREEDY) for seq_id, one in enumerate(requests())]
    found = drive.tokens(*again)
    assert [found[seq_id + 100] for seq_id in range(len(again))] == references(model_type)
    assert (drive.answers[100].num_cached_tokens > 0) == caching


@pytest.mark.covering(1)
@pytest.mark.parametrize("every", [1, 3])
def test_preemption(loaded: Any, every: int) -> None:
    """Preempting all sequences every few steps changes no token."""
    model_type, runner = loaded
    drive = make_drive(runner, prefill_chunk=64)

    def preempt(running: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
        return running if len(drive.plans) % (every + 1) == 0 else ()

    drive.core.scheduler.forced_preempt = preempt
    assert answers(drive) == references(model_type)


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_parked_every_few_steps(loaded: Any, how: Any) -> None:
    """Aborted after every third step and submitted again with the shown tokens, each answer is the same."""
    model_type, runner = loaded
    wanted = references(model_type) if how is GREEDY else answers(make_drive(runner), how)
    drive = make_drive(runner, prefill_chunk=64)
    assert [run_parked(drive, one, every=3) for one in requests(how)] == wanted
    drive.assert_empty()


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])
def test_several_tokens_a_step(loaded: Any, how: Any) -> None:
    """Proposed tokens, right and wrong, are rows of one step, and change no answer."""
    model_type, runner = loaded
    wanted = references(model_type) if how is GREEDY else answers(make_drive(runner), how)
    known = [(*one.prompt_token_ids, *ids) for one, ids in zip(requests(how), wanted, strict=True)]
    proposing = ProposingRunner(runner, known)
    proposing.can_overlap = False  # a token that is pending is planned on at once, and nothing proposed
    assert answers(Drive(runner=proposing, prefill_chunk=64, prefix_caching=False), how) == wanted
    assert bool(proposing.num_kept) is (how is not PENALISED)


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])
def test_overlapped(loaded: Any, how: Any) -> None:
    """Steps launched on uncollected tokens give the same tokens as steps taken in turn."""
    _, runner = loaded
    wanted = answers(make_drive(runner), how)
    drive = make_drive(runner, overlap=True, prefill_chunk=7)
    assert answers(drive, how) == wanted
    assert any(PENDING in chunk.token_ids for plan in drive.plans for chunk in plan.chunks)


@pytest.mark.covering(1)
@pytest.mark.parametrize("how", [GREEDY, PENALISED], ids=["greedy", "penalised"])
def test_overlapped_under_preemption_and_parks(loaded: Any, how: Any) -> None:
    """Sequences that are preempted, or aborted and asked again, with a step under way lose no token and gain none."""
    model_type, runner = loaded
    wanted = references(model_type) if how is GREEDY else answers(make_drive(runner, prefill_chunk=4096), how)
    drive = make_drive(runner, overlap=True, prefill_chunk=16)
    drive.core.scheduler.forced_preempt = lambda running: running[1:] if len(drive.plans) % 3 == 0 else ()
    assert answers(drive, how) == wanted
    drive.core.scheduler.forced_preempt = None
    assert [run_parked(drive, one, every=3) for one in requests(how)] == wanted
    drive.assert_empty()


@pytest.mark.covering(1)
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_repetition_penalty_equals_generate(loaded: Any, overlap: bool) -> None:
    """The penalty is that of transformers, over prompt and output, whether the host knows the newest token or not."""
    model_type, runner = loaded
    model = build_model(model_type)
    wanted = [generate(model, prompt, repetition_penalty=1.6) for prompt in prompts(VOCAB_SIZE)]
    assert wanted != references(model_type)
    how = sampling(max_tokens=MAX_TOKENS, temperature=0.0, repetition_penalty=1.6)
    assert answers(make_drive(runner, overlap=overlap, prefill_chunk=16), how) == wanted


def run_parked(drive: Drive, one: SequenceRequest, every: int) -> list[int]:
    """Park and unpark the sequence every few steps; return all tokens that were shown."""
    shown: list[int] = []
    for seq_id in itertools.count(1000 * (one.seq_id + 1)):
        drive.add(resuming(replace(one, seq_id=seq_id), output_token_ids=tuple(shown)))
        for _ in range(every):
            drive.step()
        drive.core.abort(seq_id)
        drive.step()
        shown += drive.answers[seq_id].token_ids
        if drive.answers[seq_id].finish_reason is not None:
            return shown
    raise AssertionError("never over")


def test_sampled_answers_survive_chunks_and_preemption(loaded: Any) -> None:
    """Seeded sampling gives the same tokens whole and undisturbed as in chunks of 7 under preemption."""
    _model_type, runner = loaded
    wanted = answers(make_drive(runner, prefill_chunk=4096, prefix_caching=False), SEEDED)
    drive = make_drive(runner, prefill_chunk=7)
    drive.core.scheduler.forced_preempt = lambda running: running if len(drive.plans) % 4 == 0 else ()
    assert answers(drive, SEEDED) == wanted
