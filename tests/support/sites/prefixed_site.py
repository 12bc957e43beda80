"""Settings: the demo site with streamserve's routes under "ai/" and, from SCRIPT_NAME, a script name."""

from __future__ import annotations

import os

from project.settings import *  # noqa: F403
from project.settings import STREAMSERVE as DEMO

ROOT_URLCONF = "tests.site.prefixed_urls"
FORCE_SCRIPT_NAME = os.environ.get("SCRIPT_NAME") or None
ALLOWED_HOSTS = ["127.0.0.1"]
STREAMSERVE = {**DEMO, "CLIENT": "thread"}
