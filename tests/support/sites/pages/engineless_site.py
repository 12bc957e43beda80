"""Settings: the tests' site in production: no DEBUG, an engine process that nothing starts. DATABASE, STATE: paths."""

from __future__ import annotations

import os

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES

DATABASES = {"default": {**DATABASES["default"], "NAME": os.environ["DATABASE"]}}
STREAMSERVE = {"MODELS": {"chat": {"PATH": "echo"}}, "STATE_DIR": os.environ["STATE"]}
