"""Laws of one stream: its single end, what stop does, what a reader holds, and what it commits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from streamserve.protocol.events import Done, Error, Meta, Token, Usage
from streamserve.protocol.measures import Arrival
from streamserve.protocol.requests import Admission
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import Batch, Result
from streamserve.streams.reader.follow import collect
from streamserve.streams.readers import Attachment
from streamserve.streams.registry import Streams
from tests.streams.conftest import DONE, events_of, start
from tests.support.streams.hand_made import ScriptedClient, StallingLog, ask, tok, until, untimed


async def test_events_are_meta_then_the_engines_then_one_end(streams: Streams, scripted: ScriptedClient) -> None:
    """The log holds `meta`, what the engine yielded, and its terminal event; what follows that is ignored."""
    stream = await start(streams)
    scripted.last.push(tok("a"), DONE, tok("b"), DONE)
    meta, *rest = await events_of(streams, stream)
    assert meta == Meta(model="scripted", stream_id=stream.id, created=stream.created, prompt_tokens=3)
    assert [untimed(event) for event in rest] == [tok("a"), DONE]


async def test_an_end_that_is_being_committed_is_no_park(scripted: ScriptedClient) -> None:
    """The engine has nothing of the stream any more, and nothing waits for it to be continued."""
    log = StallingLog()
    streams = Streams({"scripted": scripted}, log)
    stream = await start(streams, on_disconnect="abort")
    reader = Attachment()
    stream.attach(reader)
    log.go.clear()
    stream.detach(reader)
    assert scripted.last.is_cancelled
    assert (stream.state, stream.summary().park_reason) == ("running", None)
    log.go.set()
    await stream.ended.wait()
    assert (stream.state, stream.summary().finish_reason) == ("finished", "abandoned")
    await streams.aclose()


@pytest.mark.parametrize("given", [{}, {"seed": 5}, {"max_tokens": 9}, {"seed": 0, "max_tokens": 9}])
async def test_accepted_values_are_kept_apart_from_given_ones(streams: Streams, given: dict[str, int]) -> None:
    """The repeated request holds acceptance's values; the next turn of the conversation only the caller's."""
    stream = await start(streams, **{"seed": None, "max_tokens": None, **given}, unset=("top_k",))
    assert stream.request.sampling.seed == 11, "the scripted engine draws that"
    assert stream.request.sampling.max_tokens == given.get("max_tokens", 99)
    assert set(stream.request.unset) == {"top_k", "seed", "max_tokens"} - set(given)


@pytest.mark.parametrize("failure", [ValueError("secret"), None], ids=["raises", "ends without an end"])
async def test_a_broken_generation_ends_in_internal_error(
    streams: Streams, scripted: ScriptedClient, caplog: pytest.LogCaptureFixture, failure: Exception | None
) -> None:
    """Whatever the engine does, the reader gets an end; the cause is in the server's log, not in the event."""
    stream = await start(streams)
    scripted.last.push(tok("a"), failure)
    *_, end = await events_of(streams, stream)
    assert isinstance(end, Error)
    assert end.code == "internal_error"
    assert "secret" not in end.message
    assert stream.id in caplog.text


async def test_a_cancelled_stream_task_still_commits_an_end(streams: Streams) -> None:
    """When the loop is torn down under a stream, its readers still get an end."""
    stream = await start(streams)
    (task,) = [task for task in asyncio.all_tasks() if task.get_name() == f"stream {stream.id}"]
    await asyncio.sleep(0)
    task.cancel()
    *_, end = await events_of(streams, stream)
    assert isinstance(end, Error)
    assert end.retryable


async def test_stop_ends_with_cancelled_at_what_was_seen(streams: Streams, scripted: ScriptedClient) -> None:
    """Stop cancels the generation and keeps `seen_seq`; usage counts what was generated."""
    stream = await start(streams)
    scripted.last.push(tok("a"), tok("b", 1, 2))
    await until(lambda: stream.last_seq == 3, "two tokens are committed")
    await stream.stop(2)
    *_, end = await events_of(streams, stream)
    assert isinstance(end, Done)
    assert (end.finish_reason, end.kept_seq, end.usage.completion_tokens) == ("cancelled", 2, 3)
    assert scripted.last.is_cancelled


async def test_stop_is_idempotent_and_nothing_after_the_end(streams: Streams, scripted: ScriptedClient) -> None:
    """A second stop, at once or later, and a stop of a finished stream change nothing."""
    stream = await start(streams)
    await asyncio.gather(stream.stop(1), stream.stop(0), stream.stop())
    await stream.stop(1)
    before = await events_of(streams, stream)
    assert len(before) == 2
    assert isinstance(stream.terminal, Done)
    assert stream.terminal.kept_seq == 1  # the first stop's
    other = await start(streams)
    scripted.last.push(DONE)
    assert untimed((await events_of(streams, other))[-1]) == DONE
    await other.stop(1)
    assert untimed(other.terminal) == DONE


