"""Laws of conversations, messages, share links and attachments in the admin, and of the export of ratings."""

from __future__ import annotations

import csv
import io
import json
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission
from django.db import connection
from django.test import AsyncClient, Client
from django.test.utils import CaptureQueriesContext, override_settings
from django.utils import timezone

from streamserve.admin import conversations, export
from streamserve.models import Attachment, Conversation, Message, Share, Stream
from streamserve.web import site
from tests.conftest import Caller, until_ready
from tests.support.sites.admin_rows import ANSWER, QUESTION, make_rows

pytestmark = pytest.mark.django_db(transaction=True)
LISTS = "/admin/streamserve"


@pytest.fixture
def admin(root: Any) -> Client:
    client = Client()
    client.force_login(root)
    return client


@pytest.fixture
def rows(transactional_db: Any) -> dict[str, str]:
    """An id of each kind of row."""
    return make_rows()


def page(client: Client, path: str) -> str:
    response = client.get(f"{LISTS}/{path}")
    assert response.status_code == 200, (path, response.status_code)
    return response.content.decode()


def looker(staff: Any, *codenames: str) -> Client:
    """Return the client of staff with these permissions."""
    staff.user_permissions.set(Permission.objects.filter(codename__in=codenames))
    client = Client()
    client.force_login(staff)
    return client


def chain(num: int, tenant: str = "user:1") -> Conversation:
    """Insert a conversation of one long branch."""
    conversation = Conversation.objects.create(owner=tenant, tenant=tenant)
    began = timezone.now()
    Message.objects.bulk_create(
        Message(
            id=f"{number:032x}",
            conversation=conversation,
            parent_id=f"{number - 1:032x}" if number else None,
            role="assistant" if number % 2 else "user",
            text=f"text {number}",
            created_at=began + timedelta(seconds=number),
        )
        for number in range(num)
    )
    return conversation


def test_question_and_answer_come_first(admin: Client, rows: dict[str, str]) -> None:
    """As text, with steps, thoughts and calls, sources and rating; before all figures. A link is of the web only."""
    shown = page(admin, f"message/{rows['message']}/change/")
    for text in (
        QUESTION,
        "Two payments.",
        "&quot;month&quot;: &quot;2026-10&quot;",
        "Reading the payments",
        "Rated bad",
    ):
        assert text in shown
        assert shown.index(text) < shown.index("Figures")
    assert "&lt;b&gt;to the same card&lt;/b&gt;" in shown
    assert 'href="https://help.example/refunds"' in shown
    assert "A source that is no address" in shown
    assert "javascript:" not in shown
    assert "=HYPERLINK(1) This is not what my bank says" in shown


def test_a_running_answer_says_so(admin: Client, rows: dict[str, str]) -> None:
    """And links to its stream, which links back."""
    running = Message.objects.get(state="running")
    link = f'href="{LISTS}/stream/{running.stream_id}/change/"'
    shown = page(admin, f"message/{running.pk}/change/")
    assert "still being written" in shown
    assert link in shown[: shown.index("Belongs to it")]
    back = page(admin, f"stream/{running.stream_id}/change/")
    assert f'href="{LISTS}/message/{running.pk}/change/"' in back
    assert f'href="{LISTS}/conversation/{running.conversation_id}/change/"' in back
    assert QUESTION not in back


def test_the_tree_is_an_indented_list(rows: dict[str, str]) -> None:
    """A message follows its parent; where the conversation branches, each branch is one deeper and has its number."""
    nodes, has_more = conversations.branches(rows["conversation"])
    seen = [(node["id"][:2], node["depth"], node["place"], node.get("is_shown", False)) for node in nodes]
    assert seen == [
        ("01", 0, "", True),
        ("02", 1, "1/2", True),
        ("04", 1, "", True),
        ("05", 1, "", False),
        ("03", 1, "2/2", False),
    ]
    assert not has_more


def test_a_long_conversation_is_shown_in_few_queries(admin: Client) -> None:
    """Of thousands of messages the first are shown, one as deep as the other; the list of messages has all."""
    conversation = chain(2_000)
    with CaptureQueriesContext(connection) as queries:
        shown = page(admin, f"conversation/{conversation.pk}/change/")
    assert len(queries) < 20
    assert shown.count('class="ss-excerpt"') == conversations.MAX_SHOWN
    assert "There are more" in shown
    assert f"role=all&amp;conversation__id__exact={conversation.pk}" in shown


