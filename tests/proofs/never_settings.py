"""Settings of tests/proofs/test_never_readers.py: the demo site as it is, its engine a process; nobody is cut off."""

from project.settings import *  # noqa: F403
from project.settings import STREAMSERVE as DEMO

STREAMSERVE = {**DEMO, "FLOW": {**DEMO["FLOW"], "STALL_SECONDS": 600, "VANISH_SECONDS": 0}}
