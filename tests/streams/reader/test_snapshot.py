"""Laws of the snapshot: a reader far behind gets the answer at once, and can rebuild all that the events held."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from streamserve.dialects.encoder import Encoder
from streamserve.dialects.native import NativeEncoder
from streamserve.dialects.openai.chat import ChatEncoder
from streamserve.dialects.plain import TextEncoder, TokensEncoder
from streamserve.protocol.events import (
    TEXT,
    BlockStart,
    BlockStop,
    BlockText,
    ChoiceDone,
    Citation,
    Custom,
    Done,
    Event,
    LoggedEvent,
    Snapshot,
    State,
    Status,
    Token,
    Unknown,
)
from streamserve.protocol.grammar import check_events
from streamserve.protocol.requests import Admission
from streamserve.streams.config import StreamConfig
from streamserve.streams.log.base import MemoryLog
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.reader.follow import follow
from streamserve.streams.reader.pages import take_snapshot
from streamserve.streams.registry import Streams
from streamserve.streams.stream import Stream
from tests.support.bodies.event_logs import META, block, blocks, numbered
from tests.support.bodies.event_logs import tok as token
from tests.support.checks.stream_checks import Frame, check_native, check_openai, check_tokens, text_of
from tests.support.streams.deliveries import DONE
from tests.support.streams.hand_made import ScriptedClient, StallingLog, ask, tok, until
from tests.support.streams.wire import Wire

BEHIND = 20


def serving(scripted: ScriptedClient, log: MemoryLog | None = None, snapshot_events: int = BEHIND) -> Streams:
    """Return a registry that gives each token a frame of its own."""
    settings = StreamConfig(snapshot_events=snapshot_events, coalesce_tokens=0)
    return Streams({"scripted": scripted}, log or MemoryLog(), settings)


async def written(streams: Streams, scripted: ScriptedClient, *events: Event, n: int = 1) -> Stream:
    """Return a finished stream that holds `meta` and `events`."""
    stream = await streams.start(ask("scripted", n=n), Admission(owner="u1", tenant="t1", on_disconnect="finish"))
    scripted.last.push(*events)
    await stream.ended.wait()
    return stream


async def read(streams: Streams, stream: Stream, after: int = 0) -> list[Frame]:
    """Return all that a native reader gets after event `after`."""
    wire = Wire()
    await Delivery(streams, stream, NativeEncoder(stream.log_id), after=after).run(wire.send)
    return check_native(wire.data, after=after)


def words(num: int) -> list[Token]:
    return [tok(f" {number}") for number in range(num)]


def kinds(frames: list[Frame]) -> list[tuple[str, int]]:
    return [(frame.event, frame.seq) for frame in frames]


async def test_a_late_reader_gets_the_text_at_once(scripted: ScriptedClient) -> None:
    """A fresh reader of a long answer gets `meta`, the text and the end; one that has a part, the text and the end."""
    streams = serving(scripted)
    stream = await written(streams, scripted, *words(100), DONE)
    text = "".join(f" {number}" for number in range(100))
    whole, rest = await read(streams, stream), await read(streams, stream, after=50)
    assert kinds(whole) == [("meta", 1), ("snapshot", 101), ("done", 102)]
    assert kinds(rest) == [("snapshot", 101), ("done", 102)]
    assert whole[1].json == rest[0].json == {"text": text, "seq": 101}
    headers = dict(Delivery(streams, stream, NativeEncoder(stream.log_id), after=50).headers)
    assert headers[b"streamserve-from"] == b"51"
    await streams.aclose()


@pytest.mark.parametrize(("num_behind", "is_given"), [(BEHIND, False), (BEHIND + 1, True)])
async def test_only_a_reader_further_behind_gets_one(scripted: ScriptedClient, num_behind: int, is_given: bool) -> None:
    """A reader exactly `snapshot_events` behind gets a replay."""
    streams = serving(scripted)
    stream = await written(streams, scripted, *words(100), DONE)
    frames = await read(streams, stream, after=stream.last_seq - num_behind)
    assert [frame.event for frame in frames].count("snapshot") == is_given
    assert len(frames) == (2 if is_given else num_behind)
    await streams.aclose()


async def test_zero_disables_snapshots(scripted: ScriptedClient) -> None:
    """With `snapshot_events` 0 every reader gets a replay."""
    streams = serving(scripted, snapshot_events=0)
    stream = await written(streams, scripted, *words(100), DONE)
    assert kinds(await read(streams, stream))[1:-1] == [("token", seq) for seq in range(2, 102)]
    await streams.aclose()


async def test_a_reader_that_is_slow_in_mid_stream(scripted: ScriptedClient) -> None:
    """A reader that takes nothing while a hundred events come gets one snapshot, and then the next token."""
    streams, wire = serving(scripted), Wire()
    stream = await streams.start(ask("scripted"), Admission(owner="u1", tenant="t1"))
    delivery = Delivery(streams, stream, NativeEncoder(stream.log_id))
    running = asyncio.create_task(delivery.run(wire.send))
    scripted.last.push(tok("first"))
    await until(lambda: delivery.reader.received_seq == 2, "the first token is taken")
    wire.go.clear()
    scripted.last.push(tok(" second"))
    await until(lambda: wire.num_waiting == 1, "the second is in send")
    scripted.last.push(*words(100))
    await until(lambda: stream.last_seq == 103, "a hundred more are there")
    wire.go.set()
    await until(lambda: delivery.reader.received_seq == 103, "it has caught up")
    scripted.last.push(tok(" last"), DONE)
    await running
    frames = check_native(wire.data)
    assert ("snapshot", 103) in kinds(frames)
    assert len(frames) <= 6, "meta, two tokens, what stands for a hundred, one more, the end"
    assert text_of(frames) == "".join(["first second", *(f" {number}" for number in range(100)), " last"])
    await streams.aclose()


MIXED: list[Event] = [
    Status(status="prefill"),
    *(tok(f"a{number} ", choice=0) for number in range(9)),
    *(tok(f"b{number} ", choice=1) for number in range(9)),
    ChoiceDone(choice=1, finish_reason="stop"),
    Status(status="waiting", message="Paused."),
    Status(status="resumed"),
    *(tok(f"a{number} ", choice=0) for number in range(9, 15)),
    ChoiceDone(choice=0, finish_reason="length"),
    Status(status="waiting", message="Paused."),
    DONE,
]


@pytest.mark.parametrize("snapshot_events", [1, 5, 12])
async def test_what_is_rebuilt_is_what_was_written(scripted: ScriptedClient, snapshot_events: int) -> None:
    """After a resume from any event, text and finish reason of each choice and the last status are the log's."""
    plain, leaping = serving(scripted, snapshot_events=0), serving(scripted, snapshot_events=snapshot_events)
    stream = await written(plain, scripted, *MIXED, n=2)
    log = await read(plain, stream)
    leaping.log = plain.log
    for after in range(stream.last_seq):
        seen = log[:after] + await read(leaping, stream, after=after)
        assert rebuilt(seen) == rebuilt(log), f"after {after}"
    await plain.aclose()