def test_texts_take_the_permission(staff: Any, rows: dict[str, str]) -> None:
    """Titles take `view_conversation`, texts of messages and files `view_message`; without both no page opens."""
    conversation, message = (f"{name}/{rows[name]}/change/" for name in ("conversation", "message"))
    attachment, stream = (
        f"attachment/{rows['attachment']}/change/",
        f"stream/{Message.objects.get(state='running').stream_id}/change/",
    )
    nobody = looker(staff, "view_stream")
    for path in ("conversation/", conversation, "message/", message, "message/export/csv/", attachment, "share/"):
        assert nobody.get(f"{LISTS}/{path}").status_code == 403, path
    assert QUESTION not in page(nobody, stream)
    titles = looker(staff, "view_conversation", "view_attachment")
    assert QUESTION in page(titles, conversation)
    assert "You were not." not in page(titles, conversation)
    assert "date;amount" not in page(titles, attachment)
    assert titles.get(f"{LISTS}/message/").status_code == 403
    texts = looker(staff, "view_message", "view_conversation", "view_attachment")
    assert "You were not." in page(texts, conversation)
    assert "date;amount" in page(texts, attachment)
    only = looker(staff, "view_message")
    assert "charged twice because" in page(only, message)
    assert only.get(f"{LISTS}/{conversation}").status_code == 403


def test_bad_answers_of_this_week_are_a_link(admin: Client, rows: dict[str, str]) -> None:
    """The list shows answers; the ready link has the bad ones of seven days with their comments."""
    shown = page(admin, "message/")
    assert f'href="{LISTS}/message/?rating=bad&amp;rated=7"' in shown
    assert admin.get(f"{LISTS}/message/").context["cl"].result_count == 3
    bad = page(admin, "message/?rating=bad&rated=7")
    assert "1 message" in bad
    assert "bad: =HYPERLINK" in bad
    asked = {"rating=good": 0, "rating=any": 1, "rating=comment": 1, "role=user": 2, "role=all": 5, "q=maximilian": 3}
    for query, num in asked.items():
        assert admin.get(f"{LISTS}/message/?{query}").context["cl"].result_count == num, query
    Message.objects.filter(rating=-1).update(rated_at=timezone.now() - timedelta(days=8))
    assert "Nothing matches" in page(admin, "message/?rating=bad&rated=7")
    assert admin.get(f"{LISTS}/message/?rating=bad&rated=30").context["cl"].result_count == 1


def test_ratings_are_exported(admin: Client, rows: dict[str, str]) -> None:
    """What the filters leave, as CSV without formulas, and as JSON lines word for word."""
    csv_file = admin.get(f"{LISTS}/message/export/csv/?rating=bad&rated=7")
    assert csv_file["Content-Disposition"] == 'attachment; filename="answers.csv"'
    [row] = csv.DictReader(io.StringIO(csv_file.getvalue().decode()))
    assert (row["rating"], row["question"], row["answer"]) == ("bad", QUESTION, ANSWER)
    assert row["comment"].startswith("'=HYPERLINK(1)")
    [line] = admin.get(f"{LISTS}/message/export/jsonl/?rating=bad").getvalue().decode().splitlines()
    assert json.loads(line)["comment"].startswith("=HYPERLINK(1)")
    assert json.loads(line)["stream"] == Message.objects.get(rating=-1).stream_id
    assert admin.get(f"{LISTS}/message/export/xlsx/").status_code == 404


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", " =1", "\n=1"])
def test_no_cell_is_a_formula(text: str) -> None:
    """Whatever a text begins with."""
    assert export.in_cell(text) == f"'{text}"


