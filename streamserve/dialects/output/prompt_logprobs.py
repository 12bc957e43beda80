"""The prompt's log-probabilities in the shape that vLLM has added to OpenAI's API, and which events have them.

    "prompt_logprobs": [null, {"464": {"logprob": -3.1, "rank": 2, "decoded_token": "The"}, "15": {…}}, …]

One entry for each token of the prompt: the token itself, and the likeliest ones at its place. (Source: vLLM,
`CompletionResponseChoice` and `Logprob`.) Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from streamserve.dialects.generate import conflict
from streamserve.protocol.events import LoggedEvent, Meta, PositionLogprobs, Token

FIELD = "prompt_logprobs"


def refuse_streamed(values: Mapping[str, Any]) -> None:
    """Raise BadRequest for a stream: the field belongs to a whole answer, as in vLLM."""
    if FIELD in values and values.get("stream", False):
        raise conflict(
            f"{FIELD} are not available in streams here; leave stream out, or ask POST /streams, which shows them.",
            FIELD,
        )


def is_of_prompt(token: Token, *, has_token_ids: bool) -> bool:
    """Return whether an event has log-probabilities of the prompt: it is of no sampled token."""
    return has_token_ids and bool(token.logprobs) and not token.token_ids


def without_prompt(events: Iterable[LoggedEvent]) -> tuple[list[LoggedEvent], list[PositionLogprobs]]:
    """Return the events of a whole answer without those of the prompt's log-probabilities, and these."""
    rest: list[LoggedEvent] = []
    found: list[PositionLogprobs] = []
    has_token_ids = True
    for logged in events:
        event = logged.event
        if isinstance(event, Meta):
            has_token_ids = event.has_token_ids
        if isinstance(event, Token) and is_of_prompt(event, has_token_ids=has_token_ids):
            found += event.logprobs or ()
        else:
            rest.append(logged)
    return rest, found


def prompt_logprobs_json(positions: Iterable[PositionLogprobs]) -> list[dict[str, Any] | None]:
    """Return the entries. Nothing precedes the first token, which has none."""
    return [None if one.chosen.logprob is None else _entry(one) for one in positions]


def _entry(position: PositionLogprobs) -> dict[str, Any]:
    """Return the token of the prompt first. Its rank is known where it is one of the likeliest, else it is null."""
    ranks = {one.token_id: rank for rank, one in enumerate(position.top, start=1)}
    found: dict[str, Any] = {}
    for one in (position.chosen, *position.top):
        known = {"logprob": one.as_json()["logprob"], "rank": ranks.get(one.token_id), "decoded_token": one.token}
        found.setdefault(str(one.token_id), known)
    return found
