"""What an engine says of one request: `Accepted` when it takes it, `Park` when it ends it early. Values only."""

from __future__ import annotations

from dataclasses import dataclass

# An answer whose step has ended its engine so often, without a new token in between, is a suspect: its next steps hold
# nothing else, so that the next loss shows whether it was the cause.
SUSPECT_LOSSES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What acceptance fixes: sizes, the seed and the clamped max_tokens. Cached tokens are known at first schedule.

    `has_token_ids` False: a server elsewhere makes the answer, and gives its text without ids.
    `needs`: what a release that continues the answer has to know, beside the request's own.
    """

    num_prompt_tokens: int
    max_tokens: int
    seed: int
    queue_position: int = 0
    has_token_ids: bool = True
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Park:
    """The engine has ended a sequence early and freed it; a request with the tokens so far continues it. When to ask:

    - "lead": its reader is too far behind: when no more than `resume_at_lead` tokens are unread
    - "ahead": its reader has enough to read, and another sequence needed the room: after `resume_seconds`
    - "paused": an operator paused the engine; "lost": the engine is gone: at once, and again until it is accepted

    Of a lost engine: `is_counted` is False where it ended in good order, or in a step that did not hold this answer;
    `was_alone` is True where that step held this answer only.
    """

    reason: str
    resume_at_lead: int = 0
    resume_seconds: float = 0.0
    is_counted: bool = True
    was_alone: bool = False
