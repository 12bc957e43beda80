"""The demo site with an embedding model without weights, for the live page."""

from project.settings import *  # noqa: F403
from project.settings import STREAMSERVE as OF_DEMO

STREAMSERVE = {**OF_DEMO, "EMBEDDING_MODELS": {"search": {"PATH": "echo"}}}
