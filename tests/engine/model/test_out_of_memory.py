"""A step that does not fit into memory costs that step, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from streamserve.engine.model.runner import is_out_of_memory
from streamserve.engine.plan import Chunk, StepOutOfMemory, StepPlan
from tests.support.memory import spare_memory
from tests.support.models.adapters import save_adapter
from tests.support.models.model_driver import Driver, load_tiny, prompts
from tests.support.models.tiny_models import VOCAB_SIZE, save_model

NUM_WIDE = 1 << 16  # of the hidden layer: 256 KiB for each token of a step, more than what other tests have left
SPARE_BYTES = 256 << 20


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = save_model(tmp_path_factory.mktemp("wide"), "llama", intermediate_size=NUM_WIDE, num_hidden_layers=1)
    adapter = save_adapter(tmp_path_factory.mktemp("adapter"), folder)
    runner = load_tiny(folder, num_blocks=2000, adapters={"legal": str(adapter)})
    yield runner
    runner.close()


def large_plan(num_sequences: int, adapter: str = "") -> StepPlan:
    """Return 200 tokens of each sequence."""
    tables = [tuple(range(1 + 50 * i, 51 + 50 * i)) for i in range(num_sequences)]
    chunks = [Chunk(seq_id=i, start=0, token_ids=(3,) * 200, block_table=table) for i, table in enumerate(tables)]
    return StepPlan(step_id=1, chunks=tuple(replace(chunk, adapter=adapter) for chunk in chunks))


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: only there a process can be held to so much memory")
@pytest.mark.parametrize("adapter", ["", "legal"])
def test_a_runner_survives_a_step_that_does_not_fit(wide: Any, adapter: str) -> None:
    """A plan too large for memory raises `StepOutOfMemory`, keeps nothing, and the next smaller plans run as before."""
    wanted = Driver(wide, seed=1).run(prompts(VOCAB_SIZE), max_tokens=4, chunk=7)
    with spare_memory(SPARE_BYTES):
        for _ in range(3):
            with pytest.raises(StepOutOfMemory, match="memory") as caught:
                wide.launch(large_plan(30, adapter))
            assert caught.value.__context__ is None  # whose frames would hold the step's tensors
        assert wide.collect(wide.launch(large_plan(1, adapter))).sampled == ()
        assert Driver(wide, seed=2).run(prompts(VOCAB_SIZE), max_tokens=4, chunk=7) == wanted


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: only there a process can be held to so much memory")
def test_decodes_that_do_not_fit(wide: Any) -> None:
    """A native step says so too, and the process lives."""
    wanted = Driver(wide, seed=1).run(prompts(VOCAB_SIZE), max_tokens=4, chunk=7)
    rows = tuple(Chunk(seq_id=i, start=0, token_ids=(3,), block_table=(1 + i,)) for i in range(1900))
    with spare_memory(SPARE_BYTES // 2):
        for _ in range(3):
            with pytest.raises(StepOutOfMemory, match="memory"):
                wide.launch(StepPlan(step_id=1, chunks=rows))
        assert Driver(wide, seed=2).run(prompts(VOCAB_SIZE), max_tokens=4, chunk=7) == wanted


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("std::bad_alloc"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("shape '[2, 3]' is invalid for input of size 5"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error: Exception, is_memory: bool) -> None:
    """Only errors of allocators; any other error means that the runner is broken."""
    assert is_out_of_memory(error) is is_memory


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("token_id", [VOCAB_SIZE + 5, -2])
def test_other_errors_pass_through(tiny_folder: Callable[[str], Path], token_id: int, native: bool) -> None:
    """An error that is not about memory passes through unchanged."""
    runner = load_tiny(tiny_folder("llama"), native=native)
    chunk = Chunk(seq_id=0, start=0, token_ids=(token_id,), block_table=(1,))
    with pytest.raises(IndexError):
        runner.launch(StepPlan(step_id=0, chunks=(chunk,)))
    runner.close()


def test_a_block_beyond_the_pool(tiny_folder: Callable[[str], Path]) -> None:
    """No memory of another owner is read or written: a decode in it is an `IndexError`."""
    runner = load_tiny(tiny_folder("llama"))
    for tables in ((runner.num_blocks, 1), (-1, 1), (1, runner.num_blocks), (1, -1)):
        chunk = Chunk(seq_id=0, start=5, token_ids=(3,), block_table=tables)
        with pytest.raises(IndexError):
            runner.launch(StepPlan(step_id=0, chunks=(chunk,)))
    runner.close()
