"""The back end that was chosen for a model, kept in a file: a restart takes the same.

    <cache folder>/linear/<hash of model, processor, threads, library and versions>.txt     the back end's name

The folder belongs to our user alone. Two engines that measure at the same time agree: the first to write wins.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

import torch

from streamserve import __version__

_FIELDS = ("model name", "Processor", "CPU part", "flags", "Features")  # of /proc/cpuinfo


class Kept:
    """One model's choice. `read` and `write` return None where the folder cannot be used."""

    def __init__(self, folder: Path, revision: str, dtype: torch.dtype, library: str = "") -> None:
        """`revision` is the hash of the model's files; `library` is what was there to choose from natively, if any."""
        threads = str(torch.get_num_threads())
        parts = (revision, str(dtype), processor(), threads, torch.__version__, __version__, library)
        name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
        self.file = folder / "linear" / f"{name}.txt"

    def read(self) -> str | None:
        """Return the name that is kept."""
        try:
            return self.file.read_text().strip() if is_ours(self.file.parent) else None
        except OSError:
            return None

    def write(self, name: str) -> str | None:
        """Keep `name`; return the name that is kept from now on: another's, where that was earlier."""
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not is_ours(self.file.parent):
                return None
            with tempfile.NamedTemporaryFile("w", dir=self.file.parent) as part:
                part.write(name)
                part.flush()
                os.link(part.name, self.file)
        except FileExistsError:
            return self.read()
        except OSError:
            return None
        return name


def is_ours(folder: Path) -> bool:
    """Return whether a folder belongs to our user, and no other user can write into it."""
    status = folder.stat()
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def processor() -> str:
    """Return the name and the features of this machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        import platform

        return platform.processor() or platform.machine()
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(_FIELDS)))
