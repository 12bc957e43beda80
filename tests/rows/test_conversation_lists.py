"""Lists of conversations and the search in them: order, pages, number of queries, and the indexes that they use."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from streamserve.api.conversations import ConversationView, Listed
from streamserve.protocol.errors import NotFound
from streamserve.rows.conversation_lists import page_of, tsquery
from streamserve.rows.conversations import Conversation, Message

pytestmark = pytest.mark.django_db

BEGUN = datetime(2026, 11, 1, tzinfo=UTC)
MANY = 10_000
MOST_QUERIES = 4


def make(title: str = "", *texts: str, tenant: str = "user:1", **columns: Any) -> str:
    """Make a conversation with messages of these texts; return its id."""
    row = Conversation.objects.create(owner=tenant, tenant=tenant, title=title, **columns)
    for text in texts:
        Message.objects.create(conversation=row, role="user", text=text)
    return row.pk


def listed(tenant: str = "user:1", **fields: Any) -> list[ConversationView]:
    """Return all pages of a list."""
    found: list[ConversationView] = []
    has_more = True
    while has_more:
        page, has_more = page_of(tenant, Listed(**{"limit": 3, **fields, "after": found[-1].id if found else ""}))
        found += page
    return found


def titles(**fields: Any) -> list[str]:
    return sorted(one.title for one in listed(**fields))


def test_pages_have_each_conversation_once_in_order() -> None:
    """Pinned conversations come first, then the newest; equal times are told apart by their ids."""
    drawn = random.Random(7)
    for number in range(20):
        make(f"{number}", is_pinned=drawn.random() < 0.3, updated_at=BEGUN + timedelta(hours=drawn.randrange(6)))
    make("another's", tenant="user:2")
    make("deleted", deleted_at=BEGUN)
    found = listed()
    assert len({one.id for one in found}) == len(found) == 20
    assert found == sorted(found, key=lambda one: (one.is_pinned, one.updated_at, one.id), reverse=True)


def test_a_page_begins_after_a_conversation_that_was_deleted_since() -> None:
    """A list does not end because its last conversation is gone; another tenant's id is not found."""
    ids = [make(updated_at=BEGUN - timedelta(hours=hours)) for hours in range(4)]
    Conversation.objects.filter(pk=ids[1]).update(deleted_at=BEGUN)
    found, has_more = page_of("user:1", Listed(limit=2, after=ids[1]))
    assert ([one.id for one in found], has_more) == (ids[2:], False)
    with pytest.raises(NotFound):
        page_of("user:2", Listed(limit=2, after=ids[1]))


def test_a_list_may_be_of_one_source() -> None:
    """`source` names what has begun a conversation."""
    make("from the page", source="chat")
    make("from a program", source="api")
    assert titles(source="api") == ["from a program"]


def test_a_conversation_runs_while_an_answer_of_it_does() -> None:
    """`is_running` is of the messages, in the same query."""
    running, done = make("runs"), make("done")
    for conversation, state in ((running, "running"), (done, "done")):
        Message.objects.create(conversation_id=conversation, role="assistant", state=state)
    assert {one.title: one.is_running for one in listed()} == {"runs": True, "done": False}


def test_search_finds_words_of_titles_and_of_texts() -> None:
    """Every word counts, in any order; the last may be unfinished. Case does not matter."""
    make("Late fees", "When is the invoice due?")
    make("Holidays", "Where is the sea?")
    assert titles(search="FEES late") == ["Late fees"]
    assert titles(search="due invo") == ["Late fees"]
    assert titles(search="the") == ["Holidays", "Late fees"]
    assert titles(search="invoice sea") == []
    assert titles(search="  ") == ["Holidays", "Late fees"]


@pytest.mark.parametrize(
    "search", ["%", "_", "\\", "'", '"', "50%_off", "':*", "a & b | !c", "<->", "x\0y", "\0", "???", "ä" * 200]
)
def test_signs_of_a_query_language_are_text(search: str) -> None:
    """Nothing in a search is a wildcard or an operator, and nothing is an error."""
    make("plain", "plain")
    make("50%_off \\ sale", "It's 50%_off")
    assert "plain" not in titles(search=search)


def test_search_finds_no_other_tenants_conversation() -> None:
    """Neither by its title nor by its texts, and no deleted conversation."""
    make("secret", "secret", tenant="user:2")
    make("secret", "secret", deleted_at=BEGUN)
    assert titles(search="secret") == []


def test_a_text_beyond_what_is_indexed_can_be_inserted() -> None:
    """PostgreSQL's index refuses entries above a megabyte: only the beginning of a text is in it."""
    text = " ".join(f"{number:x}" for number in range(300_000))
    make("long", "begin " + text)
    assert titles(search="begin 2a") == ["long"]


@pytest.fixture
def many(django_db_blocker: Any, db: None) -> str:
    """A tenant with MANY conversations of two messages each, and as many of another tenant."""
    for tenant in ("user:1", "user:2"):
        rows = [
            Conversation(
                owner=tenant, tenant=tenant, title=f"About {number}", updated_at=BEGUN + timedelta(seconds=number)
            )
            for number in range(MANY)
        ]
        Conversation.objects.bulk_create(rows, batch_size=2000)
        Message.objects.bulk_create(
            [
                Message(conversation=row, role=role, text=f"{row.title}: word{number} and {role}")
                for number, row in enumerate(rows)
                for role in ("user", "assistant")
            ],
            batch_size=2000,
        )
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    return "user:1"


def captured(work: Callable[[], Any]) -> list[str]:
    """Return the statements that `work` sends."""
    with CaptureQueriesContext(
        connection,
    ) as context:
        work()
    return [query["sql"] for query in context.captured_queries if query["sql"].startswith(("SELECT", "WITH"))]


def explained(statement: str) -> str:
    with connection.cursor() as cursor:
        prefix = "EXPLAIN " if connection.vendor == "postgresql" else "EXPLAIN QUERY PLAN "
        cursor.execute(prefix + statement)
        return "\n".join(" ".join(map(str, row)) for row in cursor.fetchall())


def test_lists_of_many_take_few_queries_and_their_indexes(many: str) -> None:
    """10,000 conversations: at most four queries for every list; a page is read from the index, without a sort."""
    first = page_of(many, Listed(limit=50))[0]
    for fields in ({}, {"after": first[-1].id}, {"source": "chat"}):
        statements = captured(lambda fields=fields: page_of(many, Listed(limit=50, **fields)))  # type: ignore[misc]
        assert len(statements) <= MOST_QUERIES
        plan = explained(statements[-1])
        assert "streamserve_conversations_of" in plan, plan
        assert "TEMP B-TREE" not in plan, plan
    statements = captured(lambda: page_of(many, Listed(limit=50, search="word77", after=first[-1].id)))
    assert len(statements) <= MOST_QUERIES
    plan = explained(statements[-1])
    if connection.vendor == "postgresql":
        assert "streamserve_messages_search" in plan, plan
    else:
        assert "streamserve_conversations_of" in plan, plan


def test_search_among_many_finds_the_one(many: str) -> None:
    """Its own tenant's, by a word that only one text has."""
    assert titles(search="word4242") == ["About 4242"]


def test_a_query_for_postgresql_has_every_word() -> None:
    """The last word is a beginning. A search without a word asks for nothing."""
    assert tsquery("late fees") == "'late' & 'fees':*"
    assert tsquery("it's") == "'it' & 's':*"
    assert tsquery("?!") == ""
