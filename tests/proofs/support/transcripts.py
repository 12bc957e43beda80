"""The events of a stream's reader, over `follow` or as server-sent events, checked one by one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from streamserve.dialects.native import NativeEncoder
from streamserve.protocol.events import Token
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.follow import follow
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.proofs.support.pairs import Answer, ReceivedChoice
from tests.support.checks.sse_reader import read_events

# A number in the log, the event's name, and its data: the same over each transport.
Shown = tuple[int, str, dict[str, Any]]


async def over_sse(streams: Streams, stream: Stream, after: int) -> AsyncIterator[Shown]:
    """Read the bytes of a response, as a browser does."""
    delivery = Delivery(streams, stream, NativeEncoder(stream.log_id), after=after)
    async with aclosing(aiter(delivery)) as frames:
        async for frame in frames:
            for read in read_events(frame):
                data = json.loads(read.data)
                if read.event == "meta" and "latency" in data:
                    continue  # it is made from the `done` behind it, and is not in the log
                log_id, _, seq = read.id.rpartition("-")
                assert log_id == stream.log_id
                yield int(seq), read.event, data


async def over_follow(streams: Streams, stream: Stream, after: int) -> AsyncIterator[Shown]:
    """Read events, as a WebSocket does."""
    async with aclosing(follow(streams, stream, after)) as events:
        async for logged in events:
            yield logged.seq, logged.event.type, logged.event.payload()


class Transcript:
    """The events of one reader: each number once, one end, and an end for every waiting status."""

    def __init__(self, n: int) -> None:
        self.answer: Answer = (ReceivedChoice(),) * n
        self.seq = 0
        self.statuses: list[str] = []
        self.end: tuple[str, dict[str, Any]] | None = None

    def take(self, shown: Shown) -> None:
        """Add the next event."""
        seq, name, data = shown
        assert self.end is None, f"{name} after the end"
        assert seq == self.seq + 1, f"event {seq} after event {self.seq}"
        self.seq = seq
        match name:
            case "token":
                self._change(data["choice"], lambda choice: choice.take(_token(data)))
            case "choice_done":
                self._change(data["choice"], lambda choice: replace(choice, finish_reason=data["finish_reason"]))
            case "status":
                self._take_status(data["status"])
            case "done" | "error":
                self._take_end(name, data)

    def _change(self, number: int, change: Any) -> None:
        choice = self.answer[number]
        assert choice.finish_reason is None, "a token after the end of a choice"
        self.answer = (*self.answer[:number], change(choice), *self.answer[number + 1 :])

    def _take_status(self, status: str) -> None:
        if status == "loading":  # the next engine received the request before it had its model
            assert self.statuses[-1:] == ["waiting"], "loading without a waiting status"
            return
        if status in ("queued", "prefill", "generating"):
            assert not any(choice.token_ids for choice in self.answer), f"{status} within the answer"
            return
        assert status in ("waiting", "resumed")
        assert (status, self.statuses[-1:]) != ("waiting", ["waiting"]), "two waiting statuses in a row"
        self.statuses.append(status)

    def _take_end(self, name: str, data: dict[str, Any]) -> None:
        self.end = name, data
        if name == "error":
            return
        assert self.statuses[-1:] != ["waiting"], "no status after the wait"
        assert data["totalTokens"] == sum(len(choice.token_ids) for choice in self.answer)
        if len(self.answer) == 1:
            self._change(0, lambda choice: replace(choice, finish_reason=data["finish_reason"]))


def _token(data: dict[str, Any]) -> Token:
    return Token(text=data["text"], token_ids=tuple(data["token_ids"]), choice=data["choice"])
