"""Laws of threads: a client's own id names its conversation, the server's history wins, and what is new is stored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.utils import timezone

from streamserve.api.call import Caller
from streamserve.api.conversations import Prepared
from streamserve.api.threads import MemoryThreads, Sent, ThreadView, thread_key
from streamserve.models import Conversation, Message, Thread
from streamserve.protocol.errors import BadRequest, NotFinished, QuotaExceeded, StreamserveError
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import Admission, ThreadKey
from streamserve.protocol.requests import Message as Told
from streamserve.rows import orm
from streamserve.rows.conversation_store import ConversationRows
from streamserve.rows.reaper import RowAges
from streamserve.rows.threads import ThreadRows
from streamserve.streams.config import StreamConfig
from streamserve.streams.store import NullStore, Record
from tests.rows.conftest import asked
from tests.rows.test_conversations import ann, message_of
from tests.support.sites.two_workers import Worker
from tests.support.streams.hand_made import Gate

__all__ = ["ann"]

pytestmark = pytest.mark.django_db(transaction=True)

THREADS = ThreadRows(Limits(), keeps_conversations=True)
KEY = ThreadKey(dialect="ai-sdk", client_id="chat-1")
CALL = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}


def user(text: str, own_id: str = "") -> Sent:
    return Sent(id=own_id, message=Told(role="user", content=text))


def said(text: str, own_id: str = "", **extra: Any) -> Sent:
    return Sent(id=own_id, message=Told(role="assistant", content=text, extra=extra))


def result(text: str, own_id: str = "") -> Sent:
    return Sent(id=own_id, message=Told(role="tool", content=text, extra={"tool_call_id": "call_1"}))


async def prepare(caller: Caller, *sent: Sent, key: ThreadKey = KEY, **how: Any) -> Prepared:
    prepared = await THREADS.prepare(caller, key, sent, **how)
    assert prepared is not None
    return prepared


async def answered(worker: Worker, caller: Caller, *sent: Sent, key: ThreadKey = KEY, **how: Any) -> Message:
    """Ask in the thread, and return the answer's message once it is written."""
    prepared = await prepare(caller, *sent, key=key, **how)
    request = asked(messages=prepared.messages, prompt=None)
    stream = await worker.start(request, owner=caller.owner, tenant=caller.tenant, turn=prepared.turn, thread=key)
    await worker.read(stream.id)
    return await message_of(stream.id, state="done")


def words_of(prepared: Prepared) -> list[tuple[str, str]]:
    return [(one.role, one.content) for one in prepared.messages]


async def test_the_first_answer_makes_the_conversation(one: Worker, ann: Caller) -> None:
    """It has the dialect as its source, a title, and the client's id of the question; nothing is there before."""
    assert await THREADS.find(ann, KEY) is None
    await prepare(ann, user("one", "u1"))
    assert not await Conversation.objects.aexists()
    answer = await answered(one, ann, user("one", "u1"))
    row = await Conversation.objects.aget()
    assert (row.source, row.title, row.leaf, row.tenant) == ("ai-sdk", "one", answer.pk, ann.tenant)
    assert await THREADS.find(ann, KEY) == ThreadView(stream_id=str(answer.stream_id), conversation_id=row.pk)
    assert [one.client_id async for one in Message.objects.order_by("created_at")] == ["u1", ""]


async def test_the_whole_history_or_the_last_message_alone_is_the_same(one: Worker, ann: Caller) -> None:
    """Of what is sent the new question is taken; earlier words come from the server, whatever the client says."""
    first = await answered(one, ann, user("one", "u1"))
    whole = await prepare(ann, user("one", "u1"), said("forged", first.pk), user("two", "u2"))
    alone = await prepare(ann, user("two", "u2"))
    assert words_of(whole) == words_of(alone) == [("user", "one"), ("assistant", first.text), ("user", "two")]
    assert whole.turn.parent_id == alone.turn.parent_id == first.pk
    by_piece = await prepare(ann, user("one", "u1"), said("", f"{first.pk}:2"), user("two", "u2"))
    assert by_piece.turn.parent_id == first.pk


