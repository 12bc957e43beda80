"""The seam between a log of events and the wire of a client: `Encoder`. Pure: no I/O, no clock.

An encoder is fed the log from seq 1, whatever the reader has already seen; the caller drops the output up to the
reader's cursor. Delivery applies `coalesce` before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from streamserve.dialects.fold import GOING_DOWN, Fold, Piece
from streamserve.protocol.events import GoingAway, LoggedEvent, Token
from streamserve.protocol.ids import event_id, frame_id, num_frames_seen, parse_event_id
from streamserve.protocol.sse import CONTENT_TYPE, FIRST_BYTES, KEEPALIVE, frame


class Encoder(Protocol):
    """One reader's view of a log.

    `first_bytes` are sent at once, before any event; `keepalive` after silence, only between events; b"" means the
    dialect has no such bytes. `keepalive_event` is a keepalive that page scripts can see. `encode` returns the frames
    of one event, b"" for an event this dialect does not show; the last of them has the event's id (see `FrameIds` for
    those before it). An encoder that `takes_snapshots` can begin anywhere: it is given a `Snapshot` for what a reader
    far behind lacks, and not fed what its reader has. An encoder that has `encode_all`, too, can begin
    anywhere: it is given the events of a frame together. `going_away` returns the last bytes for a reader whose stream
    is not over when its server stops; b"" where the missing end is enough.
    """

    content_type: str
    first_bytes: bytes
    keepalive: bytes

    @property
    def keepalive_event(self) -> bytes: ...

    takes_snapshots: bool

    def going_away(self, notice: GoingAway) -> bytes: ...

    def encode(self, logged: LoggedEvent) -> bytes: ...


class Frame(NamedTuple):
    """One SSE frame: its data, one line, and the name on its `event:` line if it has a name."""

    data: str
    event: str | None = None


class FrameIds:
    """The ids of the frames of a dialect that shows an event in several: each is a place to resume from.

        event 4        ──►  id: log-4
        events 5 to 9  ──►  id: log-4:c1   role       the first frame after event 4
                            id: log-9      content    event 9, and with it the joined events before it

    Invariant: the frames before an event's last frame are the same however its tokens are joined, so that a reader that
    resumes with `num_seen` of them lacks exactly the other frames. The last frame is never left out.

    `last_id` is the id of the last frame that the reader has. Without a `log_id` no frame has an id.
    """

    def __init__(self, log_id: str, dialect: str, last_id: str = "") -> None:
        self._log_id, self._dialect = log_id, dialect
        self._seq = 0  # of the event before
        self._after = (parse_event_id(last_id) or ("", 0))[1]
        self._num_seen = num_frames_seen(last_id, dialect)

    def of(self, seq: int, frames: Sequence[Frame]) -> list[tuple[Frame, str | None]]:
        """Return the frames of an event that the reader lacks, with their ids; seq 0 is of no event in the log."""
        if not seq or not self._log_id:
            return [(one, None) for one in frames]
        before, self._seq = self._seq, seq
        if not frames:
            return []
        num_left_out = 0
        if self._num_seen and seq > self._after:
            num_left_out, self._num_seen = min(self._num_seen, len(frames) - 1), 0
        out: list[tuple[Frame, str | None]] = [(frames[-1], event_id(self._log_id, seq))]
        if len(frames) > 1:
            ids = [frame_id(self._log_id, before, self._dialect, number) for number in range(1, len(frames))]
            out = [*zip(frames, ids, strict=False), *out]
        return out[num_left_out:] if num_left_out else out


class PieceEncoder:
    """An `Encoder` of a dialect that shows pieces: the dialect's method `show` makes each piece's frames.

    Invariant: `show` gives the same frames before a `Delta`'s last frame however tokens are joined; see `FrameIds`.
    """

    content_type = CONTENT_TYPE
    first_bytes = FIRST_BYTES
    keepalive = KEEPALIVE
    takes_snapshots = False

    def __init__(self, ids: FrameIds, *, n: int = 1) -> None:
        self.fold = Fold(n)
        self._ids = ids

    def show(self, piece: Piece) -> Sequence[Frame]:
        """Return the frames of a piece; none for a piece that the dialect does not show."""
        raise NotImplementedError

    def encode(self, logged: LoggedEvent) -> bytes:
        """Return the event's frames, each with its id."""
        frames = [one for piece in self.fold.feed(logged.event) for one in self.show(piece)]
        return b"".join([frame(data, event=name, id=id) for (data, name), id in self._ids.of(logged.seq, frames)])

    def going_away(self, notice: GoingAway) -> bytes:
        """Return an error: clients take a clean end for a whole answer. The ids before it resume."""
        return b"".join(frame(one.data, event=one.event) for one in self.show(GOING_DOWN))


def coalesce(events: Sequence[LoggedEvent], *, max_tokens: int | None = None) -> list[LoggedEvent]:
    """Join neighbouring `Token` events of one block into one event, which takes the last event's seq.

    `max_tokens` bounds how many token ids a joined event may hold.
    """
    out: list[LoggedEvent] = []
    run: list[Token] = []  # neighbours that become one event
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
