"""Settings: the demo site with limits over time of every kind, on SQLite or, at COUNTED_POSTGRES, PostgreSQL."""

from __future__ import annotations

import os

from project.settings import *  # noqa: F403
from project.settings import STREAMSERVE as DEMO
from tests.support.sites.databases import postgres_at

STREAMSERVE = {
    **DEMO,
    "RATES": {
        "owner": {"REQUESTS_PER_MINUTE": 40, "TOKENS_PER_MINUTE": 400, "TOKENS_PER_DAY": 2_000},
        "key": {"TOKENS_PER_MINUTE": 350, "WEIGHT": 0.5},
        "tenant": {"REQUESTS_PER_MINUTE": 70, "TOKENS_PER_MINUTE": 700},
        "address": {"TOKENS_PER_MINUTE": 500, "TOKENS_PER_DAY": 1_500},
        "site": {"REQUESTS_PER_MINUTE": 10**6, "TOKENS_PER_MINUTE": 10**8, "TOKENS_PER_DAY": 10**9},
    },
}
if os.environ.get("COUNTED_POSTGRES"):
    DATABASES = postgres_at(os.environ["COUNTED_POSTGRES"])
