"""Laws of the admin's page "From GPU to glass": its figures are those of the rows, its charts are its tables."""

from __future__ import annotations

import secrets
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from streamserve.admin import glass
from streamserve.models import Stream

pytestmark = pytest.mark.django_db
PAGE = "/admin/streamserve/stream/glass/"
PHASES = {"network_in": 9.0, "auth": 0.1, "intake": 0.1, "queue": 0.2, "prefill": 0.4, "first_decode": 0.1}


@pytest.fixture
def admin(root: Any) -> Client:
    client = Client()
    client.force_login(root)
    return client


def answered(*, minutes: float = 1.0, model: str = "small", network: float | None = None, **columns: Any) -> None:
    """Add an answer of so many minutes ago; with `network` its reader has reported its times."""
    reader = None
    if network is not None:
        first, ended = 0.8 + network, 2.9 + network
        reader = {"headers": first, "first_delta": first, "first_paint": first + 0.1, "ended": ended}
        reader |= {"last_paint": ended + 0.1}
    shown = {"ttft_seconds": 0.8, "phases": {**PHASES, "generation": 2.0}, "reader": reader, **columns}
    Stream.objects.create(
        id=secrets.token_hex(16),
        log_id=secrets.token_hex(6),
        owner="user:1",
        tenant="user:1",
        model=model,
        state="finished",
        created_at=timezone.now() - timedelta(minutes=minutes),
        **shown,
    )


def sums_of(client: Client, query: str = "") -> dict[str, list[str]]:
    page = client.get(PAGE + query)
    assert page.status_code == 200
    return {name: values for name, _words, _meaning, values in page.context["sums"]}


def test_hops_until_the_first_token(admin: Client) -> None:
    """The server's hops of every answer, network and render of those whose readers reported; another clock's not."""
    answered()
    answered(network=0.5)
    assert {name: values[1] for name, values in sums_of(admin).items()} == {
        "intake": "200 ms",
        "queue": "200 ms",
        "prefill": "400 ms",
        "network": "500 ms",
        "render": "100 ms",
        "reported": "800 ms",
        "glass": "1.4 s",
    }


def test_hops_until_the_whole_answer(admin: Client) -> None:
    """The decode as well; what is parked, or no phase of an engine, is `other`."""
    answered(network=0.5, phases={**PHASES, "generation": 1.5, "parked": 0.5})
    shown = sums_of(admin, "?until=whole")
    assert {name: shown[name][0] for name in ("decode", "other", "network")} == {
        "decode": "1.6 s",
        "other": "500 ms",
        "network": "500 ms",
    }


@pytest.mark.parametrize(("network", "hop"), [(0.5, "network"), (0.001, "")])
def test_the_hop_is_named_where_they_part(admin: Client, network: float, hop: str) -> None:
    """In a sentence, with the longest hop; where they do not part the page says so."""
    answered(network=network)
    page = admin.get(PAGE)
    assert page.context["parting"].hop == hop
    assert ("is-parted" in page.content.decode()) == bool(hop)
    assert page.context["longest"] == f"The longest hop is {'network: p95 500' if hop else 'prefill: p95 400'} ms."


def test_without_reports_the_server_s_side_is_shown(admin: Client) -> None:
    """As of a site whose readers are programs."""
    answered()
    assert list(sums_of(admin)) == ["intake", "queue", "prefill", "server"]
    assert "No reader has reported its times" in admin.get(PAGE).content.decode()


def test_bars_are_stacked_and_beside_each_other(admin: Client) -> None:
    """A column's hops stand on each other and fill the chart where it is highest; each has words."""
    answered(network=0.5)
    answered(minutes=150, network=0.0)
    page = admin.get(PAGE)
    stack = [bar for bar in page.context["stack"] if bar.x == max(one.x for one in page.context["stack"])]
    assert [bar.name for bar in stack] == ["intake", "queue", "prefill", "network", "render"]
    for lower, upper in pairwise(stack):
        assert upper.y + upper.height == pytest.approx(lower.y, abs=0.02)
    assert sum(bar.height for bar in stack) == pytest.approx(160, abs=0.05)
    assert stack[3].title == "network, p95: 500 ms"
    server, seen = page.context["sides"][-2:]
    assert (server.name, seen.name) == ("reported", "glass")
    assert server.x + server.width == pytest.approx(seen.x, abs=0.02)
    assert len(page.context["rows"]) == 2


def test_what_is_chosen_stays_in_the_links(admin: Client) -> None:
    """Span, model and percentile; what is chosen wrongly is the page as it begins."""
    answered(model="small")
    answered(model="large", ttft_seconds=5.0, phases={"prefill": 5.0})
    answered(model="small", minutes=60 * 30)
    assert admin.get(PAGE).context["num_answers"] == 2
    page = admin.get(f"{PAGE}?hours=168&model=small&percent=50")
    assert page.context["num_answers"] == 2
    assert 'href="?hours=168&amp;until=whole&amp;percent=50&amp;model=small"' in page.content.decode()
    assert [words for words, _url, _on in page.context["models"][1:]] == ["large", "small"]
    assert admin.get(f"{PAGE}?hours=5&percent=x&until=y").context["num_answers"] == 2


def test_it_reads_the_newest_rows_in_few_queries(admin: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many queries with many answers as with one; it says where rows are left out."""

    def num_queries() -> int:
        with CaptureQueriesContext(connection) as queries:
            admin.get(PAGE)
        return len(queries)

    answered()
    before = num_queries()
    for _ in range(20):
        answered()
    assert num_queries() == before
    monkeypatch.setattr(glass, "MAX_ROWS", 5)
    page = admin.get(PAGE)
    assert page.context["num_answers"] == 5
    assert "the newest 5 answers" in page.content.decode()


def test_an_empty_page_says_what_will_be_there(admin: Client) -> None:
    """Answers that failed have no times; the list links the page, and staff without the permission sees none."""
    answered(ttft_seconds=None, phases=None, error_code="timeout")
    assert "No answer has ended in this span" in admin.get(PAGE).content.decode()
    assert PAGE in admin.get("/admin/streamserve/stream/").content.decode()
    staff = Client()
    staff.force_login(get_user_model().objects.create_user("staff", is_staff=True))
    assert staff.get(PAGE).status_code == 403
