"""Settings: the demo site with a slow echo engine, for two web processes on one state folder.

The environment may name another log, LOG, how long streams may go on after SIGTERM, DRAIN_SECONDS, and how long they
wait for a reader, RESUME_WINDOW_SECONDS: by default longer than a busy machine takes to start the next process.
"""

from __future__ import annotations

import os

from project.settings import *  # noqa: F403
from project.settings import STREAMSERVE as DEMO

STREAMSERVE = {
    **DEMO,
    "ECHO_STEP_SECONDS": 0.01,
    "LIMITS": {"MAX_STREAMS_PER_PRINCIPAL": 100},
    "STREAMS": {"RESUME_WINDOW_SECONDS": float(os.environ.get("RESUME_WINDOW_SECONDS", 300))},
    "FLOW": {"DRAIN_SECONDS": float(os.environ.get("DRAIN_SECONDS", 2))},
    "LOG": os.environ.get("LOG", "file"),
}
