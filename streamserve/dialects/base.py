"""The seam between a log of events and the wire of a client: `Encoder`, a pure fold. No I/O, no clock.

An encoder is fed the log from seq 1, whatever the reader has already seen; the caller drops the output up to the
reader's cursor. `coalesce` is applied before, by delivery.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from streamserve.protocol.events import Farewell, LoggedEvent, Token


class Encoder(Protocol):
    """One reader's fold over the log.

    `first_bytes` are sent at once, before any event; `keepalive` after silence, only between events; b"" means the
    dialect has none. `encode` returns the frames of one event, b"" for an event this dialect does not show; the SSE
    `id:` line stands on the last frame of the event only. One that `takes_snapshots` can begin anywhere: it is given a
    `Snapshot` for what a reader far behind lacks, and not fed what its reader has. `farewell` is the last word to a
    reader when its stream is not over, and goes on elsewhere or nowhere; b"" where the missing end says enough.
    """

    content_type: str
    first_bytes: bytes
    keepalive: bytes
    takes_snapshots: bool

    def farewell(self, farewell: Farewell) -> bytes: ...

    def encode(self, logged: LoggedEvent) -> bytes: ...


def coalesce(events: Sequence[LoggedEvent], *, max_tokens: int | None = None) -> list[LoggedEvent]:
    """Join neighbouring `Token` events of one choice into one, which takes the last one's seq.

    `max_tokens` bounds how many token ids a joined event may hold.
    """
    out: list[LoggedEvent] = []
    for logged in events:
        joined = _join(out[-1], logged, max_tokens) if out else None
        if joined is None:
            out.append(logged)
        else:
            out[-1] = joined
    return out


def _join(left: LoggedEvent, right: LoggedEvent, max_tokens: int | None) -> LoggedEvent | None:
    a, b = left.event, right.event
    if not (isinstance(a, Token) and isinstance(b, Token)):
        return None
    if (a.choice, a.index) != (b.choice, b.index) or (a.logprobs is None) != (b.logprobs is None):
        return None
    if max_tokens is not None and len(a.token_ids) + len(b.token_ids) > max_tokens:
        return None
    logprobs = None if a.logprobs is None else a.logprobs + (b.logprobs or ())
    token = Token(
        text=a.text + b.text, token_ids=a.token_ids + b.token_ids, index=a.index, choice=a.choice, logprobs=logprobs
    )
    return LoggedEvent(seq=right.seq, event=token)
