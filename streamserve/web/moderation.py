"""`SiteModerator`: the function that MODERATION names, called with texts; docs/moderations.md shows it.

It is synchronous, on a thread for functions of the site, or async, on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import iscoroutinefunction
from typing import Any

from django.utils.module_loading import import_string

from streamserve.api.logs import get_logger
from streamserve.protocol.errors import RuleFailed, StreamserveError
from streamserve.rows import orm

log = get_logger(__name__)

_RETRY_AFTER = 5


class SiteModerator:
    """See `Moderator` in api/openai/moderations.py. `path`: the function's dotted path, imported when it is needed."""

    def __init__(self, path: str) -> None:
        self._path = path

    async def scores_of(self, texts: Sequence[str]) -> Sequence[Mapping[str, float]]:
        try:
            function: Callable[[list[str]], Any] = import_string(self._path)
            asked = list(texts)
            given = await function(asked) if iscoroutinefunction(function) else await orm.of_site(function, asked)
            return _checked(given, len(asked))
        except StreamserveError:
            raise
        except Exception as error:
            log.exception("moderation_failed", function=self._path)
            message = "The site cannot moderate texts now: its log has the cause."
            raise RuleFailed(message, retry_after=_RETRY_AFTER) from error


def _checked(given: Any, num: int) -> list[dict[str, float]]:
    """Return the scores as numbers of 0 to 1. Raises TypeError, ValueError."""
    found = [{str(name): float(score) for name, score in one.items()} for one in given]
    if len(found) != num:
        raise ValueError(f"{num} texts have {len(found)} results")
    for name, score in (pair for one in found for pair in one.items()):
        if not 0.0 <= score <= 1.0:
            raise ValueError(f"the score of {name!r} is {score}; it is 0 to 1")
    return found