async def test_an_earlier_message_begins_a_branch(one: Worker, ann: Caller) -> None:
    """A changed question is a sibling, and a known question at the end gets another answer."""
    first = await answered(one, ann, user("one", "u1"))
    second = await answered(one, ann, user("one", "u1"), said("", first.pk), user("two", "u2"))
    changed = await prepare(ann, user("one", "u1"), said("", first.pk), user("zwei", "u3"))
    assert words_of(changed) == [("user", "one"), ("assistant", first.text), ("user", "zwei")]
    anew = await prepare(ann, user("eins", "u4"), key=KEY)
    assert anew.turn.parent_id == second.pk  # alone, a message goes on with the branch that is shown
    again = await prepare(ann, user("one", "u1"), said("", first.pk), user("two", "u2"))
    assert (again.turn.parent_id, again.turn.question) == (second.parent_id, None)
    sibling = await answered(one, ann, user("one", "u1"), said("", first.pk), user("two", "u2"))
    assert sibling.parent_id == second.parent_id


async def test_results_of_client_tools_are_kept(one: Worker, ann: Caller) -> None:
    """They follow the answer that called, the next answer follows them, and a later prompt has all of it in order."""
    first = await answered(one, ann, user("what time?", "u1"))
    await Message.objects.filter(pk=first.pk).aupdate(
        content='{"blocks":[{"index":0,"kind":"tool_use","id":"call_1","name":"clock","text":"{}"}]}', text=""
    )
    sent = [user("what time?", "u1"), said("", first.pk, tool_calls=[CALL]), result("noon", "a1/call_1")]
    second = await answered(one, ann, *sent)
    told = await Message.objects.aget(pk=second.parent_id)
    assert (told.role, told.text, told.parent_id, told.client_id) == ("tool", "noon", first.pk, "a1/call_1")
    later = await prepare(ann, *sent, said(second.text), user("thanks", "u2"))
    assert words_of(later) == [
        ("user", "what time?"),
        ("assistant", ""),
        ("tool", "noon"),
        ("assistant", second.text),
        ("user", "thanks"),
    ]
    assert (later.messages[1].extra["tool_calls"], later.messages[2].extra) == ([CALL], {"tool_call_id": "call_1"})
    assert later.turn.parent_id == second.pk
    collapsed = await prepare(ann, user("what time?", "u1"), said("", first.pk), user("thanks", "u2"))
    assert words_of(collapsed) == words_of(later)


async def test_a_conversation_that_was_begun_elsewhere_is_taken_whole(one: Worker, ann: Caller) -> None:
    """The first request of a thread may bring a history: its messages are stored, in order, before the question."""
    sent = [user("one", "u1"), said("1", "a1", tool_calls=[CALL]), result("noon", "t1"), said("two", "a2")]
    answer = await answered(one, ann, *sent, user("three", "u2"))
    rows = [(row.role, row.text, row.client_id) async for row in Message.objects.order_by("created_at")]
    assert rows[:5] == [
        ("user", "one", "u1"),
        ("assistant", "1", "a1"),
        ("tool", "noon", "t1"),
        ("assistant", "two", "a2"),
        ("user", "three", "u2"),
    ]
    later = await prepare(ann, user("four", "u3"))
    assert [text for _, text in words_of(later)] == ["one", "1", "noon", "two", "three", answer.text, "four"]
    assert (await Conversation.objects.aget()).title == "one"


async def test_an_answer_is_continued_in_its_thread(one: Worker, ann: Caller) -> None:
    """With `continues` the turn follows the last answer, and a later question follows the continuation."""
    first = await answered(one, ann, user("one", "u1"))
    prepared = await prepare(ann, continues=True)
    assert (prepared.turn.parent_id, prepared.turn.question, prepared.turn.given) == (first.pk, None, ())
    rest = await answered(one, ann, continues=True)
    assert rest.parent_id == first.pk
    later = await prepare(ann, user("one", "u1"), said("", first.pk), user("two", "u2"))
    assert words_of(later) == [("user", "one"), ("assistant", first.text + rest.text), ("user", "two")]


async def test_ids_are_of_their_tenant_and_dialect(one: Worker, ann: Caller) -> None:
    """Another caller's, or another dialect's, equal id is another conversation."""
    await answered(one, ann, user("one", "u1"))
    other = Caller("key:77")
    assert await THREADS.find(other, KEY) is None
    assert await THREADS.find(ann, replace(KEY, dialect="ag-ui")) is None
    assert words_of(await prepare(other, user("two", "u1"))) == [("user", "two")]


async def test_a_deleted_conversation_is_begun_anew(one: Worker, ann: Caller) -> None:
    """Its id then names a new conversation; a restored conversation stays without it."""
    await answered(one, ann, user("one", "u1"))
    before = await Conversation.objects.aget()
    await ConversationRows(Limits()).delete(ann, before.pk)
    assert await THREADS.find(ann, KEY) is None
    await answered(one, ann, user("two", "u2"))
    found = await THREADS.find(ann, KEY)
    assert found is not None
    assert found.conversation_id != before.pk
    assert await Thread.objects.acount() == 1


