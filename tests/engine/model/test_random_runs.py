"""Random runs of a real model with a draft model and adapters: aborts, parks, preemptions, faults, too little memory.

The runs of tests/sim/proposals.py, over a tiny model whose freed blocks are overwritten. `RANDOM_SEED=n` repeats one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install streamserve[engine]")

from streamserve.engine.model.runner import ModelRunner  # noqa: E402  (after the skip)
from streamserve.engine.plan import Runner  # noqa: E402
from tests.proofs.scale import scaled  # noqa: E402
from tests.sim.proposals import Pair, RandomRun  # noqa: E402
from tests.support.engines.runners import WrappedRunner  # noqa: E402
from tests.support.models.adapters import LLAMA, save_adapter  # noqa: E402
from tests.support.models.model_driver import load_tiny  # noqa: E402
from tests.support.models.tiny_models import save_model  # noqa: E402

ONE_SEED = os.environ.get("RANDOM_SEED")
NUM_SEEDS = scaled(200)
NUM_BLOCKS, BLOCK_SIZE = 257, 4
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # that one native call computes


@pytest.fixture(scope="module", params=[True, False], ids=["native", "torch"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A model with two adapters, and itself as its draft model."""
    folder = tmp_path_factory.mktemp("models")
    model = save_model(folder / "model", "llama", **SHAPE)
    adapters = {
        "legal": str(save_adapter(folder / "legal", model, LLAMA, seed=1)),
        "style": str(save_adapter(folder / "style", model, ("q_proj", "down_proj"), rank=3, seed=2)),
    }
    runner = load_tiny(
        model, draft=str(model), adapters=adapters, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, native=request.param
    )
    draft = runner.draft
    assert draft is not None
    assert isinstance(draft.runner, ModelRunner)
    both = (runner, draft.runner)

    def poison(block_id: int) -> None:
        for one in both:
            one.kv.fill_block(block_id, math.nan)

    def make(num_blocks: int, block_size: int) -> tuple[Runner, Runner, Callable[[int], None]]:
        assert block_size == BLOCK_SIZE
        lent = [WrappedRunner(one) for one in both]
        for one in lent:
            one.num_blocks = num_blocks
        return *lent, poison

    yield Pair(
        make=make,
        block_sizes=(BLOCK_SIZE,),
        adapters=("", *adapters),
        knows_adapters=False,
        eos_token_id=1,
        stop_token_ids=tuple(range(3, 9)),
    )
    runner.close()


@pytest.mark.parametrize("seed", range(NUM_SEEDS) if ONE_SEED is None else [int(ONE_SEED)])
def test_random_runs(pair: Pair, seed: int) -> None:
    """Answers are those of one token a step, alone, and the books are right after each step."""
    run = RandomRun(seed, has_draft=seed % 3 > 0, pair=pair)
    run.play()
    run.check()


@pytest.mark.skipif(ONE_SEED is not None, reason="RANDOM_SEED asks for one run")
def test_everything_happens(pair: Pair) -> None:
    """Adapters answer beside tokens of the draft model; steps run out of memory, answers park, engines are lost."""
    accepted = short = parks = crashes = preemptions = with_adapters = 0
    for seed in range(24):
        run = RandomRun(1000 + seed, has_draft=True, pair=pair)
        run.play()
        run.check()
        stats = run.drive.core.stats
        accepted += sum(stats.accepted_drafts.values())
        short, parks, crashes = short + stats.out_of_memory, parks + stats.parks, crashes + run.num_crashes
        preemptions += stats.preemptions
        with_adapters += sum(bool(one.adapter) for one in run.wanted.values())
    assert min(accepted, short, parks, crashes, preemptions, with_adapters) > 0
