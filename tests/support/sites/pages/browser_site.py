"""Settings: the demo site with answers that take some seconds and are short enough for a browser to draw quickly.

Users keep their conversations in the browser there, as visitors do; conversations_site.py has the server keep them.
"""

from __future__ import annotations

from project.settings import *  # noqa: F403
from project.settings import STREAMSERVE as DEMO

STREAMSERVE = {**DEMO, "CONVERSATIONS": False, "ECHO_STEP_SECONDS": 0.003, "ENGINE": {"DEFAULT_MAX_TOKENS": 1200}}
