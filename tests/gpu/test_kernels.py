"""The Triton kernels and the CUDA graphs on a GPU. Runs without Django, as test_parity.py does."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install streamserve[engine]")
pytest.importorskip("transformers", reason="needs transformers: pip install streamserve[engine]")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU that torch sees", allow_module_level=True)

from streamserve.engine.model.cuda.graphs import DecodeGraphs  # noqa: E402  (after the skips)
from streamserve.engine.model.cuda.kernels import GPUKernels, open_gpu_kernels  # noqa: E402
from streamserve.engine.model.decoder.decoder import Decoder  # noqa: E402
from tests.support import gpu_laws  # noqa: E402
from tests.support.models.model_driver import Driver, load_tiny, prompts  # noqa: E402
from tests.support.models.tiny_models import VOCAB_SIZE, save_model  # noqa: E402

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def kernels() -> GPUKernels:
    found = open_gpu_kernels(torch.device("cuda"))
    assert found is not None, "there is a GPU, and no Triton"
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(8))
def test_attention(kernels: GPUKernels, dtype: torch.dtype, seed: int) -> None:
    gpu_laws.check_attention(kernels, dtype, seed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(6))
def test_heads(kernels: GPUKernels, dtype: torch.dtype, seed: int) -> None:
    gpu_laws.check_heads(kernels, dtype, seed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(kernels: GPUKernels, dtype: torch.dtype) -> None:
    gpu_laws.check_norms(kernels, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(kernels: GPUKernels, dtype: torch.dtype) -> None:
    gpu_laws.check_gates(kernels, dtype)


@pytest.mark.parametrize("vocab_size", [5000, 128_256])
def test_draws(kernels: GPUKernels, vocab_size: int) -> None:
    gpu_laws.check_draws(kernels, 64, vocab_size)


def test_graphs_change_no_token(tmp_path: Path) -> None:
    """Decodes run as graphs, of fewer rows than captured too, and answer as the same kernels one by one do."""
    runner = load_tiny(save_model(tmp_path, "llama"), device="cuda")
    decoder = runner.loaded.model
    assert isinstance(decoder, Decoder)
    assert isinstance(decoder.graphs, DecodeGraphs)
    how = {"max_tokens": 12, "chunk": 7, "temperature": 0.8, "seed": 4}
    replays = decoder.graphs.num_replays
    with_graphs = Driver(runner, seed=1).run(prompts(VOCAB_SIZE), **how)
    assert decoder.graphs.num_replays > replays
    decoder.graphs = None
    assert Driver(runner, seed=2).run(prompts(VOCAB_SIZE), **how) == with_graphs
