"""A file of packed weights is cut in place while an engine computes with its pages."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from pathlib import Path

import pytest

from streamserve.engine.config import EngineConfig, ModelConfig
from tests.proofs.support.killing import Readers
from tests.support.engines.engine_processes import ask, connected, end_engine, pid_of, spec_in, until
from tests.support.processes import is_mapped

pytestmark = pytest.mark.timeout(600)

HELPDESK = Path(__file__).resolve().parents[3] / "project" / "demo_model" / "helpdesk"
MODEL = ModelConfig(
    alias="echo", path=str(HELPDESK), dtype="float32", quantize="int8", num_threads=1, parity_probe=False
)
SEATS = (0, 1, 2)


async def test_a_file_that_is_cut_in_use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine ends and is started anew, packs the weights once more, and each reader has the undisturbed answer."""
    pytest.importorskip("torch", reason="needs the engine extra: pip install 'streamserve[engine]'")
    from streamserve.engine.model.load.source import cache_folder

    own = folder / "cache" / "streamserve"
    shutil.copytree(cache_folder() / "native", own / "native")  # compiled kernels
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    spec = spec_in(folder, model=MODEL, engine=EngineConfig(block_size=16, num_blocks=257))
    requests = [ask(f"Is there a plan for {seat} people?", max_tokens=300) for seat in SEATS]
    async with connected(spec) as client:
        readers = Readers(client, random.Random(0))
        calm = await asyncio.gather(*map(readers.read, SEATS, requests))
        await readers.streams.aclose()
    end_engine(spec)
    await until(lambda: pid_of(spec) is None)
    [file] = (own / "packs").glob("*.packs")
    async with connected(spec) as client:
        pid = client.engine_pid
        if not is_mapped(file, pid):
            pytest.skip("needs a kernel and a file system that map files in huge pages (Linux 6.16, ext4 or XFS)")
        readers = Readers(client, random.Random(0))
        os.truncate(file, 0)
        seen = await asyncio.gather(*map(readers.read, SEATS, requests))
        assert client.engine_pid not in (None, pid)
        await readers.streams.aclose()
    assert file.stat().st_size > 0
    assert [one.answer for one in seen] == [one.answer for one in calm]