@pytest.mark.parametrize(("seen_seq", "kept_seq"), [(-5, 0), (10**9, 1), (None, None)])
async def test_kept_seq_is_an_event_of_the_log(streams: Streams, seen_seq: int | None, kept_seq: int | None) -> None:
    """A client's `seen_seq` above the log's last seq is cut to it."""
    stream = await start(streams)
    await stream.stop(seen_seq)
    assert isinstance(stream.terminal, Done)
    assert stream.terminal.kept_seq == kept_seq


async def test_losing_the_last_reader_cancels_before_detach_returns(streams: Streams, scripted: ScriptedClient) -> None:
    """The engine drops the sequence in the callback that notices the disconnect."""
    stream = await start(streams)
    one, two, watcher = Attachment(), Attachment(), Attachment(is_watcher=True)
    for reader in (one, two, watcher):
        stream.attach(reader)
    stream.detach(one)
    stream.detach(one)
    assert not scripted.last.is_cancelled
    stream.detach(two)
    assert scripted.last.is_cancelled
    assert stream.state == "parked"
    assert stream.readers.num_watchers == 1


async def test_watchers_never_hold_a_stream(streams: Streams, scripted: ScriptedClient) -> None:
    """A watcher neither resumes a parked stream nor parks a running one by leaving."""
    stream = await start(streams)
    watcher, reader = Attachment(is_watcher=True), Attachment()
    stream.attach(watcher)
    stream.detach(watcher)
    assert stream.state == "running"
    stream.attach(reader)
    stream.detach(reader)
    stream.attach(watcher)
    for _ in range(10):
        await asyncio.sleep(0)
    assert stream.state == "parked"
    assert len(scripted.requests) == 1


async def test_an_unread_stream_is_parked(scripted: ScriptedClient) -> None:
    """A stream without a reader for `first_reader_seconds` is parked."""
    streams = Streams({"scripted": scripted}, StallingLog(), StreamConfig(first_reader_seconds=0.01))
    stream = await start(streams)
    await until(lambda: stream.state == "parked", "the stream is parked")
    assert scripted.last.is_cancelled
    await streams.aclose()


@pytest.mark.parametrize(
    ("on_disconnect", "reason"), [("park", "abandoned"), ("abort", "abandoned"), ("finish", "stop")]
)
async def test_on_disconnect(scripted: ScriptedClient, on_disconnect: str, reason: str) -> None:
    """Park waits out its window, abort ends at once, finish runs to the end."""
    window = 60 if on_disconnect == "abort" else 0.01
    streams = Streams({"scripted": scripted}, StallingLog(), StreamConfig(resume_window_seconds=window))
    stream = await start(streams, on_disconnect=on_disconnect)
    reader = Attachment()
    stream.attach(reader)
    stream.detach(reader)
    if on_disconnect == "finish":
        assert stream.state == "running"
        scripted.last.push(DONE)
    *_, end = await events_of(streams, stream)
    assert isinstance(end, Done)
    assert end.finish_reason == reason
    await streams.aclose()


async def test_a_batch_of_large_events_has_fewer(scripted: ScriptedClient) -> None:
    """A batch is at most about 8 KiB: sixteen events with other candidates would be held several times over."""
    log = StallingLog()
    streams = Streams({"scripted": scripted}, log, StreamConfig())
    stream = await start(streams)
    scripted.last.push(*(tok("x" * 2000) for _ in range(16)))
    await until(lambda: stream.last_seq == 17, "the first batch, whose events were not known")
    scripted.last.push(*(tok("y" * 2000) for _ in range(16)), *(tok("z") for _ in range(40)), DONE)
    await stream.ended.wait()
    sizes = [len(batch) for batch in log.batches]
    assert sizes[:7] == [1, 16, 3, 3, 3, 3, 3]
    assert max(sizes[7:]) == 16, "of small ones"
    await streams.aclose()


async def test_what_came_during_a_commit_is_the_next_batch(scripted: ScriptedClient) -> None:
    """Events that come during a commit are the next batch: no timer, and readers see only what is committed."""
    log = StallingLog()
    streams = Streams({"scripted": scripted}, log)
    stream = await start(streams)
    log.go.clear()
    scripted.last.push(tok("a"))
    for _ in range(5):
        await asyncio.sleep(0)
    scripted.last.push(tok("b"), tok("c"))
    for _ in range(5):
        await asyncio.sleep(0)
    scripted.last.push(DONE)
    assert stream.last_seq == 1
    log.go.set()
    await events_of(streams, stream)
    assert [list(map(untimed, batch)) for batch in log.batches[1:]] == [[tok("a")], [tok("b"), tok("c"), DONE]]
    await streams.aclose()


