"""Laws of what a step costs beside the native call: few operations of torch, however many rows and layers it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from streamserve.engine.model.runner import ModelRunner
from streamserve.native.build import find_compiler
from tests.support.models.model_driver import Driver, load_tiny, prompts
from tests.support.models.tiny_models import VOCAB_SIZE, save_model

MOST_OF_DECODES = 40
MOST_OF_A_SHORT_CHUNK = 60
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 3}


class Counting(TorchDispatchMode):
    """Counts the operations of torch inside the block, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Count one operation, and compute it."""
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def load(folder: Path, num_layers: int, dtype: str) -> ModelRunner:
    if find_compiler() is None:
        pytest.skip("needs a C++ compiler: apt install g++")
    path = save_model(folder / f"{num_layers}", "llama", num_hidden_layers=num_layers)
    return load_tiny(path, dtype=dtype, parity_probe=False)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runners(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ModelRunner]]:
    """Return the runners of a model with two layers and of a model with five, with native kernels."""
    made = [load(tmp_path_factory.mktemp("model"), num_layers, request.param) for num_layers in (2, 5)]
    yield made
    for runner in made:
        runner.close()


def count(runner: ModelRunner, lengths: Sequence[int], *chunks: int) -> Counter[str]:
    """Return the operations of a step with the last of `chunks`, after steps with those before it."""
    driver = Driver(runner)
    running = [driver.start(i, prompt, 8, **SAMPLED) for i, prompt in enumerate(prompts(VOCAB_SIZE, lengths))]
    for chunk in chunks[:-1]:
        driver.step(running, chunk)
    with Counting() as counting:
        driver.step(running, chunks[-1])
    return counting.counts


def test_a_native_step_takes_few_operations(runners: list[ModelRunner]) -> None:
    """As many for one row as for six, and for two layers as for five; none converts a number to another type."""
    counts = [count(runner, lengths, 96, 1) for runner in runners for lengths in ([41], [41, 23, 9, 70, 30, 2])]
    assert all(one == counts[0] for one in counts)
    assert counts[0].total() <= MOST_OF_DECODES
    assert not [name for name in counts[0] if "_to_copy" in name]


def test_the_rest_of_a_cached_prompt_takes_few_operations(runners: list[ModelRunner]) -> None:
    """A prompt's last tokens, of which all others are cached, are rows of the native call: no layer is run for them."""
    counts = [count(runner, [96 + rest], 96, 32) for runner in runners for rest in (8, 31)]
    assert all(one == counts[0] for one in counts)
    assert counts[0].total() <= MOST_OF_A_SHORT_CHUNK
