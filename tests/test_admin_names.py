"""Laws of what the admin's lists and pages say: names, times, links, and what will be there; in few queries."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils.html import escape

from streamserve.admin import records
from streamserve.models import ApiKey, Job, Stream, Watch
from tests.support.sites.admin_rows import make_rows

pytestmark = pytest.mark.django_db
LISTS = "/admin/streamserve"


@pytest.fixture
def admin(root: Any) -> Client:
    client = Client()
    client.force_login(root)
    return client


def make_stream(number: int, owner: str, **fields: Any) -> Stream:
    pk = f"{number:032x}"
    fields = {"tenant": owner, "model": "m", "log_id": pk[-12:], **fields}
    return Stream.objects.create(id=pk, owner=owner, **fields)


def page(client: Client, path: str) -> str:
    response = client.get(f"{LISTS}/{path}")
    assert response.status_code == 200, path
    return response.content.decode()


def test_owners_have_names(admin: Client, alice: Any, alice_key: str) -> None:
    """A user's and a key's, a visitor's beginning, and those of users and keys that are gone."""
    key = ApiKey.objects.get()
    owners = [f"user:{alice.pk}", f"key:{key.pk}", f"anon:{'5' * 32}", "user:4711", "key:4712", "user:x", "other"]
    for number, owner in enumerate(owners):
        make_stream(number, owner)
    shown = page(admin, "stream/")
    names = ["alice", records.shortened(str(key), 20), "visitor 55555555", "user 4711, deleted", "key 4712, deleted"]
    for name in [*names, "user x, deleted", "other"]:
        assert f">{escape(name)}<" in shown
    for number, owner in enumerate(owners):
        assert owner in page(admin, f"stream/{number:032x}/change/")
    own = page(admin, f"stream/{0:032x}/change/")
    assert f'<a href="/admin/auth/user/{alice.pk}/change/">alice</a>' in own
    assert f'<a href="{LISTS}/apikey/{key.pk}/change/">' in page(admin, f"stream/{1:032x}/change/")


def test_names_take_a_query_a_page(admin: Client) -> None:
    """Twenty owners are asked for at once, users and keys."""

    def num_queries() -> int:
        with CaptureQueriesContext(
            connection,
        ) as queries:
            page(admin, "stream/")
        return len(queries)

    make_stream(0, f"user:{get_user_model().objects.create_user('u').pk}")
    make_stream(1, f"key:{ApiKey.objects.make(name='k')[0].pk}")
    few = num_queries()
    for number in range(2, 22, 2):
        make_stream(number, f"user:{get_user_model().objects.create_user(f'u{number}').pk}")
        make_stream(number + 1, f"key:{ApiKey.objects.make(name=f'k{number}')[0].pk}")
    assert num_queries() == few


def test_a_name_finds_its_rows(admin: Client, alice: Any, bob: Any, alice_key: str) -> None:
    """The search takes a user's name, a key's name, prefix or text, and the beginning of an id."""
    key = ApiKey.objects.get()
    make_stream(1, f"user:{alice.pk}")
    make_stream(2, f"key:{key.pk}", tenant=key.tenant)
    make_stream(3, f"user:{bob.pk}")
    make_stream(0xABC << 116, "anon:1")
    asked = {"alice": 2, key.prefix: 1, key.name: 1, f"key:{key.pk}": 1, f"user:{bob.pk}": 1, "abc": 1, "carol": 0}
    for term, num in asked.items():
        response = admin.get(f"{LISTS}/stream/", {"q": term})
        assert response.context["cl"].result_count == num, term


def test_times_have_seconds(admin: Client) -> None:
    """In lists and on the rows' pages; a time of another year has its year."""
    when = datetime(2024, 3, 4, 12, 6, 7, tzinfo=UTC)
    make_stream(1, "user:1", created_at=when)
    for path in ("stream/", f"stream/{1:032x}/change/"):
        assert '<time datetime="2024-03-04T' in page(admin, path)
        assert "4 Mar 2024, " in page(admin, path)
        assert ":06:07</time>" in page(admin, path)


def test_rows_lead_to_each_other(admin: Client) -> None:
    """Job and stream, watch and stream, webhook message and job, batch and file, each to the other."""
    rows = make_rows()
    job, watch = Job.objects.get(), Watch.objects.get()
    ways = [
        (f"job/{job.pk}", f"stream/{job.stream_id}"),
        (f"watch/{watch.pk}", f"stream/{watch.stream_id}"),
        (f"webhookdelivery/{rows['webhookdelivery']}", f"job/{job.pk}"),
        (f"batch/{rows['batch']}", f"storedfile/{rows['storedfile']}"),
        (f"storedfile/{rows['storedfile']}", f"batch/{rows['batch']}"),
        (f"stream/{job.stream_id}", f"job/{job.pk}"),
    ]
    for here, there in ways:
        assert f'href="{LISTS}/{there}/change/"' in page(admin, f"{here}/change/"), (here, there)
    assert f'href="{LISTS}/watch/?stream_id={watch.stream_id}"' in page(admin, f"stream/{watch.stream_id}/change/")
    for pk, model in ((job.stream_id, "job"), (watch.stream_id, "watch")):
        assert f"{LISTS}/stream/{pk}/change/" in page(admin, f"{model}/")


def test_where_it_runs_is_folded(admin: Client) -> None:
    """Producer, fence and log id are for those who look for them."""
    rows = make_rows()
    for model in ("stream", "job", "batch", "webhookdelivery"):
        shown = page(admin, f"{model}/{rows[model]}/change/")
        _, folded = shown.split("<details><summary>", 1)
        assert "Where it runs" in folded
        assert shown.index("field-fence") > shown.index("Where it runs")


@pytest.mark.parametrize(
    "model", ["apikey", "stream", "watch", "job", "webhookdelivery", "worker", "batch", "storedfile"]
)
def test_an_empty_list_says_what_will_be_there(admin: Client, model: str) -> None:
    """And how it comes about; a search or filter that finds nothing says so instead."""
    empty = page(admin, f"{model}/")
    assert 'class="ss-empty"' in empty
    assert "Nothing matches" not in empty
    if model != "worker":
        assert "Nothing matches" in page(admin, f"{model}/?q=nowhere")


def test_no_more_rows_are_counted_than_are_paged(admin: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million rows are not counted at each look: the count ends at a bound, and the page says that there are more."""
    monkeypatch.setattr(records, "MAX_COUNTED", 3)
    for number in range(3):
        make_stream(number, "user:1")
    assert "There are more" not in page(admin, "stream/")
    make_stream(3, "user:1")
    with CaptureQueriesContext(connection) as queries:
        shown = page(admin, "stream/")
    assert "only the first 3 are counted" in shown
    counts = [query["sql"] for query in queries if "COUNT(" in query["sql"] and "streamserve_stream" in query["sql"]]
    assert counts
    assert all("LIMIT 4" in sql and "ORDER BY" not in sql for sql in counts)


def test_a_filter_offers_what_new_rows_have(admin: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choices are those of the newest rows, and the chosen value."""
    monkeypatch.setattr(records, "NUM_NEWEST", 2)
    for number, model in enumerate(("old", "new", "newer")):
        make_stream(number, "user:1", model=model, created_at=datetime(2026, 1, 1 + number, tzinfo=UTC))
    shown = page(admin, "stream/")
    assert "?model=new" in shown
    assert "?model=newer" in shown
    assert "?model=old" not in shown
    assert "Model: <b>old</b>" in page(admin, "stream/?model=old")
