"""Laws of `GET /usage`: a caller sees its own tenant's days, and their sum."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.test.utils import override_settings
from django.utils import timezone

from streamserve.models import UsageDay
from streamserve.web import site
from tests.conftest import body_of
from tests.web.conftest import make_caller

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("one_day")]


def a_day(ago: int, owner: str, tenant: str, **values: Any) -> None:
    values = {"model": "echo", "kind": "answer", "requests": 1, "completion_tokens": 5, **values}
    UsageDay.objects.create(day=timezone.localdate() - timedelta(days=ago), owner=owner, tenant=tenant, **values)


async def test_an_answer_is_in_the_usage_of_its_caller(alice: Any, root: Any) -> None:
    """After its end the day has one request with its tokens, for the caller alone."""
    own, other = await make_caller(alice), await make_caller(root)
    answer = await own.post("/streams", {"prompt": "tell me", "max_tokens": 8})
    assert b"event: done" in await body_of(answer)
    found: dict[str, Any] = {"usage": []}
    while not found["usage"]:
        found = (await own.get("/usage")).json()
    (day,) = found["usage"]
    assert (day["day"], day["model"], day["kind"]) == (timezone.localdate().isoformat(), "echo", "answer")
    assert (day["requests"], day["completion_tokens"], day["errors"]) == (1, 8, 0)
    assert found["total"]["completion_tokens"] == 8
    assert (await other.get("/usage")).json() == {
        "usage": [],
        "total": found["total"] | dict.fromkeys(found["total"], 0),
    }
    await site.reset()


async def test_days_are_summed_over_owners_of_a_tenant(alice: Any) -> None:
    """A user's sessions and keys stand together; `days` counts today; the newest come first."""
    tenant, own = f"user:{alice.pk}", await make_caller(alice)
    for ago, owner in ((0, tenant), (0, "key:1"), (6, "key:1"), (7, tenant)):
        await sync_to_async(a_day)(ago, owner, tenant)
    found = (await own.get("/usage?days=7")).json()
    assert [one["requests"] for one in found["usage"]] == [2, 1]
    assert found["total"]["requests"] == 3
    assert len((await own.get("/usage")).json()["usage"]) == 3
    await site.reset()


@pytest.mark.parametrize("query", ["days=0", "days=367", "days=x", "days=", "weeks=1"])
async def test_a_wrong_query_is_named(alice: Any, query: str) -> None:
    """A number of days beyond a leap year, none at all, another parameter."""
    response = await (await make_caller(alice)).get(f"/usage?{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == query.partition("=")[0]
    await site.reset()


async def test_a_site_that_keeps_none_says_so(alice: Any, settings: Any) -> None:
    """A 404 with its code."""
    with override_settings(STREAMSERVE={**settings.STREAMSERVE, "USAGE": False}):
        await site.reset()
        response = await (await make_caller(alice)).get("/usage")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "usage_off")
        await site.reset()
