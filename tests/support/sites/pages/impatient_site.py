"""Settings: the demo site with a slow echo engine, and watchdogs with short time-outs."""

from __future__ import annotations

from project.settings import *  # noqa: F403
from project.settings import STREAMSERVE as DEMO

PATIENCE_SECONDS = 2.0

STREAMSERVE = {
    **DEMO,
    "ECHO_STEP_SECONDS": 0.02,
    "ENGINE": {"STEP_SECONDS": PATIENCE_SECONDS},
    "ENGINE_PROCESS": {"HANG_SECONDS": PATIENCE_SECONDS},
}
