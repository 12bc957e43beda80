"""The seam between a log of events and the wire of a client: `Encoder`, a pure fold. No I/O, no clock.

An encoder is fed the log from seq 1, whatever the reader has already seen; the caller drops the output up to the
reader's cursor. Delivery applies `coalesce` before. What several dialects need to fold is here too: which tokens are
text, what error an end without success is, and what a run of a pipeline shows beside its text (steps, citations, what
`trim` left out).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from streamserve.protocol.errors import StreamserveError, error_for
from streamserve.protocol.events import (
    SUCCESS_REASONS,
    TEXT,
    BlockStart,
    Citation,
    Done,
    Error,
    Event,
    GoingAway,
    LoggedEvent,
    Status,
    Token,
)
from streamserve.protocol.ids import event_id, frame_id


class Encoder(Protocol):
    """One reader's fold over the log.

    `first_bytes` are sent at once, before any event; `keepalive` after silence, only between events; b"" means the
    dialect has none. `keepalive_event` is a keepalive that page scripts can see. `encode` returns the frames of one
    event, b"" for an event this dialect does not show; the last of them has the event's id (see `FrameIds` for those
    before it). One that `takes_snapshots` can begin anywhere: it is given a `Snapshot` for what a reader far behind
    lacks, and not fed what its reader has. `going_away` returns the last bytes for a reader whose stream is not over
    when its server stops; b"" where the missing end is enough.
    """

    content_type: str
    first_bytes: bytes
    keepalive: bytes

    @property
    def keepalive_event(self) -> bytes: ...

    takes_snapshots: bool

    def going_away(self, notice: GoingAway) -> bytes: ...

    def encode(self, logged: LoggedEvent) -> bytes: ...


T = TypeVar("T")


class FrameIds:
    """The ids of the frames of a dialect that shows one event in several: each is a place to resume from.

        event 4        ──►  id: log-4
        events 5 to 9  ──►  id: log-4:c1   role       the first frame after event 4
                            id: log-9      content    event 9, and with it the joined events before it

    Invariant: the frames before an event's last one are the same however its tokens are joined, so that a reader that
    resumes with `num_seen` of them lacks exactly the others. The last one is never left out.
    """

    def __init__(self, log_id: str, dialect: str, *, after: int = 0, num_seen: int = 0) -> None:
        self._log_id, self._dialect = log_id, dialect
        self._seq = 0  # of the event before
        self._after, self._num_seen = after, num_seen

    def of(self, seq: int, frames: Sequence[T]) -> list[tuple[T, str | None]]:
        """Return the frames of an event that the reader lacks, with their ids; seq 0 is of no event in the log."""
        if not seq:
            return [(one, None) for one in frames]
        before, self._seq = self._seq, seq
        if not frames:
            return []
        num_left_out = 0
        if self._num_seen and seq > self._after:
            num_left_out, self._num_seen = min(self._num_seen, len(frames) - 1), 0
        ids: list[str | None] = [
            frame_id(self._log_id, before, self._dialect, number) for number in range(1, len(frames))
        ]
        return list(zip(frames, [*ids, event_id(self._log_id, seq)], strict=True))[num_left_out:]


class TextBlocks:
    """A fold: which tokens are the answer's text. Those of thinking and tool_use blocks are not."""

    def __init__(self) -> None:
        self._others: set[tuple[int, int]] = set()  # (choice, index) of the blocks that are not text

    def note(self, block: BlockStart) -> None:
        """Take the kind of a block that begins."""
        if block.kind != TEXT:
            self._others.add((block.choice, block.index))

    def __contains__(self, token: Token) -> bool:
        return not self._others or (token.choice, token.index) not in self._others


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The error that a terminal event without success is, in dialects that have one word for it."""

    code: str
    message: str
    retryable: bool = False

    def error(self) -> StreamserveError:
        """Return it as an error, with the status of its code."""
        return error_for(self.code, self.message, retryable=self.retryable)


# `cancelled` and `abandoned` are finish reasons that no other dialect has. There they are errors with these codes: a
# client that took them for success would keep half an answer as a whole one.
_ENDING_MESSAGES = {
    "cancelled": "The stream was stopped before the answer was complete.",
    "abandoned": "The stream ended because it had no reader for too long.",
}
# For dialects that cannot ask their reader to connect again: only a whole answer ends without an error.
GOING_DOWN = Error(code="engine_unavailable", message="The server is shutting down.", retryable=True)


def ending(event: Event) -> Ending | None:
    """Return the error that a terminal event stands for, None after success."""
    if isinstance(event, Error):
        return Ending(code=event.code, message=event.message, retryable=event.retryable)
    if isinstance(event, Done) and event.finish_reason not in SUCCESS_REASONS:
        message = _ENDING_MESSAGES.get(event.finish_reason, "The stream ended early.")
        return Ending(code=event.finish_reason, message=message)
    return None


def successful(event: Event) -> Done:
    """Return a terminal event of success; raise the error that any other one stands for."""
    end = ending(event)
    if end is not None:
        raise end.error()
    assert isinstance(event, Done)
    return event


def coalesce(events: Sequence[LoggedEvent], *, max_tokens: int | None = None) -> list[LoggedEvent]:
    """Join neighbouring `Token` events of one block into one, which takes the last one's seq.

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
    is_of_prompt = not a.token_ids  # kept apart from the answer
    if is_of_prompt and a.logprobs and not a.text:  # each choice of a text completion shows it in a frame of its own
        return False
    return (
        a.choice == b.choice
        and a.index == b.index
        and (a.logprobs is None) == (b.logprobs is None)
        and is_of_prompt == (not b.token_ids)
    )


