"""Settings: the demo site where prompts may stand in addresses, with answers that take a second."""

from __future__ import annotations

from project.settings import *  # noqa: F403
from project.settings import STREAMSERVE as DEMO

STREAMSERVE = {**DEMO, "PROMPT_IN_URL": True, "ECHO_STEP_SECONDS": 0.005}