def rebuilt(frames: list[Frame]) -> tuple[object, ...]:
    """Return what a client has after `frames`."""
    reasons: dict[int, str] = {}
    for frame in frames:
        if frame.event == "choice_done":
            reasons[frame.json["choice"]] = frame.json["finish_reason"]
        elif frame.event == "snapshot":
            choices = frame.json.get("choices", [])
            reasons = {one["choice"]: one["finish_reason"] for one in choices if "finish_reason" in one}
    last_status = [frame.json for frame in frames if frame.event == "status"][-1]
    return text_of(frames, 0), text_of(frames, 1), reasons, last_status, frames[0].event, frames[-1].event


async def test_a_status_that_holds_follows_the_snapshot(scripted: ScriptedClient) -> None:
    """A reader that comes while an answer waits gets the reason; statuses that text has overtaken are left out."""
    streams, wire = serving(scripted), Wire()
    stream = await streams.start(ask("scripted"), Admission(owner="u1", tenant="t1", on_disconnect="finish"))
    waiting = Status(status="waiting", message="Paused.")
    scripted.last.push(waiting, *words(50), waiting)
    await until(lambda: stream.last_seq == 53, "all is there")
    running = asyncio.create_task(Delivery(streams, stream, NativeEncoder(stream.log_id)).run(wire.send))
    await until(lambda: b"Paused." in wire.data, "the status is sent")
    scripted.last.push(DONE)
    await running
    assert kinds(check_native(wire.data)) == [("meta", 1), ("snapshot", 52), ("status", 53), ("done", 54)]
    await streams.aclose()


