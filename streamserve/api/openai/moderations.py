"""The endpoint of `/v1/moderations`: the verdict of the site's own function. asyncio; framework-free."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from streamserve.api.answers import Answers
from streamserve.api.call import Call, Reply, json_reply
from streamserve.dialects.openai import moderations as dialect
from streamserve.dialects.openai.moderations import Scores
from streamserve.protocol.errors import NotFound
from streamserve.tracing.answers import MODERATION


class Moderator(Protocol):
    """The site's function. Raises RuleFailed where it fails: nothing is let through by a guess."""

    def scores_of(self, texts: Sequence[str]) -> Coroutine[Any, Any, Sequence[Scores]]:
        """Return the scores of each text."""


async def moderations(call: Call, answers: Answers, moderator: Moderator) -> Reply:
    """POST /v1/moderations: whether texts are harmful, by the site's own function (`MODERATION`)."""
    asked = dialect.parse(await call.json(answers.limits), answers.limits)
    with answers.recorded(MODERATION, asked.model, call.trace, call.received_at):
        scores = await call.wait(moderator.scores_of(asked.texts))
    return json_reply(dialect.moderations_json(scores, model=asked.model))


def moderation_off() -> NotFound:
    """Return the error of a site without such a function."""
    message = "This site moderates no texts: MODERATION in STREAMSERVE names the function that does."
    return NotFound(message, code="moderation_off")
