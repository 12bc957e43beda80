"""How long OpenMP's threads spin before they sleep. Knows no torch: the OpenMP runtime reads this when it is loaded.

A step is hundreds of short parallel regions. A thread that sleeps between two of them costs a wake-up each time. A
thread that spins for long takes a core from the event loop, the tokenisers and other processes. So it spins for about
as long as the gap between two regions of one step, and sleeps between steps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# The variables that set how threads wait: OpenMP's own, libgomp's (torch on Linux), libiomp's and LLVM's.
NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
# Iterations of libgomp's loop (a `pause` each), and milliseconds, the smallest number of LLVM's runtime above 0.
# Chosen by `python -m benchmarks.peers --environ GOMP_SPINCOUNT=N` and as docs/log.md records.
_BOUNDED = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}


def bound_spin(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to `environment`: none if it sets already how threads wait."""
    return {} if any(name in environment for name in NAMES) else dict(_BOUNDED)


def limit_spin() -> None:
    """Bound the spin of an OpenMP runtime that this process loads from now on."""
    os.environ.update(bound_spin(os.environ))