async def test_a_snapshot_has_the_state_and_the_events_of_a_run(scripted: ScriptedClient) -> None:
    """The state as it is by then, after its patches; a later patch applies to it."""
    streams = serving(scripted)
    shown = (
        State(snapshot='{"a":1}'),
        State(delta='[{"op":"add","path":"/b","value":[]}]'),
        Custom(name="c", value="3"),
    )
    stream = await written(streams, scripted, *shown, *words(50), State(delta='[{"op":"remove","path":"/a"}]'), DONE)
    (snapshot,) = [frame.json for frame in await read(streams, stream) if frame.event == "snapshot"]
    assert snapshot["state"] == {"b": []}
    assert snapshot["customs"] == [{"name": "c", "value": 3}]
    frames = await read(streams, stream, after=53)
    assert [(frame.event, frame.json) for frame in frames if frame.event == "state"] == [
        ("state", {"delta": [{"op": "remove", "path": "/a"}]})
    ]
    await streams.aclose()


async def test_logprobs_are_never_left_out(scripted: ScriptedClient) -> None:
    """No snapshot has them, so a stream with logprobs is replayed."""
    streams = serving(scripted)
    tokens = [Token(text="x", token_ids=(7,), logprobs=()) for _ in range(100)]
    stream = await written(streams, scripted, *tokens, DONE)
    frames = await read(streams, stream)
    assert kinds(frames) == [("meta", 1), *(("token", seq) for seq in range(2, 102)), ("done", 102)]
    await streams.aclose()


async def test_other_dialects_get_every_token(scripted: ScriptedClient) -> None:
    """Only native readers get snapshots."""
    streams = serving(scripted)
    stream = await written(streams, scripted, *words(100), DONE)
    log_id, text = stream.log_id, "".join(f" {number}" for number in range(100))

    async def got(encoder: Encoder) -> bytes:
        wire = Wire()
        await Delivery(streams, stream, encoder).run(wire.send)
        return wire.data

    chunks = check_openai(await got(ChatEncoder(log_id, completion_id="c", model="m", created=1)))
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == text
    assert check_tokens(await got(TokensEncoder(log_id))) == text
    assert await got(TextEncoder()) == text.encode()
    await streams.aclose()


async def test_a_snapshot_ends_where_its_user_stopped_reading(scripted: ScriptedClient) -> None:
    """A client cuts the text at `kept_seq`, which it cannot do inside a snapshot."""
    streams = serving(scripted)
    stream = await streams.start(ask("scripted"), Admission(owner="u1", tenant="t1", on_disconnect="finish"))
    scripted.last.push(*words(100))
    await until(lambda: stream.last_seq == 101, "all is there")
    await stream.stop(60)
    frames = await read(streams, stream)
    assert kinds(frames)[:3] == [("meta", 1), ("snapshot", 60), ("token", 61)]
    assert (frames[-1].seq, frames[-1].json["kept_seq"]) == (102, 60)
    await streams.aclose()


async def test_followers_over_websockets_get_them_too(scripted: ScriptedClient) -> None:
    """A WebSocket's follower gets the snapshot as an event with its number; a terminal's gets the tokens."""
    streams = serving(scripted)
    stream = await written(streams, scripted, *words(100), DONE)
    got = {}
    for transport in ("websocket", "terminal"):
        async with aclosing(follow(streams, stream, transport=transport)) as events:
            got[transport] = [logged async for logged in events]
    assert [type(logged.event).__name__ for logged in got["websocket"]] == ["Meta", "Snapshot", "Done"]
    snapshot = got["websocket"][1]
    assert isinstance(snapshot.event, Snapshot)
    assert snapshot.seq == snapshot.event.seq == 101
    assert len(got["terminal"]) == 102
    await streams.aclose()


async def test_a_snapshot_is_read_in_pages(scripted: ScriptedClient) -> None:
    """Other tasks run between the pages of a long log, and each event is read once."""
    log = StallingLog()
    streams = serving(scripted, log)
    stream = await written(streams, scripted, *(tok("x") for _ in range(3000)), DONE)
    num_reads, turns = log.num_reads, 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    assert (await read(streams, stream, after=1))[0].json["text"] == "x" * 3000
    task.cancel()
    assert turns >= 3000 // 64
    assert log.num_reads - num_reads <= 3000 // 64 + 4
    await streams.aclose()


async def test_a_live_reader_that_keeps_up_never_gets_one(scripted: ScriptedClient) -> None:
    """A long answer is sent token by token to a reader that takes each."""
    streams, wire = serving(scripted), Wire()
    stream = await streams.start(ask("scripted"), Admission(owner="u1", tenant="t1"))
    running = asyncio.create_task(Delivery(streams, stream, NativeEncoder(stream.log_id)).run(wire.send))
    for number in range(10):
        scripted.last.push(*words(10))
        await until(lambda number=number: stream.readers.furthest_seq == 1 + 10 * (number + 1), "all is taken")
    scripted.last.push(Done(finish_reason="stop"))
    await running
    assert "snapshot" not in {frame.event for frame in check_native(wire.data)}
    await streams.aclose()