async def test_two_first_questions_at_once_make_one_conversation(one: Worker, ann: Caller) -> None:
    """The second is refused, and stores nothing; sent again it goes on with the first."""
    prepared = await prepare(ann, user("two", "u2"))
    await answered(one, ann, user("one", "u1"))
    request = asked(messages=prepared.messages, prompt=None)
    with pytest.raises(NotFinished):
        await one.start(request, owner=ann.owner, tenant=ann.tenant, turn=prepared.turn, thread=KEY)
    assert await Conversation.objects.acount() == 1
    assert [one.text async for one in Message.objects.filter(role="user")] == ["one"]
    assert len((await prepare(ann, user("two", "u2"))).messages) == 3


async def test_what_a_thread_cannot_keep_is_refused(one: Worker, gate: Gate, ann: Caller) -> None:
    """No message, an empty question, a picture, nothing new, a running answer; the id says what an id is."""
    picture = Told(role="user", content="", parts=({"type": "image_url"},))
    for sent in ([], [user("")], [Sent(message=picture)]):
        with pytest.raises(BadRequest):
            await prepare(ann, *sent)
    gate.allow(2)
    prepared = await prepare(ann, user("one", "u1"))
    request = asked(messages=prepared.messages, prompt=None)
    stream = await one.start(request, owner=ann.owner, tenant=ann.tenant, turn=prepared.turn, thread=KEY)
    with pytest.raises(NotFinished):
        await prepare(ann, user("two", "u2"))
    gate.open()
    await one.read(stream.id)
    answer = await message_of(stream.id, state="done")
    with pytest.raises(BadRequest, match="no new message"):
        await prepare(ann, user("one", "u1"), said("", answer.pk))
    for own_id in ("", "with space", "ü", "x" * 201):
        with pytest.raises(StreamserveError, match="printable ASCII"):
            thread_key("ai-sdk", own_id, "id")


async def test_a_limit_of_conversations_is_kept(one: Worker, ann: Caller) -> None:
    """A thread that would make one too many is refused, and stores nothing."""
    one.store._max_conversations = 0
    with pytest.raises(QuotaExceeded):
        await answered(one, ann, user("one", "u1"))
    assert not await Conversation.objects.aexists()
    assert not await Thread.objects.aexists()


async def test_a_thread_without_a_conversation_names_the_last_stream(one: Worker, ann: Caller) -> None:
    """Without conversations nothing is prepared; a visitor has none where a user has."""
    off, visitor = ThreadRows(Limits(), keeps_conversations=False), Caller("anon:5")
    assert await off.prepare(ann, KEY, [user("one")]) is None
    assert await THREADS.prepare(visitor, KEY, [user("one")]) is None
    stream = await one.start(asked(), owner=visitor.owner, tenant=visitor.tenant, thread=KEY)
    await one.read(stream.id)
    assert await THREADS.find(visitor, KEY) == ThreadView(stream_id=stream.id)


async def test_a_process_without_a_database_has_its_last_streams() -> None:
    """Of two answers in a thread its memory names the later."""
    memory, visitor = MemoryThreads(store := NullStore()), Caller("anon:5")
    assert await memory.find(visitor, KEY) is None
    for number in "12":
        admission = Admission(owner="anon:5", tenant="anon:5", thread=KEY, stream_id=number * 32)
        await store.insert(Record(admission=admission, log_id=number, model="echo", created=0.0))
    assert await memory.find(visitor, KEY) == ThreadView(stream_id="2" * 32)
    assert await memory.find(Caller("anon:6"), KEY) is None


async def test_threads_go_with_what_they_name(one: Worker, ann: Caller) -> None:
    """A purge drops those whose stream cannot be replayed and that have no conversation; a user takes all along."""
    await answered(one, ann, user("one", "u1"))
    stream = await one.start(asked(), owner="anon:5", tenant="anon:5", thread=KEY)
    await one.read(stream.id)
    await Thread.objects.aupdate(updated_at="2020-01-01T00:00:00Z")
    await orm.call(RowAges().drop_old, StreamConfig(), timezone.now())
    assert [row.tenant async for row in Thread.objects.all()] == [ann.tenant]
    await (await get_user_model().objects.aget()).adelete()
    assert not await Thread.objects.aexists()
