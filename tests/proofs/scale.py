"""How long the proofs are: a twentieth of the stated numbers in `make test`, all of them in `make soak`."""

from __future__ import annotations

import os

IS_SOAK = os.environ.get("STREAMSERVE_SOAK") == "1"


def scaled(full: int, *, least: int = 1) -> int:
    """Return `full` in a soak, else a twentieth of it, at least `least`."""
    return full if IS_SOAK else max(least, full // 20)
