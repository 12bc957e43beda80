"""Laws of conversations as rows: what a start adds, what an end writes, once, and what a deletion takes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import connection
from django.test.utils import CaptureQueriesContext, override_settings
from django.utils import timezone
from redis.asyncio import Redis

from streamserve.api.call import Caller
from streamserve.api.conversations import Ask, Change, Prepared
from streamserve.conf import get_settings
from streamserve.models import Attachment, Conversation, Message, StoredCompletion
from streamserve.models import Stream as StreamRow
from streamserve.protocol.errors import BadRequest, DatabaseUnavailable, NotFinished, NotFound, QuotaExceeded
from streamserve.protocol.events import Done
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import Once
from streamserve.rows import answer_messages, orm, receivers
from streamserve.rows.answer_messages import AnswerMessages, keep_needed_logs
from streamserve.rows.completions import CompletionRows
from streamserve.rows.conversation_store import UNDO_SECONDS, ConversationRows
from streamserve.rows.reaper import RowAges, Sweeper, purge_before
from streamserve.rows.turns import first_words
from streamserve.streams.log.base import UNFINISHED_SECONDS, LogFull, LogUnavailable, MemoryLog, append
from streamserve.streams.registry import Streams
from streamserve.streams.store import KeyTaken, answer_text
from streamserve.streams.stream import Stream
from streamserve.web import resources
from tests.rows.conftest import FINE, NUM_TOKENS, asked, left
from tests.support.engines.runners import DEADLINE_SECONDS
from tests.support.servers.redis_server import RedisServer
from tests.support.sites.rows import in_row
from tests.support.sites.two_workers import Worker
from tests.support.streams.hand_made import Gate, until

pytestmark = pytest.mark.django_db(transaction=True)

ROWS = ConversationRows(Limits())


@pytest.fixture
async def ann() -> Caller:
    """A user with rows of its own."""
    user = await get_user_model().objects.acreate(username="ann")
    return Caller(f"user:{user.pk}")


async def message_of(stream_id: str, **fields: Any) -> Message:
    """Return the message of a stream once it has these values: it is written after the readers have the last event."""
    found = Message.objects.filter(stream_id=stream_id, **fields)
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not await found.aexists():  # noqa: ASYNC110  (a row has no event)
            await asyncio.sleep(0.01)
    return await found.aget()


async def prepare(caller: Caller, conversation_id: str, **ask: Any) -> Prepared:
    return await ROWS.prepare(caller, conversation_id, Ask(conversation_id=conversation_id, **ask))


async def start(worker: Worker, caller: Caller, prepared: Prepared, **decided: Any) -> Stream:
    request = asked(messages=prepared.messages, prompt=None)
    return await worker.start(request, owner=caller.owner, tenant=caller.tenant, turn=prepared.turn, **decided)


async def answered(worker: Worker, caller: Caller, conversation_id: str, **ask: Any) -> Message:
    """Ask, and return the answer's message once it is written."""
    prepared = await prepare(caller, conversation_id, **ask)
    stream = await start(worker, caller, prepared)
    await worker.read(stream.id)
    return await message_of(stream.id, state="done")


async def ids_of(conversation_id: str) -> list[str]:
    return [one.pk async for one in Message.objects.filter(conversation=conversation_id)]


async def test_a_start_adds_a_question_and_a_running_answer(one: Worker, gate: Gate, ann: Caller) -> None:
    """They come with the stream's row; the branch shown, the model and the title are the conversation's at once."""
    conversation = await ROWS.create(ann)
    prepared = await prepare(ann, conversation.id, question="Why  is\nit late?")
    gate.allow(2)
    stream = await start(one, ann, prepared)
    turn = prepared.turn
    assert turn.question is not None
    question, answer = [await Message.objects.aget(pk=pk) for pk in (turn.question.id, turn.answer_id)]
    assert (question.role, question.state, question.parent_id, question.text) == (
        "user",
        "done",
        None,
        "Why  is\nit late?",
    )
    assert (answer.role, answer.state, answer.parent_id) == ("assistant", "running", question.pk)
    assert (answer.stream_id, answer.content) == (stream.id, "")
    assert answer.created_at == (await StreamRow.objects.aget(pk=stream.id)).created_at
    found = await ROWS.find(ann, conversation.id)
    assert (found.leaf, found.model, found.title, found.is_running) == (answer.pk, "echo", "Why is it late?", True)
    assert await ROWS.turn_of(stream.id) == turn_with_ids(prepared)
    gate.open()
    await one.read(stream.id)
    answer = await message_of(stream.id, state="done")
    assert answer.text == await answer_text(one.log, stream.log_id)
    assert (answer.finish_reason, answer.completion_tokens) == ("length", NUM_TOKENS)
    assert not (await ROWS.find(ann, conversation.id)).is_running


