"""Settings: the demo site where ten events are far behind, with a slow echo engine."""

from __future__ import annotations

from project.settings import *  # noqa: F403
from project.settings import STREAMSERVE as DEMO

STREAMSERVE = {**DEMO, "ECHO_STEP_SECONDS": 0.02, "STREAMS": {"SNAPSHOT_EVENTS": 10}}
