"""Files as memory: their bytes, or None where they are not mapped in huge pages, and never a crash."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install streamserve[engine]")

from streamserve.engine.model.linear.mapped import HUGE_PAGE, map_file  # noqa: E402  (after the skip)

NUM_PAGES = 4


@contextmanager
def opened(file: Path) -> Iterator[int]:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file in whole huge pages, which this machine maps."""
    with (tmp_path / "file").open("wb", buffering=0) as stream:
        for number in range(NUM_PAGES):
            stream.write(bytes([number + 1]) * HUGE_PAGE)
    with opened(tmp_path / "file") as descriptor:
        if map_file(descriptor, NUM_PAGES * HUGE_PAGE) is None:
            pytest.skip("needs a kernel and a file system that map files in huge pages (Linux 6.16, ext4 or XFS)")
    return tmp_path / "file"


def test_the_bytes_of_a_file(file: Path) -> None:
    """They stay when the descriptor is closed, when another file takes its place, and when it is removed."""
    with opened(file) as descriptor:
        found = map_file(descriptor, NUM_PAGES * HUGE_PAGE)
    other = file.with_suffix(".new")
    other.write_bytes(b"other")
    other.replace(file)
    file.unlink()
    assert found is not None
    assert found.view(NUM_PAGES, HUGE_PAGE).unique(dim=1).flatten().tolist() == [1, 2, 3, 4]


def test_a_file_that_was_cut(file: Path) -> None:
    """Less than was said is not mapped, and no page is touched that is not there."""
    os.truncate(file, 3 * HUGE_PAGE + 10)
    with opened(file) as descriptor:
        assert map_file(descriptor, NUM_PAGES * HUGE_PAGE) is None


def test_a_small_file(file: Path) -> None:
    """It has no huge page."""
    os.truncate(file, 4096)
    with opened(file) as descriptor:
        assert map_file(descriptor, 4096) is None
