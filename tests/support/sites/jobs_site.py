"""Settings: the demo site with a slow echo engine and the pipeline of jobs_app, for workers that are killed.

The environment may name the port of a PostgreSQL (JOBS_POSTGRES).
"""

from __future__ import annotations

import os

from project.settings import *  # noqa: F403
from project.settings import DATABASES as DEMO_DATABASES
from project.settings import INSTALLED_APPS as DEMO_APPS
from project.settings import STREAMSERVE as DEMO
from tests.support.sites.databases import postgres_at

INSTALLED_APPS = [*DEMO_APPS, "tests.support.sites.jobs_app"]
DATABASES = DEMO_DATABASES
if os.environ.get("JOBS_POSTGRES"):
    DATABASES = postgres_at(os.environ["JOBS_POSTGRES"])
STREAMSERVE = {
    **DEMO,
    "ECHO_STEP_SECONDS": 0.02,
    "JOBS": {"MAX_ATTEMPTS": 1000, "RETRY_SECONDS": 0.1, "GRACE_SECONDS": 1.0},
}
