"""Print the newest Python of this machine that `make newest` can use: 3.12 or later, as Django 6 needs.

Standard library only. Looks on PATH and among pyenv's versions.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

OLDEST = (3, 12)
_NAME = re.compile(r"python3\.\d+")


def main() -> int:
    """Print its path; return the exit status."""
    python = find()
    if python is None:
        print(f"no Python {'.'.join(map(str, OLDEST))} or later on this machine", file=sys.stderr)
        return 1
    print(python)
    return 0


def find() -> Path | None:
    """Return its path; None where there is none."""
    found = {version: path for path in _candidates() if (version := _version_of(path)) >= OLDEST}
    return found[max(found)] if found else None


def _candidates() -> Iterator[Path]:
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    folders += sorted(pyenv.glob("versions/*/bin"))
    for folder in folders:
        if folder != pyenv / "shims" and folder.is_dir():
            yield from sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def _version_of(python: Path) -> tuple[int, ...]:
    """Return the version that runs, () for a file that does not, or is no release."""
    code = "import sys, venv; v = sys.version_info; print(*v[:3]) if v.releaselevel == 'final' else None"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(map(int, done.stdout.split()))


if __name__ == "__main__":
    sys.exit(main())
