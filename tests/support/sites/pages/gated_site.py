"""Settings: the demo site for tests/proofs/support/gated_engine.py: no time limits, and every token is an event.

Every answer has a token in each step, and none parks for another: a step without it is one that it was cancelled from.
"""

from __future__ import annotations

import os

from project.settings import *  # noqa: F403
from project.settings import STREAMSERVE as DEMO
from streamserve.engine import config

NUM_SEATS = 64
config.POLICY = config.Policy(hungry_seconds=1e6, min_ahead_seconds=1e6)
_PATIENT = {"MAX_QUEUE_SECONDS": 1e6, "MAX_LATE_SECONDS": 1e6}

STREAMSERVE = {
    **DEMO,
    "ENGINE_AUTOSTART": False,  # the test starts it
    "CLASSES": dict.fromkeys(("chat", "completion", "document", "batch"), _PATIENT),
    "ENGINE": {
        "MAX_NUM_SEQS": int(os.environ.get("SEATS", NUM_SEATS)),
        "MAX_NUM_BATCHED_TOKENS": 8192,
        "PREFILL_CHUNK": 8192,
        "ITL_TARGET_SECONDS": 1e6,
        "STEP_SECONDS": 1e6,  # steps are held
        "PREFIX_CACHING": False,
        "CHECK_INTEGRITY": True,
    },
    "LIMITS": {"MAX_STREAMS_PER_PRINCIPAL": 100_000},
    "STREAMS": {
        "COALESCE_TOKENS": 0,
        "COALESCE_SECONDS": 0,
        "FIRST_READER_SECONDS": 600,
        "RESUME_WINDOW_SECONDS": 1,
        "RETENTION_SECONDS": float(os.environ.get("RETENTION", 900)),
    },
}
