"""The seam between a log of events and the wire of a client: `Encoder`, a pure fold. No I/O, no clock.

An encoder is fed the log from seq 1, whatever the reader has already seen; the caller drops the output up to the
reader's cursor. `coalesce` is applied before, by delivery.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from streamserve.protocol.events import GoingAway, LoggedEvent, Token


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

    def farewell(self, farewell: GoingAway) -> bytes: ...

    def encode(self, logged: LoggedEvent) -> bytes: ...


def coalesce(events: Sequence[LoggedEvent], *, max_tokens: int | None = None) -> list[LoggedEvent]:
    """Join neighbouring `Token` events of one choice into one, which takes the last one's seq.

    `max_tokens` bounds how many token ids a joined event may hold.
    """
    out: list[LoggedEvent] = []
    run: list[Token] = []  # neighbours that become one
    num_tokens = last_seq = 0
    for seq, event in events:
        if not isinstance(event, Token):
            _close(run, last_seq, out)
            out.append(LoggedEvent(seq, event))
            continue
        num_more = len(event.token_ids)
        if run and not (_are_alike(run[0], event) and (max_tokens is None or num_tokens + num_more <= max_tokens)):
            _close(run, last_seq, out)
        num_tokens = num_more + (num_tokens if run else 0)
        run.append(event)
        last_seq = seq
    _close(run, last_seq, out)
    return out


def _are_alike(a: Token, b: Token) -> bool:
    return a.choice == b.choice and a.index == b.index and (a.logprobs is None) == (b.logprobs is None)


def _close(run: list[Token], seq: int, out: list[LoggedEvent]) -> None:
    """Put the run's tokens out as one event, and begin another."""
    if len(run) > 1:
        first = run[0]
        token = Token(
            text="".join([token.text for token in run]),
            token_ids=tuple([number for token in run for number in token.token_ids]),
            index=first.index,
            choice=first.choice,
            logprobs=None if first.logprobs is None else tuple(one for token in run for one in token.logprobs or ()),
        )
        out.append(LoggedEvent(seq, token))
    elif run:
        out.append(LoggedEvent(seq, run[0]))
    run.clear()
