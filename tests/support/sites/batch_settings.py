"""Settings: the demo site with the echo engine and the demo model, for batches.

POSTGRES names a port, and LIMITS has limits as JSON.
"""

from __future__ import annotations

import json
import os

from project.settings import *  # noqa: F403
from project.settings import HELPDESK, INSTALLED_APPS
from project.settings import STREAMSERVE as DEMO
from tests.support.sites.databases import postgres_at

INSTALLED_APPS = [*INSTALLED_APPS, "tests.support.sites.batch_app"]
ENGINE = {"NUM_BLOCKS": 512, "MAX_NUM_SEQS": 16}
STREAMSERVE = {
    **DEMO,
    "MODELS": {
        "echo": {"PATH": "echo", "ANSWERS": None, "ENGINE": ENGINE},
        "helpdesk": {"PATH": str(HELPDESK), "NUM_THREADS": 1, "ENGINE": ENGINE},
    },
    "ECHO_STEP_SECONDS": float(os.environ.get("STEP_SECONDS", "0")),
    "ANONYMOUS": False,
    "BATCHES": {"CONCURRENCY": 8},
    "JOBS": {"EMBEDDED": False},
    "LIMITS": {**DEMO.get("LIMITS", {}), **json.loads(os.environ.get("LIMITS", "{}"))},
}
if os.environ.get("POSTGRES"):
    DATABASES = postgres_at(os.environ["POSTGRES"], "streamserve")
