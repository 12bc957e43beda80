"""Settings: the demo site on two machines: a state folder each, one database and one Redis for both."""

from __future__ import annotations

import os
from pathlib import Path

from project.settings import *  # noqa: F403
from project.settings import DATABASES as OWN
from project.settings import STREAMSERVE as DEMO

SHARED = Path(os.environ["SHARED_FOLDER"])
SECRET_KEY = "the same on all machines"
DATABASES = {"default": {**OWN["default"], "NAME": SHARED / "site.sqlite3"}}
STREAMSERVE = {
    **DEMO,
    "LOG": os.environ["SHARED_REDIS"],
    "ECHO_STEP_SECONDS": 0.01,
    "LIMITS": {"MAX_STREAMS_PER_PRINCIPAL": 100},
}
