"""Settings of tests/support/sites/users_site.py: the demo site with its engine in the web process."""

from __future__ import annotations

from project.settings import *  # noqa: F403
from project.settings import STREAMSERVE as DEMO

ROOT_URLCONF = "tests.support.sites.users_site"
FLOW = {**DEMO["FLOW"], "STALL_SECONDS": 600}  # a stalled reader is not cut off
STREAMSERVE = {
    **DEMO,
    "CLIENT": "thread",
    "LIMITS": {"MAX_STREAMS_PER_PRINCIPAL": 100},
    "FLOW": FLOW,
    "PROMPT_IN_URL": True,
}