async def test_a_log_that_breaks_ends_the_readers(scripted: ScriptedClient, caplog: pytest.LogCaptureFixture) -> None:
    """The stream is over, its readers end without a terminal event, and the generation is cancelled."""
    log = StallingLog()
    streams = Streams({"scripted": scripted}, log)
    stream = await start(streams)
    reading = asyncio.create_task(collect(streams, stream))
    await asyncio.sleep(0)
    log.is_broken = True
    scripted.last.push(tok("a"))
    with pytest.raises(Exception, match=stream.id):
        await reading
    assert (stream.terminal, stream.state) == (None, "finished")
    assert scripted.last.is_cancelled
    assert "no space left" in caplog.text
    await streams.aclose()


async def test_the_summary_has_figures_and_no_text(streams: Streams, scripted: ScriptedClient) -> None:
    """The summary holds counts and times, never the prompt or the answer."""
    stream = await start(streams, prompt="my secret")
    stream.attach(Attachment(transport="sse"))
    scripted.last.push(tok("hidden", 1), tok("words", 2))
    await until(lambda: stream.last_seq == 3, "the tokens are committed")
    summary = stream.summary()
    assert (summary.owner, summary.tenant, summary.state, summary.transport) == ("u1", "t1", "running", "sse")
    assert (summary.prompt_tokens, summary.completion_tokens, summary.num_readers) == (3, 2, 1)
    assert summary.ttft is not None
    assert summary.ttft >= 0
    assert not {"my secret", "hidden"} & set(str(summary).split("'"))


class SlowToAnswer(StallingLog):
    """A log that has a batch before its writer learns of it: `answers` is cleared meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.answers.set()

    async def commit(self, batches: Sequence[Batch]) -> list[Result]:
        results = await super().commit(batches)
        await self.answers.wait()
        return results


async def test_a_reader_of_the_end_leaves_no_park(scripted: ScriptedClient) -> None:
    """A reader may read the end in the log before its writer learns that it is there, and leave: nothing is parked."""
    log = SlowToAnswer()
    streams = Streams({"scripted": scripted}, log, StreamConfig())
    stream = await start(streams)
    stream.attach(reader := Attachment())
    log.answers.clear()
    scripted.last.push(tok("a"), DONE)
    await until(lambda: len(log.batches) == 2, "the end is in the log")
    stream.detach(reader)
    log.answers.set()
    await stream.ended.wait()
    assert (untimed(stream.terminal), stream.engine.parking.num_parks, stream.last_seq) == (DONE, 0, 3)
    await streams.aclose()


@pytest.mark.parametrize("ends_by", ["done", "stop", "error"])
async def test_phases_of_a_plain_answer_add_up(streams: Streams, scripted: ScriptedClient, ends_by: str) -> None:
    """Whole, stopped and failed answers: `done`, and what the row is given, have phases that add up."""
    arrival = Arrival(time.monotonic() - 3.0, admitted_at=time.monotonic() - 2.0, network_seconds=0.5)
    stream = await streams.start(ask("scripted"), Admission(owner="u", tenant="t", received_at=arrival))
    scripted.last.push(tok("a", 5))
    await until(lambda: stream.last_seq == 2, "the token is committed")
    if ends_by == "stop":
        await stream.stop()
    elif ends_by == "done":
        parts = {"queue": 1e-6, "prefill": 2e-6, "decode": 3e-6, "first_decode": 1e-6}
        scripted.last.push(Done(finish_reason="stop", usage=Usage(completion_tokens=1), breakdown=parts))
    else:
        scripted.last.push(Error(code="internal_error", message="m"))
    await stream.ended.wait()
    summary = stream.summary()
    phases = dict(summary.phases)
    assert phases.pop("network_in") == 0.5
    assert phases["auth"] == pytest.approx(1.0, abs=0.01)
    assert phases["intake"] >= 2.0
    assert sum(phases.values()) == pytest.approx(summary.latency, abs=1e-6)
    if ends_by == "done":
        assert (phases["queue"], phases["prefill"]) == (1e-6, 2e-6)
    else:
        assert "first_token" in phases


async def test_what_an_answer_gives_the_first_time_is_no_repetition(streams: Streams, scripted: ScriptedClient) -> None:
    """Texts without ids that follow each other are all shown: only a resumed generation may give one again."""
    stream = await start(streams)
    texts = [Token(text=text, token_ids=()) for text in "bcd"]
    for text in (tok("a"), *texts):
        scripted.last.push(text)
        await until(lambda: not scripted.last._script, "it is taken")
    scripted.last.push(DONE)
    _, *rest = await events_of(streams, stream)
    assert [untimed(event) for event in rest] == [tok("a"), *texts, DONE]
