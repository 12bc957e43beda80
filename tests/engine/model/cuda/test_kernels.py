"""Each Triton kernel computes what torch does, in numbers and in draws."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from streamserve.engine.model.cuda.kernels import GPUKernels
from streamserve.engine.model.decoder.decoder import Decoder
from streamserve.engine.model.load import loader
from tests.engine.model.parity.test_parity import references
from tests.support import gpu_laws
from tests.support.models.model_driver import Driver, load_tiny, prompts
from tests.support.models.tiny_models import VOCAB_SIZE

pytestmark = [
    pytest.mark.proof,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of NumPy, at numbers that are not finite
]


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
def test_greedy_equals_generate(
    model_type: str,
    kernels: GPUKernels,
    tiny_folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A whole decoder on the kernels that a GPU has answers as `generate` does."""
    monkeypatch.setattr(loader, "gpu_kernels_for", lambda *_args: kernels)
    runner = load_tiny(tiny_folder(model_type), native=False, packed=False, parity_probe=False)
    assert isinstance(runner.loaded.model, Decoder)
    assert runner.has_gpu_kernels
    answers = Driver(runner, seed=1).run(prompts(VOCAB_SIZE)[1:], max_tokens=3, chunk=16)
    assert answers == [tokens[:3] for tokens in references(model_type)[1:]]


class Broken(GPUKernels):
    """Kernels that a GPU has no room for, or, not `raises`, that attend wrongly."""

    def __init__(self, *, raises: bool) -> None:
        super().__init__(torch.device("cpu"), 8)
        attend = self.attend_decodes

        def wrong(*args: Any, **options: Any) -> Any:
            if raises:
                raise RuntimeError("out of resource: shared memory")
            return 1.5 * attend(*args, **options)

        self.attend_decodes = wrong


@pytest.mark.parametrize("raises", [True, False])
def test_kernels_that_fail_are_left(
    raises: bool,
    tiny_folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The parity probe finds them; the model is served by torch alone, and the log says so."""
    monkeypatch.setattr(loader, "gpu_kernels_for", lambda *_args: Broken(raises=raises))
    runner = load_tiny(tiny_folder("llama"), native=False, packed=False)
    assert isinstance(runner.loaded.model, Decoder)
    assert not runner.has_gpu_kernels
    assert "GPU kernels are off for this model" in caplog.text
    answers = Driver(runner, seed=1).run(prompts(VOCAB_SIZE)[1:], max_tokens=3, chunk=16)
    assert answers == [tokens[:3] for tokens in references("llama")[1:]]
