"""Parts of an answer in the shapes of the OpenAI API: `prompt_logprobs`, which vLLM has added to it, and `annotations`.

    "prompt_logprobs": [null, {"464": {"logprob": -3.1, "rank": 2, "decoded_token": "The"}, "15": {…}}, …]

One entry for each token of the prompt: the token itself, and the likeliest ones at its place. (Source: vLLM,
`CompletionResponseChoice` and `Logprob`.)

Citations of the log are annotations as the chat API's types have them (openai 3.52, `AnnotationURLCitation`). That type
requires a title and a place in the content. A citation without a title shows its source; one of the answer as a whole
shows an empty place: where the content was when it was cited. Citations without a url have no such form. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from streamserve.dialects.fields import conflict
from streamserve.protocol.events import TEXT, BlockStart, Citation, LoggedEvent, Meta, PositionLogprobs, Token

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


class Annotations:
    """A fold: what each choice has cited so far, and where each of its text blocks begins in its content."""

    def __init__(self, n: int) -> None:
        # The record of a finished stream does not have `n`: a replay meets further choices.
        self._num_chars = dict.fromkeys(range(n), 0)
        self._begins: dict[tuple[int, int], int] = {}  # (choice, index) of the text blocks that have a start
        self._num_shown: Counter[int] = Counter()

    def note(self, event: BlockStart | Token, kind: str) -> None:
        """Take an event of a block of that kind."""
        if isinstance(event, BlockStart):
            self._begins[event.choice, event.index] = self._num_chars.get(event.choice, 0) if kind == TEXT else -1
        elif kind == TEXT:
            self._num_chars[event.choice] = self._num_chars.get(event.choice, 0) + len(event.text)

    def of(self, citation: Citation) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield each choice that shows it, with its annotation.

        `index` is its number there: the official client joins deltas by it.
        """
        if citation.url is None:
            return
        choices = tuple(self._num_chars) if citation.choice is None else (citation.choice,)
        for choice in choices:
            start, end = self._place(choice, citation)
            place = {"start_index": start, "end_index": end}
            cited = {"url": citation.url, "title": citation.title or citation.source, **place}
            yield choice, {"index": self._num_shown[choice], "type": "url_citation", "url_citation": cited}
            self._num_shown[choice] += 1

    def _place(self, choice: int, citation: Citation) -> tuple[int, int]:
        """Return where in the content the cited characters are."""
        index = citation.index or 0
        begin = self._begins.get((choice, index), -1 if index else 0)
        if citation.start is None or citation.end is None or begin < 0:
            num_chars = self._num_chars.get(choice, 0)
            return num_chars, num_chars
        return begin + citation.start, begin + citation.end
