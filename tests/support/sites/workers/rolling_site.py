"""Settings: the demo site as in production (no DEBUG, engines started by hand), with a slow echo engine."""

from __future__ import annotations

from project.settings import *  # noqa: F403
from project.settings import STREAMSERVE as DEMO

DEBUG = False
ALLOWED_HOSTS = ["127.0.0.1"]
DRAIN_SECONDS = 6.0
STREAMSERVE = {
    **DEMO,
    "ANONYMOUS": False,
    "ECHO_STEP_SECONDS": 0.02,
    "LIMITS": {"MAX_STREAMS_PER_PRINCIPAL": 100},
    "STREAMS": {"ENGINE_WAIT_SECONDS": 60},
    "FLOW": {"DRAIN_SECONDS": DRAIN_SECONDS},
}