def test_an_export_is_read_in_pages(admin: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row once, the newest first, also where times are equal; some rows a query."""
    chain(20)
    Message.objects.filter(pk__lt=f"{8:032x}").update(created_at=timezone.now())
    monkeypatch.setattr(export, "ROWS_AT_ONCE", 3)
    lines = admin.get(f"{LISTS}/message/export/jsonl/?role=all").getvalue().decode().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len({row["message"] for row in rows}) == len(rows) == 20
    assert [row["created"] for row in rows] == sorted((row["created"] for row in rows), reverse=True)


async def test_an_export_streams_over_asgi(root: Any, rows: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By an asynchronous iterator: a server would collect all of another before it sends any of it."""
    monkeypatch.setattr(export, "ROWS_AT_ONCE", 1)
    client = AsyncClient()
    await client.aforce_login(root)
    response = await client.get(f"{LISTS}/message/export/csv/")
    assert response.is_async  # type: ignore[attr-defined]
    parts = [part async for part in response]  # type: ignore[attr-defined]
    assert len(parts) == 1 + 3
    assert len(list(csv.DictReader(io.StringIO(b"".join(parts).decode())))) == 3


def test_a_conversation_is_deleted_after_a_question(admin: Client, staff: Any, rows: dict[str, str]) -> None:
    """With all it has, by the permission alone; what was deleted is in the admin's log without its title."""
    data = {"action": "delete_conversations", "_selected_action": [rows["conversation"]]}
    reader = looker(staff, "view_conversation")
    reader.post(f"{LISTS}/conversation/", {**data, "post": "yes"})
    asked = admin.post(f"{LISTS}/conversation/", data)
    assert "its 5 messages" in asked.content.decode()
    assert Conversation.objects.count() == 1
    Stream.objects.update(state="finished")
    Message.objects.filter(state="running").update(state="failed")
    done = admin.post(f"{LISTS}/conversation/", {**data, "post": "yes"}, follow=True)
    assert "1 conversation was deleted" in done.content.decode()
    assert not Conversation.objects.exists() | Message.objects.exists() | Share.objects.exists()
    entry = LogEntry.objects.get()
    assert (rows["conversation"] in entry.change_message, QUESTION in entry.change_message) == (True, False)


def test_a_branch_of_thousands_is_deleted(admin: Client) -> None:
    """Without following each message to the next."""
    conversation = chain(5_000)
    data = {"action": "delete_conversations", "_selected_action": [conversation.pk], "post": "yes"}
    with CaptureQueriesContext(connection) as queries:
        admin.post(f"{LISTS}/conversation/", data)
    assert not Message.objects.exists()
    assert len(queries) < 200


def test_share_links_are_revoked(admin: Client, staff: Any, rows: dict[str, str]) -> None:
    """By the permission `revoke_share`; the list shows whose they are."""
    data = {"action": "revoke", "_selected_action": [rows["share"]]}
    looker(staff, "view_share").post(f"{LISTS}/share/", data)
    assert Share.objects.get().state == "expired"
    looker(staff, "view_share", "revoke_share").post(f"{LISTS}/share/", data)
    assert Share.objects.get().state == "revoked"
    assert "nightly export" in page(admin, "share/")
    assert f"{LISTS}/conversation/{rows['conversation']}/change/" in page(admin, "share/")


@pytest.mark.parametrize("model", ["conversation", "message", "share", "attachment"])
def test_rows_are_read_only(admin: Client, rows: dict[str, str], model: str) -> None:
    """None is added, changed or deleted by a form; a list that is empty says what will be there."""
    assert admin.get(f"{LISTS}/{model}/add/").status_code == 403
    for form in ("change", "delete"):
        assert admin.post(f"{LISTS}/{model}/{rows[model]}/{form}/", {"post": "yes"}).status_code == 403
    for one in (Share, Attachment, Message, Conversation):
        one.objects.all().delete()
    assert 'class="ss-empty"' in page(admin, f"{model}/")


def test_lists_take_few_queries(admin: Client) -> None:
    """However many rows a page has."""

    def num_queries() -> list[int]:
        counts = []
        for model in ("conversation", "message"):
            with CaptureQueriesContext(connection) as queries:
                page(admin, f"{model}/")
            counts.append(len(queries))
        return counts

    chain(2)
    few = num_queries()
    Message.objects.all().delete()
    chain(40)
    assert num_queries() == few


@pytest.mark.parametrize(
    "path",
    [
        "stream/",
        "stream/?model=m",
        "job/",
        "conversation/",
        "message/",
        "message/?role=all",
        "message/?rating=bad&rated=7",
        "message/?rating=any",
    ],
)
def test_no_list_sorts_its_rows(admin: Client, rows: dict[str, str], path: str) -> None:
    """They come in the order of an index, so that a page of a million rows reads a page."""
    if connection.vendor != "sqlite":
        pytest.skip("the plan is SQLite's")
    listed = admin.get(f"{LISTS}/{path}").context["cl"]
    plan = listed.queryset.explain()
    assert "USING INDEX" in plan, plan
    assert "TEMP B-TREE FOR ORDER BY" not in plan, plan


async def test_running_answers_are_stopped_first(root: Any, alice_key: str) -> None:
    """An answer whose conversation is deleted while it is being written ends, and takes the engine no longer."""
    settings = {"TESTING": True, "CONVERSATIONS": True, "ECHO_STEP_SECONDS": 0.02}
    with override_settings(STREAMSERVE=settings):
        await until_ready()
        caller = Caller(key=alice_key)
        made = (await caller.post("/conversations", {})).json()
        ask = {"content": "hi", "max_tokens": 2000, "ignore_eos": True}
        answer = await caller.post(f"/conversations/{made['id']}/messages", ask)
        reading = aiter(answer)
        await anext(reading)
        client = AsyncClient()
        await client.aforce_login(root)
        data = {"action": "delete_conversations", "_selected_action": [made["id"]], "post": "yes"}
        await client.post(f"{LISTS}/conversation/", data)
        rest = b"".join([chunk async for chunk in reading])
        assert b'"finish_reason":"cancelled"' in rest
        assert not await Message.objects.aexists()
        await site.reset()
