"""Settings: the demo site with thresholds that its answers are beyond: first tokens, and how many readers leave."""

from __future__ import annotations

from tests.support.sites.pages.browser_site import *  # noqa: F403
from tests.support.sites.pages.browser_site import STREAMSERVE as BROWSER

STREAMSERVE = {
    **BROWSER,
    "ALERTS": {
        "FIRST_TOKEN_P95_SECONDS": 0.0002,
        "CANCEL_SHARE": 0.05,
        "TOKENS_PER_SECOND_P50": 0,
        "CACHE_HIT_SHARE": 0.0,
    },
}
