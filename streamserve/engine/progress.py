"""`Progress`: how a load tells how far it is. Called on the loading thread; it may raise to end the load."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Takes the stage, how much of it is done (0 to 1), and the bytes read so far where bytes are read."""

    def __call__(self, stage: str, fraction: float, loaded_bytes: int = 0, total_bytes: int = 0) -> None: ...


def no_progress(stage: str, fraction: float, loaded_bytes: int = 0, total_bytes: int = 0) -> None:
    """Tell nobody."""
