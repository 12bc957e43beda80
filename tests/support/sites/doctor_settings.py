"""Settings: the tests' site with a slow echo engine and short silences, on the database named by the environment."""

from __future__ import annotations

import os

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES

DATABASES = {"default": {**DATABASES["default"], "NAME": os.environ.get("DOCTOR_DATABASE", "")}}
STREAMSERVE = {
    "TESTING": True,
    "ECHO_STEP_SECONDS": 0.01,
    "STREAMS": {"KEEPALIVE_SECONDS": 2.0},
}