def turn_with_ids(prepared: Prepared) -> Any:
    question = prepared.turn.question
    return replace(prepared.turn, question=None if question is None else replace(question, content="", text=""))


async def test_a_branch_grows_and_another_answer_is_a_sibling(one: Worker, ann: Caller) -> None:
    """A question after the branch, another answer, a changed question, a new beginning: nothing is overwritten."""
    conversation = await ROWS.create(ann, title="Mine")
    first = await answered(one, ann, conversation.id, question="one")
    second = await answered(one, ann, conversation.id, question="two")
    again = await answered(one, ann, conversation.id, question_id=str(second.parent_id))
    changed = await answered(one, ann, conversation.id, question="three", parent=first.pk)
    anew = await answered(one, ann, conversation.id, question="four", parent="")
    assert again.parent_id == second.parent_id
    questions = {row.pk: row async for row in Message.objects.filter(role="user")}
    assert [questions[str(one.parent_id)].parent_id for one in (second, changed, anew)] == [first.pk, first.pk, None]
    found = await ROWS.find(ann, conversation.id)
    assert (found.leaf, found.title) == (anew.pk, "Mine")
    await ROWS.change(ann, conversation.id, Change(leaf=again.pk))
    prepared = await prepare(ann, conversation.id, question="five")
    contents = [turn.content for turn in prepared.messages]
    assert contents == ["one", first.text, "two", again.text, "five"]
    messages, has_more = await ROWS.messages(ann, conversation.id, limit=3)
    assert ([one.id for one in messages], has_more) == ((await ids_of(conversation.id))[:3], True)
    rest, has_more = await ROWS.messages(ann, conversation.id, limit=20, after=messages[-1].id)
    assert (len(rest), has_more) == (6, False)


async def test_an_answer_at_its_length_is_continued(one: Worker, ann: Caller) -> None:
    """Its continuation is its child, and both are one turn of a later prompt."""
    conversation = await ROWS.create(ann)
    answer = await answered(one, ann, conversation.id, question="one")
    prepared = await prepare(ann, conversation.id, answer_id=answer.pk)
    assert [turn.content for turn in prepared.messages] == ["one", answer.text]
    assert (prepared.turn.parent_id, prepared.turn.question) == (answer.pk, None)
    rest = await answered(one, ann, conversation.id, answer_id=answer.pk)
    prepared = await prepare(ann, conversation.id, question="two")
    assert [turn.content for turn in prepared.messages] == ["one", answer.text + rest.text, "two"]


async def test_what_a_branch_cannot_have_is_refused(one: Worker, gate: Gate, ann: Caller) -> None:
    """A message of the wrong kind, an unknown message, a whole answer to continue, an answer that runs."""
    conversation = await ROWS.create(ann)
    gate.allow(2)
    prepared = await prepare(ann, conversation.id, question="one")
    stream = await start(one, ann, prepared)
    with pytest.raises(NotFinished):
        await prepare(ann, conversation.id, question="two")
    gate.open()
    await one.read(stream.id)
    answer = await message_of(stream.id, state="done")
    await Message.objects.filter(pk=answer.pk).aupdate(finish_reason="stop")
    for ask, error in (
        ({"question": "two", "parent": str(answer.parent_id)}, BadRequest),
        ({"question": "two", "parent": "f" * 32}, NotFound),
        ({"question_id": answer.pk}, BadRequest),
        ({"answer_id": answer.pk}, BadRequest),
        ({"answer_id": "\0"}, NotFound),
    ):
        with pytest.raises(error):
            await prepare(ann, conversation.id, **ask)
    for conversation_id, caller in ((conversation.id, Caller("key:77")), ("0" * 32, ann), ("\0", ann)):
        with pytest.raises(NotFound):
            await prepare(caller, conversation_id, question="two")


