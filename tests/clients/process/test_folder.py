"""Laws of an engine's folder: what cannot be used is refused by a sentence that names the setting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from streamserve.clients.process.config import EnginePathError, EnginePaths, prepare_folder


def _taken(path: Path) -> Path:
    path.write_text("")
    return path / "engines"


def _open_to_all(path: Path) -> Path:
    path.mkdir()
    path.chmod(0o777)
    return path


CASES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "below a file": (_taken, "cannot be made: Not a directory"),
    "too long": (lambda path: path / ("x" * 100), "is too long for a unix socket"),
    "open to all": (_open_to_all, "with mode 0700"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_folder_that_cannot_be_used(case: str, tmp_path: Path) -> None:
    make, words = CASES[case]
    folder = make(tmp_path / "run")
    paths = EnginePaths(**{name: folder / name for name in ("socket", "lock", "flight", "log")})
    with pytest.raises(EnginePathError, match=words) as raised:
        prepare_folder(paths)
    assert 'STREAMSERVE["ENGINE_PROCESS"]["RUNTIME_DIR"]' in str(raised.value)
