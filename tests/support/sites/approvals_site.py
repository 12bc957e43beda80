"""Settings: the site of jobs_site.py with a model that calls a tool, and the pipeline of approvals_app."""

from __future__ import annotations

from tests.support.sites.jobs_site import *  # noqa: F403
from tests.support.sites.jobs_site import INSTALLED_APPS as JOBS_APPS
from tests.support.sites.jobs_site import STREAMSERVE as JOBS_SITE

CALL = '<tool_call>\n{"name": "pay", "arguments": {"euros": 5}}\n</tool_call>'
ANSWERS = {"Paid": "It is paid.", "please pay": f"I pay. {CALL}"}
INSTALLED_APPS = [*JOBS_APPS, "tests.support.sites.approvals_app"]
STREAMSERVE = {
    **JOBS_SITE,
    "MODELS": {"echo": {"PATH": "echo", "FORMAT": "qwen3", "ANSWERS": ANSWERS}},
    "DEFAULT_MODEL": "echo",
}
