"""The size of the proofs: the stated numbers in `make soak`, a twentieth of them in `make proofs` and `make test`."""

from __future__ import annotations

import os

IS_SOAK = os.environ.get("STREAMSERVE_SOAK") == "1"


def scaled(full: int, *, least: int = 1) -> int:
    """Return `full` in a soak, else a twentieth of it, at least `least`."""
    return full if IS_SOAK else max(least, full // 20)
