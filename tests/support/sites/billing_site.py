"""Settings: the site of two workers with an app that bills answers, on SQLite or, at BILLS_POSTGRES, PostgreSQL.

A key has BILLS_TOKENS_PER_MINUTE. The site's window of a day is never full, so that it has the sum of all.
"""

from __future__ import annotations

import os

from tests.support.sites.databases import postgres_at
from tests.support.sites.workers.two_workers_site import *  # noqa: F403
from tests.support.sites.workers.two_workers_site import INSTALLED_APPS as OF_THE_DEMO
from tests.support.sites.workers.two_workers_site import STREAMSERVE as TWO_WORKERS

INSTALLED_APPS = [*OF_THE_DEMO, "tests.support.sites.billing"]
STREAMSERVE = {
    **TWO_WORKERS,
    "STREAMS": {"RESUME_WINDOW_SECONDS": 4},
    "ENGINE_PROCESS": {"MAX_FAILURES": 10_000},  # it is killed all the time
    "RATES": {
        "key": {"TOKENS_PER_MINUTE": int(os.environ["BILLS_TOKENS_PER_MINUTE"])},
        "site": {"TOKENS_PER_DAY": 10**9},
    },
}
if os.environ.get("BILLS_POSTGRES"):
    DATABASES = postgres_at(os.environ["BILLS_POSTGRES"])
