"""The memory benchmark: each form in a process of its own, and the second load takes what the first kept."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install streamserve[engine]")
pytest.importorskip("gguf", reason="needs gguf: pip install gguf")

from benchmarks.memory import FORMS, in_a_process, in_processes, memory_of_this_process
from benchmarks.support.llama_8b import write
from streamserve.engine.model.load.gguf.file import GGUFFile

pytestmark = pytest.mark.proof


def test_sizes_are_read_from_the_status(tmp_path: Path) -> None:
    """Kilobytes there are bytes here."""
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmHWM:\t    1500 kB\nThreads:\t3\nRssAnon:\t2 kB\n")
    assert memory_of_this_process(status) == {"VmHWM": 1500 * 1024, "RssAnon": 2048}


def test_a_quantised_file_is_loaded_twice(tmp_path: Path) -> None:
    """A layer of Llama 3 8B's shape: the same answer from what was kept, and never the model twice in memory."""
    path = write(tmp_path / "model.gguf", num_layers=1, vocab_size=4096)
    assert {place.type.name for place in GGUFFile(path).tensors.values()} == {"Q4_0", "F32"}
    fields = {"path": str(path), **FORMS["as stored"], "parity_probe": False, "keep_packed": True}
    first, second = (in_a_process(fields, tmp_path / "cache") for _ in range(2))
    assert first.linears == second.linears == "native_int4"
    assert first.tokens == second.tokens
    assert list((tmp_path / "cache").rglob("*.packs"))
    assert second.peak_bytes >= second.resident_bytes >= max(second.own_bytes, path.stat().st_size)
    both = in_processes(fields, 2, tmp_path / "cache")
    assert [one.tokens for one in both] == [first.tokens] * 2
    for one in both:
        assert one.shared_bytes is not None
        assert one.own_bytes <= one.shared_bytes < one.resident_bytes
