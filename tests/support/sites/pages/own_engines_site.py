"""Settings: the demo site with an echo engine in each web process, and one log for all of them."""

from __future__ import annotations

import os

from project.settings import *  # noqa: F403
from project.settings import STREAMSERVE as DEMO

STREAMSERVE = {**DEMO, "CLIENT": "thread", "FLOW": {"DRAIN_SECONDS": float(os.environ["DRAIN_SECONDS"])}}