def _close(run: list[Token], seq: int, out: list[LoggedEvent]) -> None:
    """Append the run's tokens to `out` as one event, and empty the run."""
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


# The statuses of a run: a step begins; `trim` has left something out.
STEP, TRIMMED = "step", "trimmed"


def is_outline(event: Event) -> bool:
    """Return whether an event is of the run's outline: a step or a citation."""
    return isinstance(event, Citation) or (isinstance(event, Status) and event.status in (STEP, TRIMMED))


def outline_json(outline: Iterable[Citation | Status]) -> dict[str, list[dict[str, Any]]]:
    """Return steps and citations, each in order."""
    events = list(outline)
    return {
        "steps": [event.payload() for event in events if isinstance(event, Status)],
        "citations": [event.payload() for event in events if isinstance(event, Citation)],
    }


def trimmed_of(outline: Iterable[Citation | Status]) -> list[dict[str, Any]]:
    """Return what was cut of the contexts: passages kept, of how many, and the sentence that readers saw."""
    cut = (event for event in outline if isinstance(event, Status) and event.status == TRIMMED)
    return [{"kept": event.step, "of": event.of, "message": event.message} for event in cut]


def run_json(events: Iterable[LoggedEvent], *, stream_id: str, pipeline: str, created: int) -> dict[str, Any]:
    """Return id, text, steps, citations, and what `done` says. Raises the error that the run ended with."""
    text: list[str] = []
    outline: list[Citation | Status] = []
    blocks, out = TextBlocks(), {"id": stream_id, "pipeline": pipeline, "created": created}
    for _, event in events:
        if isinstance(event, BlockStart):
            blocks.note(event)
        elif isinstance(event, Token) and event in blocks:
            text.append(event.text)
        elif isinstance(event, Citation | Status) and is_outline(event):
            outline.append(event)
        failed = ending(event)
        if failed is not None:
            raise error_for(failed.code, failed.message, retryable=failed.retryable)
        if isinstance(event, Done):
            trimmed = trimmed_of(outline)
            out |= {"meta": {"trimmed": trimmed}} if trimmed else {}
            out |= {"text": "".join(text), **outline_json(outline), **event.payload()}
    return out
