"""`CallerRules`: what a site decides about a caller: which models are hidden from it, and the team it is counted in."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from streamserve.api.call import Caller


class CallerRules(Protocol):
    """Raises Refused where a rule of the site fails: nothing is served by a guess."""

    async def hidden_from(self, caller: Caller) -> Collection[str]:
        """Return the models and pipelines that the caller may not use: to it they do not exist."""

    async def team_of(self, caller: Caller) -> str:
        """Return the team whose prefix cache, share of the engine and limits the caller has; "": its own."""


class NoRules:
    """Every caller may use every model, and is in no team."""

    async def hidden_from(self, caller: Caller) -> Collection[str]:
        return ()

    async def team_of(self, caller: Caller) -> str:
        return ""
