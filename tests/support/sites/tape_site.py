"""Settings: the demo site with a slow echo engine and the pipeline of tape_app, for clients of Durable Streams."""

from __future__ import annotations

from project.settings import *  # noqa: F403
from project.settings import INSTALLED_APPS as DEMO_APPS
from project.settings import STREAMSERVE as DEMO

INSTALLED_APPS = [*DEMO_APPS, "tests.support.sites.tape_app"]
STREAMSERVE = {
    **DEMO,
    "MODELS": {"echo": {"PATH": "echo", "ANSWERS": None}},
    "ECHO_STEP_SECONDS": 0.02,
    "LIMITS": {"MAX_STREAMS_PER_PRINCIPAL": 1000},
}
