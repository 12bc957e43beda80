"""`Interrupted`: all that a run which has ended in `interrupt` leaves for the run that continues it. Values; no I/O.

    run 1   answer ─ call ─ approval ─ done{interrupt}      keeps an `Interrupted`
    run 2                                 tool_result ─ answer ─ done      begins with it, and shows the rest

It holds the whole run so far, those before it too, so that it is enough by itself.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from streamserve.protocol.events import Approval, Event
from streamserve.protocol.frames import decode_event, encode_event
from streamserve.protocol.requests import NO_CALLER, GenerateRequest, decode_request, encode_request

Key = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """`calls` wait for their user's answers. `kept` and `shown` as in a `Memo`; of `request` the answers given so far.

    `at` is wall time.
    """

    request: GenerateRequest
    calls: tuple[Approval, ...]
    at: float
    kept: Mapping[Key, Mapping[str, Any]] = field(default_factory=dict)
    shown: Sequence[Event] = ()

    def entries(self) -> Iterator[str]:
        """Yield it as JSON texts, which `interrupted_of` reads. The last is its head: without that it is not whole."""
        for key, value in self.kept.items():
            yield json.dumps({"key": key, "value": value}, ensure_ascii=True)
        for event in self.shown:
            yield json.dumps({"shown": _text(event)})
        head = {"request": encode_request(self.request, NO_CALLER), "calls": [_text(call) for call in self.calls]}
        yield json.dumps({**head, "at": self.at}, ensure_ascii=True)


class Interrupts(Protocol):
    """Where interrupted runs are kept. Both methods may raise LogUnavailable."""

    async def keep(self, stream_id: str, interrupted: Interrupted) -> None:
        """Keep what the run of a stream leaves, before the stream ends."""

    async def find(self, stream_id: str) -> Interrupted | None:
        """Return what a run has left; None where there is nothing, or nothing any more.

        Raises UnmetNeeds for what a newer release has left.
        """


def interrupted_of(entries: Iterable[str]) -> Interrupted | None:
    """Return what `entries` has given; None where that is not whole. Raises UnmetNeeds, ValueError."""
    kept: dict[Key, Mapping[str, Any]] = {}
    shown: list[Event] = []
    for entry in map(json.loads, entries):
        if "key" in entry:
            kept[entry["key"][0], entry["key"][1]] = entry["value"]
        elif "shown" in entry:
            shown.append(_event(entry["shown"]))
        else:
            request, _ = decode_request(entry["request"], NO_CALLER)
            calls = tuple(call for text in entry["calls"] if isinstance(call := _event(text), Approval))
            return Interrupted(request=request, calls=calls, at=entry["at"], kept=kept, shown=shown)
    return None


def _text(event: Event) -> str:
    return base64.b64encode(encode_event(event)).decode()


def _event(text: str) -> Event:
    return decode_event(base64.b64decode(text))
