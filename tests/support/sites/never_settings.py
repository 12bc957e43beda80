"""Settings of tests/proofs/memory/test_never_readers.py: the demo site, its engine a process, no reader cut off."""

from project.settings import *  # noqa: F403
from project.settings import STREAMSERVE as DEMO

STREAMSERVE = {**DEMO, "PROMPT_IN_URL": True, "FLOW": {**DEMO["FLOW"], "STALL_SECONDS": 600, "VANISH_SECONDS": 0}}
