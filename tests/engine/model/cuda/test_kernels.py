"""Each Triton kernel computes what torch does, in numbers and in draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from streamserve.engine.model.cuda.kernels import GPUKernels
from streamserve.engine.model.decoder.decoder import Decoder
from tests.engine.model.parity.test_parity import references
from tests.support import gpu_laws
from tests.support.models.model_driver import Driver, load_tiny, prompts
from tests.support.models.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, at numbers that are not finite


@pytest.fixture(scope="module")
def kernels() -> GPUKernels:
    return GPUKernels(torch.device("cpu"), 8)


@pytest.mark.parametrize("seed", range(4))
def test_attention(kernels: GPUKernels, seed: int) -> None:
    """Windows, softcaps, sinks, groups and odd head dims."""
    gpu_laws.check_attention(kernels, torch.float32, seed)


@pytest.mark.parametrize("seed", range(6))
def test_heads(kernels: GPUKernels, seed: int) -> None:
    gpu_laws.check_heads(kernels, torch.float32, seed)


def test_norms(kernels: GPUKernels) -> None:
    gpu_laws.check_norms(kernels, torch.float32)


def test_gates(kernels: GPUKernels) -> None:
    gpu_laws.check_gates(kernels, torch.float32)


def test_draws(kernels: GPUKernels) -> None:
    gpu_laws.check_draws(kernels, 24, 5000)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_greedy_equals_generate(model_type: str, kernels: GPUKernels, tiny_folder: Callable[[str], Path]) -> None:
    """A whole decoder on the kernels that a GPU has answers as `generate` does."""
    runner = load_tiny(tiny_folder(model_type), native=False, packed=False)
    assert isinstance(runner.loaded.model, Decoder)
    runner.loaded.model.use(kernels)
    runner.loaded = replace(runner.loaded, kernels=kernels)
    answers = Driver(runner, seed=1).run(prompts(VOCAB_SIZE)[1:], max_tokens=3, chunk=16)
    assert answers == [tokens[:3] for tokens in references(model_type)[1:]]