async def snapshot_of(log: list[LoggedEvent], after: int, until: int) -> list[LoggedEvent]:
    """Return the snapshot of events `after` + 1 to `until` of a log, read in pages of three."""

    async def read_page(start: int, limit: int) -> list[LoggedEvent]:
        return log[start : start + min(limit, 3)]

    return await take_snapshot(read_page, after, until)


async def test_a_snapshot_has_blocks_and_citations() -> None:
    """Each block with its kind, text, call and signature; `text` is the text blocks'; an unknown event is left out."""
    log = blocks()
    meta, leap, done = await snapshot_of(log, 0, len(log))
    assert (meta, done) == (log[0], log[-1])
    snapshot = leap.event
    assert isinstance(snapshot, Snapshot)
    assert (leap.seq, snapshot.seq) == (17, 17)
    (choice,) = snapshot.choices
    assert choice.text == "Hello"
    assert choice.blocks == (
        BlockText(index=0, kind="thinking", text="Hm.", signature="s1"),
        BlockText(index=1, kind="text", text="Hello"),
        BlockText(index=2, kind="tool_use", text='{"a":1}', id="call_1", name="look_up"),
    )
    assert [citation.id for citation in snapshot.citations] == ["d0", "d1"]


async def test_an_implied_block_is_listed_where_another_follows() -> None:
    """Plain text before a tool call is block 0; plain text alone lists no blocks."""
    log = numbered(META, *[token("Let me see. ")] * 3, *block(1, "tool_use", "{}")[:2])
    *_, leap = await snapshot_of(log, 0, 4)
    assert leap.event.payload() == {"text": "Let me see. " * 3, "seq": 4}
    *_, leap = await snapshot_of(log, 0, 6)
    assert leap.event.payload()["blocks"] == [
        {"index": 0, "kind": "text", "text": "Let me see. " * 3},
        {"index": 1, "kind": "tool_use", "text": "{}", "id": "call_1", "name": "look_up", "is_open": True},
    ]


async def test_a_snapshot_and_what_follows_keep_the_grammar() -> None:
    """Wherever in a log of blocks a reader resumes, and as far as the log goes, the rest holds what the events held."""
    log = blocks()
    for end in range(2, len(log) + 1):
        whole = known(log)
        for after in range(end):
            leap = await snapshot_of(log, after, end)
            if not leap:
                continue
            rest = [*leap, *log[leap[-1].seq :]]
            check_events([one.event for one in rest], is_part=after > 0)
            assert known([*log[:after], *rest]) == whole, (after, end)


def known(events: list[LoggedEvent]) -> tuple[object, ...]:
    """Return what a client has after `events`: the blocks, the citations and the end."""
    texts: dict[int, list[str | None]] = {}
    citations: list[Citation] = []
    for _, event in events:
        if isinstance(event, Snapshot):
            texts = {one.index: [one.kind, one.text, one.signature] for one in event.choices[0].blocks}
            citations = list(event.citations)
        elif isinstance(event, BlockStart):
            texts[event.index] = [event.kind, "", None]
        elif isinstance(event, Token):
            kind, text, signature = texts.get(event.index, [TEXT, "", None])
            texts[event.index] = [kind, f"{text}{event.text}", signature]
        elif isinstance(event, BlockStop):
            texts[event.index][2] = event.signature
        elif isinstance(event, Citation):
            citations.append(event)
    return texts, citations, events[0].event, events[-1].event


async def test_blocks_reach_a_reader_through_a_delivery(scripted: ScriptedClient) -> None:
    """Blocks of a later release's engine are logged, replayed and folded; the suite's watch checks their grammar."""
    streams = serving(scripted)
    events = [one.event for one in blocks()][1:]
    stream = await written(streams, scripted, *events)
    frames = await read(streams, stream)
    assert [frame.event for frame in frames] == [event.type for event in (blocks()[0].event, *events)]
    assert text_of(frames) == "Hello"
    leaping = serving(scripted, snapshot_events=3)
    leaping.log = streams.log
    frames = await read(leaping, stream)
    assert kinds(frames) == [("meta", 1), ("snapshot", 17), ("done", 18)]
    assert text_of(frames) == "Hello"
    assert not any(isinstance(one.event, Unknown) for one in await snapshot_of(blocks(), 0, 18))
    await streams.aclose()
