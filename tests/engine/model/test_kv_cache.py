"""Arithmetic of the KV memory."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from streamserve.engine.capacity import (
    blocks_for_tokens,
    blocks_of,
    max_tokens_that_fit,
    pool_bytes_on_cpu,
    pool_bytes_on_gpu,
)
from streamserve.engine.config import EngineConfig
from streamserve.engine.model.kv_cache import KVCache, LayerShape, Slots, bytes_per_block, pool_bytes
from streamserve.engine.model.load.source import available_memory, total_memory

LAYERS = {
    0: LayerShape(num_kv_heads=2, key_dim=8, value_dim=8),
    1: LayerShape(num_kv_heads=1, key_dim=16, value_dim=4),
}


def test_bytes_of_a_block() -> None:
    """A block costs the sum of its layers, whose shapes may differ, and the pools are that large."""
    cost = bytes_per_block(LAYERS, 4, torch.bfloat16)
    assert cost == 4 * 2 * (2 * 16 + 1 * 20)
    kv = KVCache(LAYERS, num_blocks=5, block_size=4, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert sum(pool.nbytes for pool in (*kv.keys.values(), *kv.values.values())) == 5 * cost


def test_blocks_by_budget_and_by_use() -> None:
    """The budget buys blocks, but never more than the largest batch can fill."""
    engine = EngineConfig(max_num_seqs=25, block_size=32, max_num_batched_tokens=64)
    assert blocks_of(engine, 1000, 100, longest=33, windows=(None,)) == 10
    assert blocks_of(engine, 100_000, 100, longest=33, windows=(None,)) == 25 * 2 + 1
    assert blocks_of(engine, 100_000, 100, longest=990, windows=(None, 32)) == 25 * (31 + 4) + 1
    assert blocks_of(replace(engine, num_blocks=7), 0, 100, longest=33, windows=(None, 32)) == 6 * 2 + 1
    assert [blocks_for_tokens(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_shares_of_memory() -> None:
    """Stated bytes win over a stated share, that over a quarter of RAM up to 4 GiB, or 0.9 of a GPU's rest."""
    cpu = torch.device("cpu")
    assert pool_bytes(EngineConfig(kv_cache_bytes=77, memory_share=0.5), cpu) == 77
    assert pool_bytes(EngineConfig(memory_share=0.5), cpu) == total_memory() // 2
    assert pool_bytes(EngineConfig(), cpu) == min(total_memory() // 4, 4 << 30)
    assert [pool_bytes_on_cpu(total << 30, None) >> 30 for total in (8, 64)] == [2, 4]
    assert pool_bytes_on_cpu(64 << 30, 0.25) >> 30 == 16
    weights = total_memory() - (1 << 30)
    assert pool_bytes(EngineConfig(), cpu, weights) == int(0.8 * (1 << 30))  # what packed weights leave
    assert pool_bytes(EngineConfig(), cpu, 2 * total_memory()) == 0
    assert [pool_bytes_on_gpu(100, None), pool_bytes_on_gpu(100, 0.5), pool_bytes_on_gpu(-5, None)] == [90, 50, 0]


def test_never_fits() -> None:
    """The null block holds no token: one block less than there are."""
    assert max_tokens_that_fit(5, 32) == 128


def in_group(folder: Path, line: str) -> Path:
    """Write the control groups of a process as Linux shows them."""
    (folder / "process").write_text(f"1:cpu:/other\n{line}\n")
    return folder / "process"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("0::/", "memory.max"),  # a container's own
        ("0::/system.slice/site.service", "memory.max"),  # the slice's
        ("0::/system.slice/site.service", "system.slice/memory.max"),
        ("0::/system.slice/site.service", "system.slice/site.service/memory.max"),
        ("0::/not/seen/from/here", "memory.max"),
        ("4:memory:/", "memory/memory.limit_in_bytes"),
        ("4:cpu,memory:/docker/ab", "memory/docker/ab/memory.limit_in_bytes"),
    ],
)
def test_containers_limit(line: str, name: str, tmp_path: Path) -> None:
    """The limit of a process's control group, or of one around it, counts where it is below the machine's."""
    process, limit = in_group(tmp_path, line), tmp_path / name
    limit.parent.mkdir(parents=True, exist_ok=True)
    limit.write_text("1048576\n")
    assert total_memory(process, tmp_path) == 1 << 20
    limit.write_text("max\n")
    assert total_memory(process, tmp_path) == total_memory(tmp_path / "absent") > 1 << 20


def test_what_a_container_has_left(tmp_path: Path) -> None:
    """Its limit less what it uses, where files that are only cached count as free; never more than the machine has."""
    (tmp_path / "memory.max").write_text("10000000\n")
    (tmp_path / "memory.current").write_text("7000000\n")
    (tmp_path / "memory.stat").write_text("anon 4000000\nactive_file 1000000\ninactive_file 500000\n")
    process = in_group(tmp_path, "0::/")
    assert available_memory(process, tmp_path) == 4_500_000
    (tmp_path / "memory.current").write_text("17000000\n")
    assert available_memory(process, tmp_path) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(process, tmp_path) > 10_000_000
    old = tmp_path / "memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("10000000\n")
    (old / "memory.usage_in_bytes").write_text("7000000\n")
    (old / "memory.stat").write_text("active_file 1\ntotal_active_file 1000000\ntotal_inactive_file 500000\n")
    assert available_memory(in_group(tmp_path, "3:memory:/"), tmp_path) == 4_500_000


def test_write_and_read_slots() -> None:
    """What is written to slots is read from the same slots, in any order; a filled block is filled in every layer."""
    kv = KVCache(LAYERS, num_blocks=5, block_size=4, dtype=torch.float32, device=torch.device("cpu"))
    key, value = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    kv.write(0, torch.tensor([7, 19, 4]), key, value)
    keys, values = kv.read(0, Slots(torch.tensor([4, 7])))
    assert torch.equal(keys, key[:, [2, 0]])
    assert torch.equal(values, value[:, [2, 0]])
    kv.fill_block(1, math.nan)
    assert kv.keys[0][:, 4:8].isnan().all()
    assert kv.values[1][:, 4:8].isnan().all()
    assert kv.keys[0][:, 19].isfinite().all()
