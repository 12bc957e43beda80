"""Settings: the site of blocks_site.py, which keeps its users' conversations."""

from __future__ import annotations

from tests.support.sites.pages.blocks_site import *  # noqa: F403
from tests.support.sites.pages.blocks_site import STREAMSERVE as BLOCKS_SITE

STREAMSERVE = {**BLOCKS_SITE, "CONVERSATIONS": True, "TITLES": "words"}
