"""Settings: the site of jobs_site.py, with every front end on."""

from __future__ import annotations

from tests.support.sites.jobs_site import *  # noqa: F403
from tests.support.sites.jobs_site import STREAMSERVE as JOBS_SITE

STREAMSERVE = {**JOBS_SITE, "MCP_ENDPOINT": True, "LIMITS": {"MAX_STREAMS_PER_PRINCIPAL": 100}}
