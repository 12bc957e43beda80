"""A machine on which no native library can be made serves the same answers, and says what is missing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from streamserve.engine.model import kernels
from streamserve.native.build import find_compiler
from tests.native.conftest import command
from tests.support.models.model_driver import Driver, load_tiny, prompts
from tests.support.models.tiny_models import VOCAB_SIZE


def no_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return "install g++"


def broken_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CXX", command(folder, "cxx", "echo 'error: broken' >&2; exit 1"))
    return "broken"


def open_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    cache = folder / "streamserve" / "native"
    cache.mkdir(parents=True)
    os.chmod(cache, 0o777)
    return "alone"


@pytest.mark.parametrize("fault", [no_compiler, broken_compiler, open_cache])
def test_without_a_library_torch_serves(
    fault: Callable[[Path, pytest.MonkeyPatch], str],
    tiny_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The tokens are those of `native=False`, and one line in the log names the reason and the cost."""
    folder = tiny_folder("llama")
    wanted = Driver(load_tiny(folder, native=False)).run(prompts(VOCAB_SIZE)[:2], max_tokens=8, chunk=16)
    monkeypatch.setattr(kernels, "_opened", [])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reason = fault(tmp_path, monkeypatch)
    kernels._warn.cache_clear()
    runners = [load_tiny(folder) for _ in range(2)]
    assert Driver(runners[0]).run(prompts(VOCAB_SIZE)[:2], max_tokens=8, chunk=16) == wanted
    lines = [record.getMessage() for record in caplog.records if "kernels are off" in record.getMessage()]
    assert len(lines) == 1
    assert reason in lines[0]
    assert "native" not in runners[0].linears


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler: apt install g++")
def test_with_a_library_the_tokens_are_the_same(tiny_folder: Callable[[str], Path]) -> None:
    """In float32 no token of an answer differs."""
    runners = [load_tiny(tiny_folder("llama"), native=flag) for flag in (True, False)]
    answers = [Driver(runner).run(prompts(VOCAB_SIZE), max_tokens=12, chunk=16) for runner in runners]
    assert answers[0] == answers[1]
    assert runners[0].linears == "native"
