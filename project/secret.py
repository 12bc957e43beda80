"""A secret that is made once and kept in a file outside the repository."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def read_or_make(path: Path, num_bytes: int = 48) -> str:
    """Return the secret in `path`; make it, readable by this user only, when there is none.

    Safe for concurrent processes: a hard link creates the file complete, and the first one wins.
    """
    if not path.exists():
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        draft.touch(mode=0o600)
        draft.write_text(secrets.token_urlsafe(num_bytes))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
        draft.unlink()
    return path.read_text().strip()
