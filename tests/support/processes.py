"""What /proc says of a process, which may end while it is read: nothing is held then. See proc(5)."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def command_of(pid: int) -> str:
    """Return a process's arguments with spaces between them."""
    return _read(pid, "cmdline").replace("\0", " ").rstrip()


def variables_of(pid: int) -> list[str]:
    """Return the environment that a process was started with, as NAME=VALUE."""
    return _read(pid, "environ").split("\0")


def state_of(pid: int) -> str:
    """Return a process's state: R, S, D, T, Z …; empty if it has ended."""
    return fields[0] if (fields := _stat(pid)) else ""


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    return state_of(pid) not in ("", "Z", "X")


def parent_of(pid: int) -> int | None:
    """Return the process that a process is a child of."""
    return int(fields[1]) if (fields := _stat(pid)) else None


def children_of(pid: int | str) -> set[int]:
    """Return the children that a process's threads have started, ended ones that are not reaped included."""
    return {int(child) for thread in threads_of(pid) for child in _read(pid, f"task/{thread}/children").split()}


def threads_of(pid: int | str) -> set[int]:
    """Return the ids of a process's threads."""
    with suppress(OSError):
        return {int(name) for name in os.listdir(f"/proc/{pid}/task")}
    return set()


def resident_bytes(pid: int | str) -> int:
    """Return the memory that a process holds."""
    return int(text.split()[1]) * PAGE_BYTES if (text := _read(pid, "statm")) else 0


def open_names(pid: int | str) -> list[str]:
    """Return what a process's descriptors are open on: a path, or socket:[…], pipe:[…], anon_inode:…

    A descriptor that closes meanwhile, as that of the listing itself does, is left out.
    """
    names = []
    with suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                names.append(os.readlink(f"/proc/{pid}/fd/{entry}"))
    return names


def is_mapped(file: Path, pid: int) -> bool:
    """Return whether a process has that file in its memory."""
    return str(file) in _read(pid, "maps")


def _stat(pid: int) -> list[str]:
    return _read(pid, "stat").rpartition(")")[2].split()


def _read(pid: int | str, name: str) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    return ""
