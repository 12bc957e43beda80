"""Settings: the site of jobs_site.py, with conversations, for web processes and engines that are killed."""

from __future__ import annotations

from tests.support.sites.jobs_site import *  # noqa: F403
from tests.support.sites.jobs_site import STREAMSERVE as JOBS_SITE

STREAMSERVE = {
    **JOBS_SITE,
    "CONVERSATIONS": True,
    "TITLES": "words",
    "LIMITS": {"MAX_STREAMS_PER_PRINCIPAL": 100},
    "STREAMS": {"RESUME_WINDOW_SECONDS": 8.0},
}
