"""Settings: the demo site with one answer at a time, so that a second one waits in the queue."""

from __future__ import annotations

from project.settings import *  # noqa: F403
from project.settings import STREAMSERVE as DEMO

STREAMSERVE = {
    **DEMO,
    "CONVERSATIONS": False,
    "ECHO_STEP_SECONDS": 0.02,
    "ENGINE": {"DEFAULT_MAX_TOKENS": 100, "MAX_NUM_SEQS": 1, "MAX_ADMITTED": 1},
}
