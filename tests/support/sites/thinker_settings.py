"""Settings: the demo site with the model of tests/support/models/thinking_model.py, in a folder that THINKER names."""

from __future__ import annotations

import os

from project.settings import *  # noqa: F403
from project.settings import STREAMSERVE as DEMO

MODEL = {"PATH": os.environ["THINKER"], "ENGINE": {"NUM_BLOCKS": 1024}}
STREAMSERVE = {
    **DEMO,
    "MODELS": {"thinker": MODEL},
    "ENGINE_PROCESS": {"MAX_FAILURES": 10_000},  # tests kill it, again if it had answered before
    "STORE": True,
    "ANONYMOUS": False,
}
