"""`Trace`: when the newest tokens of an answer were where, as far as the web process that makes it can tell.

    left      the engine's process sent the token
    came      this process had it
    logged    it was committed to the log: now readers may see it
    written   its frame was written to the reader's socket

A watcher of the stream: it is called at each commit, after the reader. Event loop of that process.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from streamserve.clients.base import Generation
from streamserve.streams.readers import Attachment
from streamserve.streams.stream import Stream

KEPT = 24  # tokens; between two reports come fewer, or the page misses some


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """A token's times, on the monotonic clock. `step_seconds`: since the engine sent the token before.

    `left` is None, and so is the step, where no engine process of this machine makes the answer.
    """

    seq: int
    left: float | None
    came: float
    logged: float
    written: float
    step_seconds: float | None


class Trace(Attachment):
    """See above. `begin` again at each report: the engine, or the reader's connection, may be another one."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(is_watcher=True, is_paced=False, transport="lab")
        self._stream, self._seq = stream, stream.last_seq
        self._generation: Generation | None = None
        self._came_at: float | None = None
        self._left_before: float | None = None
        self.tokens: deque[Moments] = deque(maxlen=KEPT)

    def begin(self) -> None:
        """Stand behind the reader, and listen to the engine."""
        stream = self._stream
        if stream.readers.attached[-1:] != (self,):
            stream.detach(self)
            stream.attach(self)
        generation = stream.engine.generation
        if generation is None or generation is self._generation or generation.on_news is None:
            return
        mark = generation.on_news

        def heard() -> None:
            self._came_at = time.monotonic()
            mark()

        generation.on_news, self._generation = heard, generation
        self._came_at = self._left_before = None

    def end(self) -> None:
        """Read no more."""
        self._stream.detach(self)

    def go_away(self) -> None:
        self.end()

    def advance(self) -> None:
        """Note the events that this commit has brought, if the reader's frame has left with it."""
        stream, generation = self._stream, self._generation
        if stream.terminal is not None or stream.ended.is_set():
            self.end()
            return
        before, self._seq = self._seq, stream.last_seq
        if generation is None or generation is not stream.engine.generation or self._seq == before:
            return
        left, came, logged = generation.sent_at, self._came_at, stream.transcript.timings.last_at
        step_seconds = None if left is None or self._left_before is None else left - self._left_before
        self._left_before = left
        reader = next((one for one in stream.readers.attached if not one.is_watcher), None)
        is_written = getattr(reader, "sent_seq", 0) >= self._seq
        # Joined with other tokens, a token leaves later: its step is not known, nor when it was written.
        if came is None or logged is None or not is_written or self._seq != before + 1:
            return
        self.tokens.append(
            Moments(
                seq=self._seq, left=left, came=came, logged=logged, written=time.monotonic(), step_seconds=step_seconds
            )
        )

    def report(self) -> list[dict[str, Any]]:
        """Return the tokens with their times on the wall clock, in milliseconds, which the browser has too."""
        offset = max(time.time() - time.monotonic() for _ in range(3))  # a look that was interrupted gives less
        return [
            {
                "seq": token.seq,
                "step": None if token.step_seconds is None else 1000 * token.step_seconds,
                "left": None if token.left is None else 1000 * (token.left + offset),
                **{name: 1000 * (getattr(token, name) + offset) for name in ("came", "logged", "written")},
            }
            for token in self.tokens
        ]
