"""The libraries of every level that this machine can run, compiled once for the run into the test cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamserve.native.build import find_compiler
from streamserve.native.levels import cpu_flags, usable_levels
from streamserve.native.library import Library, open_library

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "native"


@pytest.fixture(scope="session", params=[level.name for level in usable_levels(cpu_flags())])
def library(request: pytest.FixtureRequest) -> Library:
    """Return the library of a level; each test runs with each."""
    pytest.importorskip("torch", reason="needs torch: pip install streamserve[engine]")
    if find_compiler() is None:
        pytest.skip("needs a C++ compiler: apt install g++")
    level = next(level for level in usable_levels(cpu_flags()) if level.name == request.param)
    CACHE.parent.mkdir(exist_ok=True)
    return open_library(compiles=True, level=level, cache=CACHE)


def command(folder: Path, name: str, script: str) -> str:
    """Write an executable shell script and return its path."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    os.chmod(path, 0o755)
    return str(path)