async def test_two_tabs_that_ask_at_once_make_siblings(one: Worker, two: Worker, ann: Caller) -> None:
    """Both questions follow the same answer, and both are answered."""
    conversation = await ROWS.create(ann)
    first = await answered(one, ann, conversation.id, question="one")
    prepared = [await prepare(ann, conversation.id, question=text) for text in ("two", "three")]
    streams = await asyncio.gather(
        *(start(worker, ann, made) for worker, made in zip((one, two), prepared, strict=True))
    )
    for worker, stream in zip((one, two), streams, strict=True):
        await worker.read(stream.id)
        await message_of(stream.id, state="done")
    assert await Message.objects.filter(parent=first.pk).acount() == 2
    assert len(await ids_of(conversation.id)) == 6


async def test_what_is_refused_is_not_stored(one: Worker, ann: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is taken, a conversation that was deleted meanwhile, a log that is full: no message, and no leaf."""
    conversation = await ROWS.create(ann)
    first = await answered(one, ann, conversation.id, question="one")
    before = await ids_of(conversation.id)
    once = Once(key="k", digest="d")
    await start(one, ann, await prepare(ann, (await ROWS.create(ann)).id, question="x"), once=once)
    file = await Attachment.objects.acreate(tenant=ann.tenant, name="a.txt", num_bytes=1, text="a", is_ready=True)
    prepared = await prepare(ann, conversation.id, question="two", attachment_ids=(file.pk,))
    with pytest.raises(KeyTaken):
        await start(one, ann, prepared, once=once)

    async def refuse(self: Stream) -> None:
        raise LogFull("The disk is full.")

    with monkeypatch.context() as patch:
        patch.setattr(Stream, "open", refuse)
        with pytest.raises(LogFull):
            await start(one, ann, prepared)
    await until_gone(prepared)
    assert not (await Attachment.objects.aget(pk=file.pk)).is_sent
    again = await prepare(ann, conversation.id, question_id=str(first.parent_id))
    with monkeypatch.context() as patch:
        patch.setattr(Stream, "open", refuse)
        with pytest.raises(LogFull):
            await start(one, ann, again)
    await until_gone(again)
    assert await ids_of(conversation.id) == before
    assert (await prepare(ann, conversation.id, question="two")).turn.parent_id == first.pk
    await ROWS.delete(ann, conversation.id)
    with pytest.raises(NotFound):
        await start(one, ann, prepared)
    assert await ids_of(conversation.id) == before


async def until_gone(prepared: Prepared) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while await Message.objects.filter(pk=prepared.turn.answer_id).aexists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_stopped_answer_is_kept_up_to_where_it_was_read(one: Worker, gate: Gate, ann: Caller) -> None:
    """What its reader has not seen is in the log, and not in the message."""
    conversation = await ROWS.create(ann)
    gate.allow(6)
    stream = await start(one, ann, await prepare(ann, conversation.id, question="one"))
    reading = asyncio.create_task(one.read(stream.id))
    await until(lambda: stream.last_seq > 5, "it has tokens")
    await stream.stop(3)
    gate.open()
    await reading
    message = await message_of(stream.id, state="done")
    assert message.finish_reason == "cancelled"
    assert message.text == await answer_text(one.log, stream.log_id)
    assert message.text
    assert len(message.text) < len(
        "".join(getattr(one.event, "text", "") for one in await one.log.read(stream.log_id, 0))
    )


async def test_an_end_whose_log_is_away_is_written_later(
    one: Worker, two: Worker, ann: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream's row is finished; its message runs, its log and its row stay, until another worker writes it."""
    conversation = await ROWS.create(ann)
    prepared = await prepare(ann, conversation.id, question="one")

    async def away(self: AnswerMessages, log_id: str) -> Any:
        raise LogUnavailable("The log is away.")

    with monkeypatch.context() as patch:
        patch.setattr(AnswerMessages, "_events", away)
        stream = await start(one, ann, prepared)
        await one.read(stream.id)
        await in_row(stream.id, state="finished")
        await two.reaper.round()
        message = await Message.objects.aget(stream_id=stream.id)
        assert (message.state, message.content) == ("running", "")
        ages = RowAges(streams_days=1e-9)
        later = timezone.now() + timedelta(days=30)
        streams, *_ = ages.old(FINE, later)
        assert await orm.read(list, streams) == []
        chats = CompletionRows(one.log, keeps=True, reasoning_field="both")
        await StoredCompletion.objects.acreate(
            stream_id=stream.id, tenant=ann.tenant, model="echo", completion="{}", created_at=timezone.now()
        )
        with pytest.raises(LogUnavailable):
            await chats.delete(ann, stream.id)
    text = await answer_text(one.log, stream.log_id)
    await two.reaper.round()
    message = await message_of(stream.id, state="done")
    assert message.text == text
    await one.reaper.round()
    assert (await Message.objects.aget(pk=message.pk)).finished_at == message.finished_at
    await chats.delete(ann, stream.id)
    assert await message_of(stream.id, state="done", text=text)


async def test_logs_of_answers_without_a_message_are_touched(
    one: Worker, ann: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A purge finds them young, however long ago they have ended."""
    conversation = await ROWS.create(ann)
    answer = await answered(one, ann, conversation.id, question="one")
    row = await StreamRow.objects.aget(pk=answer.stream_id)
    in_an_hour = time.time() + 3600.0
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: in_an_hour)
        assert row.log_id in await one.log.old(purge_before(FINE, in_an_hour))
        await Message.objects.filter(pk=answer.pk).aupdate(state="running")
        await keep_needed_logs(one.log)
        assert row.log_id not in await one.log.old(purge_before(FINE, in_an_hour))


async def test_an_answer_whose_log_is_gone_has_failed(one: Worker, two: Worker, gate: Gate, ann: Caller) -> None:
    """Its message says `producer_lost`; so does the message of a stream whose row is gone too."""
    conversation = await ROWS.create(ann)
    gate.allow(4)
    prepared = await prepare(ann, conversation.id, question="one")
    stream = await start(one, ann, prepared)
    reading = asyncio.create_task(one.read(stream.id))
    await until(lambda: gate.is_holding and stream.last_seq > 2 and stream.readers.num_holding == 1, "it is held")
    await left(reading)
    await in_row(stream.id, producer="")
    await one.log.drop(stream.log_id)
    dead = f"{one.workers.host}-dead"
    await StreamRow.objects.filter(pk=stream.id).aupdate(producer=dead, on_disconnect="abort")
    await two.reaper.round()
    assert (await message_of(stream.id, state="failed")).error_code == "producer_lost"
    await Message.objects.filter(stream_id=stream.id).aupdate(state="running")
    await StreamRow.objects.filter(pk=stream.id).adelete()
    await two.reaper.round()
    assert (await message_of(stream.id, state="failed")).error_code == "producer_lost"
    gate.open()


@pytest.mark.parametrize("is_written", [False, True])
async def test_a_question_that_is_sent_again_is_there_once(
    one: Worker, two: Worker, gate: Gate, ann: Caller, is_written: bool
) -> None:
    """Of an answer whose events are gone nothing stays once its key is forgotten: the same question is asked anew."""
    conversation = await ROWS.create(ann)
    gate.allow(4)
    prepared = await prepare(ann, conversation.id, question="one")
    stream = await start(one, ann, prepared)
    reading = asyncio.create_task(one.read(stream.id))
    await until(lambda: gate.is_holding and stream.last_seq > 2 and stream.readers.num_holding == 1, "it is held")
    await left(reading)
    await in_row(stream.id, producer="")
    await one.log.drop(stream.log_id)
    if is_written:
        dead = f"{one.workers.host}-dead"
        await StreamRow.objects.filter(pk=stream.id).aupdate(producer=dead, on_disconnect="abort")
        await two.reaper.round()
        await message_of(stream.id, state="failed")
    await two.streams.store.forget_key(stream.id)
    assert await ids_of(conversation.id) == []
    assert not (await ROWS.find(ann, conversation.id)).leaf
    gate.open()


async def test_a_worker_that_takes_over_writes_the_message(one: Worker, two: Worker, gate: Gate, ann: Caller) -> None:
    """When the worker of an answer dies, the answer is whole in its message, whoever has made its end."""
    conversation = await ROWS.create(ann)
    gate.allow(4)
    stream = await start(one, ann, await prepare(ann, conversation.id, question="one"))
    reading = asyncio.create_task(one.read(stream.id))
    await until(lambda: stream.last_seq > 3, "it has tokens")
    one.release_lock()
    other = asyncio.create_task(two.read(stream.id))
    await until(lambda: two.streams.find(stream.id) is not None, "it is found")
    gate.open()
    await asyncio.gather(reading, other)
    message = await message_of(stream.id, state="done")
    assert (message.text, message.completion_tokens) == (await answer_text(two.log, stream.log_id), NUM_TOKENS)


@pytest.mark.parametrize("failing", range(6))
async def test_each_await_of_an_end_may_fail(
    one: Worker, two: Worker, ann: Caller, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Whichever query or read of an end fails, with the database or the log away, it is written once, later."""
    conversation = await ROWS.create(ann)
    prepared = await prepare(ann, conversation.id, question="one")
    calls: list[str] = []

    def failing_once(name: str, call: Callable[..., Awaitable[Any]], error: Exception) -> Callable[..., Awaitable[Any]]:
        async def wrapped(*args: Any, **options: Any) -> Any:
            is_of_end = stream is not None and stream.terminal is not None
            if is_of_end:
                calls.append(name)
            if is_of_end and len(calls) == failing + 1:
                raise error
            return await call(*args, **options)

        return wrapped

    stream: Stream | None = None
    database = DatabaseUnavailable("The database is away.")
    for module in (answer_messages, receivers):
        door = type("Door", (), {name: staticmethod(getattr(orm, name)) for name in ("read", "write", "call")})
        for name in ("read", "write"):
            setattr(door, name, staticmethod(failing_once(name, getattr(orm, name), database)))
        monkeypatch.setattr(module, "orm", door)
    monkeypatch.setattr(one.log, "read", failing_once("log", one.log.read, LogUnavailable("The log is away.")))
    stream = await start(one, ann, prepared)
    with contextlib.suppress(LogUnavailable):  # its reader's own
        await one.read(stream.id)
    await in_row(stream.id, state="finished")
    await round_of(two)
    message = await message_of(stream.id, state="done")
    assert message.text == await answer_text(two.log, stream.log_id)


async def round_of(worker: Worker) -> None:
    """Have the reaper do a round, and a second one if that failed: its loop does."""
    try:
        await worker.reaper.round()
    except DatabaseUnavailable:
        await worker.reaper.round()


async def test_a_deletion_can_be_undone_for_ten_minutes(one: Worker, gate: Gate, ann: Caller) -> None:
    """It names the streams that run; then the rows go, and nothing of other conversations."""
    gone, stays = await ROWS.create(ann), await ROWS.create(ann)
    gate.allow(2)
    stream = await start(one, ann, await prepare(ann, gone.id, question="one"))
    assert await ROWS.delete(ann, gone.id) == [stream.id]
    with pytest.raises(NotFound):
        await ROWS.find(ann, gone.id)
    assert (await ROWS.restore(ann, gone.id)).id == gone.id
    assert (await ROWS.restore(ann, gone.id)).id == gone.id
    gate.open()
    await one.read(stream.id)
    await answered(one, ann, stays.id, question="two")
    await ROWS.delete(ann, gone.id)
    ages, now = RowAges(), timezone.now()
    assert await orm.bulk(ages.drop_old, FINE, now) == (0, 0, 0, 0)
    late = now + timedelta(seconds=UNDO_SECONDS + 1)
    assert await orm.bulk(ages.drop_old, FINE, late) == (0, 0, 0, 1)
    assert await Message.objects.acount() == 2
    with pytest.raises(NotFound):
        await ROWS.restore(ann, gone.id)


async def test_unused_conversations_go_unless_they_are_pinned(ann: Caller) -> None:
    """KEEP_CONVERSATIONS_DAYS counts from the last message."""
    old, pinned, new = [await ROWS.create(ann) for _ in range(3)]
    await Conversation.objects.exclude(pk=new.id).aupdate(updated_at=timezone.now() - timedelta(days=8))
    await ROWS.change(ann, pinned.id, Change(is_pinned=True))
    assert await orm.bulk(RowAges(conversations_days=7).drop_old, FINE, timezone.now()) == (0, 0, 0, 1)
    assert {one.pk async for one in Conversation.objects.all()} == {pinned.id, new.id}
    assert old.id not in {pinned.id, new.id}


async def test_a_site_with_its_log_in_memory_sweeps_its_rows(one: Worker, gate: Gate, ann: Caller) -> None:
    """Deleted conversations are dropped; an answer of a process that has ended fails after a day, others stay."""
    gone, lost = await ROWS.create(ann), await ROWS.create(ann)
    gate.allow(2)
    stream = await start(one, ann, await prepare(ann, lost.id, question="one"))
    other = await start(one, ann, await prepare(ann, (await ROWS.create(ann)).id, question="two"))
    await Message.objects.aupdate(created_at=timezone.now() - timedelta(days=2))
    await ROWS.delete(ann, gone.id)
    await Conversation.objects.filter(pk=gone.id).aupdate(deleted_at=timezone.now() - timedelta(hours=1))
    streams = Streams({}, MemoryLog())
    streams._streams[other.id] = other
    await Sweeper(streams, RowAges()).round()
    assert not await Conversation.objects.filter(pk=gone.id).aexists()
    assert (await message_of(stream.id, state="failed")).error_code == "producer_lost"
    assert await message_of(other.id, state="running")
    gate.open()
    await one.read(other.id)


@pytest.mark.parametrize("has_conversations", [True, False])
async def test_redis_keeps_an_ended_log_until_a_purge_has_had_its_time(tmp_path: Path, has_conversations: bool) -> None:
    """With conversations Redis drops a log a day later than without; purges, which spare what is needed, as before."""
    with RedisServer(tmp_path) as server:
        models = {"MODELS": {"echo": {"PATH": "echo"}}, "STATE_DIR": str(tmp_path)}
        conf = {**models, "LOG": server.url, "CONVERSATIONS": has_conversations}
        with override_settings(STREAMSERVE=conf):
            log = resources.log_for(get_settings())
            await append(log, "ended", 1, [Done(finish_reason="stop")])
            async with Redis.from_url(server.url) as client:
                seconds = [await client.ttl(key) async for key in client.scan_iter("*ended*")]
            await log.aclose()
    assert seconds
    assert all((one > UNFINISHED_SECONDS) == has_conversations for one in seconds)


async def test_a_rating_is_of_an_answer(one: Worker, ann: Caller) -> None:
    """It is changed and taken back; a question has none."""
    conversation = await ROWS.create(ann)
    answer = await answered(one, ann, conversation.id, question="one")
    rated = await ROWS.rate(ann, conversation.id, answer.pk, rating=-1, comment="Wrong\0")
    assert (rated.rating, rated.comment) == (-1, "Wrong\N{REPLACEMENT CHARACTER}")
    assert (await ROWS.rate(ann, conversation.id, answer.pk, rating=None, comment="")).rating is None
    assert (await Message.objects.aget(pk=answer.pk)).rated_at is None
    with pytest.raises(BadRequest):
        await ROWS.rate(ann, conversation.id, str(answer.parent_id), rating=1, comment="")


async def test_conversations_and_their_messages_have_bounds(one: Worker, ann: Caller) -> None:
    """Beyond them a caller is told what to do."""
    rows = ConversationRows(Limits(max_conversations=1, max_conversation_messages=4))
    conversation = await rows.create(ann)
    with pytest.raises(QuotaExceeded, match="Delete some"):
        await rows.create(ann)
    for _ in range(2):
        await answered(one, ann, conversation.id, question="one")
    with pytest.raises(BadRequest, match="Begin another"):
        await rows.prepare(ann, conversation.id, Ask(conversation_id=conversation.id, question="three"))
    _, messages = await rows.whole(ann, conversation.id)
    assert len(messages) == 4


def test_a_title_is_the_first_words() -> None:
    """Whole words, in one line, of a bounded length."""
    assert first_words(" Why  is\nit late? ") == "Why is it late?"
    assert first_words("word " * 40) == "word " * 11 + "word…"
    assert first_words("x" * 200) == "x" * 60 + "…"


@pytest.mark.django_db(transaction=True)
def test_deleting_a_user_takes_its_conversations_in_so_many_queries() -> None:
    """10,000 messages in one branch: the number of queries grows with them, and not faster."""

    def num_queries(num: int) -> int:
        user = get_user_model().objects.create(username=f"u{num}")
        conversation = Conversation.objects.create(owner="u", tenant=f"user:{user.pk}", user=user)
        ids = [f"{num:08d}{index:024d}" for index in range(num)]
        Message.objects.bulk_create(
            Message(id=one, conversation=conversation, parent_id=before, role="user")
            for before, one in zip([None, *ids], ids, strict=False)
        )
        with CaptureQueriesContext(
            connection,
        ) as queries:
            user.delete()
        assert not Message.objects.exists()
        return len(queries)

    few, many = num_queries(1000), num_queries(10_000)
    assert many <= 11 * few
    assert many < 500
