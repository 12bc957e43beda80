"""Settings: a site that serves every route, with the echo engine in its process, for readers of its /openapi.json."""

from __future__ import annotations

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS as TESTED_APPS

INSTALLED_APPS = [*TESTED_APPS, "tests.support.sites.openapi_app"]
STREAMSERVE = {
    "TESTING": True,
    "MODELS": {"echo": {"PATH": "echo", "ANSWERS": {}}},  # it repeats the question
    "EMBEDDING_MODELS": {"search": {"PATH": "echo"}},
    "CONVERSATIONS": True,
    "SHARE_LINKS": True,
    "STORE": True,
    "USAGE": True,
    "MCP_ENDPOINT": True,
    "PROMPT_IN_URL": True,
    "MODERATION": "tests.support.sites.openapi_site.scores_of",
    "LIMITS": {"MAX_STREAMS_PER_PRINCIPAL": 1000},
}


async def scores_of(texts: list[str]) -> list[dict[str, float]]:
    """Find nothing wrong with any text."""
    return [{} for _ in texts]
