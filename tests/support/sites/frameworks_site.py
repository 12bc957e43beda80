"""Settings: the demo site with a slow echo engine and the agents of frameworks_app, for workers that are killed."""

from __future__ import annotations

from tests.support.sites.jobs_site import *  # noqa: F403
from tests.support.sites.jobs_site import DEMO_APPS

INSTALLED_APPS = [*DEMO_APPS, "tests.support.sites.frameworks_app"]
