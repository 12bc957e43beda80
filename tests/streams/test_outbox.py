"""Laws of what a process has for the log of a stream."""

from __future__ import annotations

from streamserve.protocol.events import Done, Meta, Status
from streamserve.streams.log.base import Batch, Fenced
from streamserve.streams.outbox import Outbox

DONE = Done(finish_reason="stop")


def packed(outbox: Outbox, last_seq: int = 1) -> Batch | None:
    return outbox.pack("log", 1, last_seq, lambda limit: [], lambda end: end)


def test_nothing_of_a_lease_that_is_gone_is_left_but_the_ending() -> None:
    """A refusal that came before or comes after it is no failure of the next lease, and the ending is packed again."""
    outbox = Outbox()
    outbox.put([Status(status="waiting")])
    first = packed(outbox)
    outbox.settle(first, Fenced("log", 2))
    outbox.clear()
    assert outbox.take_failure() is None
    outbox.end_with(DONE)
    second = packed(outbox)
    outbox.clear()
    assert outbox.settle(second, Fenced("log", 2)) == []
    assert (outbox.take_failure(), outbox.ending) == (None, DONE)
    third = packed(outbox)
    assert third is not None
    assert list(third.events) == [DONE]


def test_a_failed_commit_is_left_to_the_task_once() -> None:
    """Of packing a batch, and of one in flight."""
    outbox = Outbox()
    error = OSError("no space")
    outbox.settle(None, error)
    assert (outbox.take_failure(), outbox.take_failure()) == (error, None)
    outbox.put([Status(status="waiting")])
    outbox.settle(packed(outbox), error)
    assert (outbox.take_failure(), outbox.take_failure()) == (error, None)


def test_an_ending_waits_for_the_first_event() -> None:
    """A client may leave while the stream's row is inserted: the log begins with `meta` all the same."""
    outbox = Outbox()
    outbox.end_with(DONE)
    assert packed(outbox, last_seq=0) is None
    meta = Meta(model="m", stream_id="0" * 32, created=1.0)
    outbox.put([meta])
    batch = packed(outbox, last_seq=0)
    assert batch is not None
    assert list(batch.events) == [meta, DONE]
