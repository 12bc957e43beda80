"""Settings: two_workers_site, but a worker that shuts down gives answers one second."""

from __future__ import annotations

from tests.support.sites.workers.two_workers_site import *  # noqa: F403
from tests.support.sites.workers.two_workers_site import STREAMSERVE as SLOW

STREAMSERVE = {**SLOW, "FLOW": {"DRAIN_SECONDS": 1}}
