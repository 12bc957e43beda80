"""Laws of usage: an answer is added to its owner's day once, to the token, whatever dies."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest
from django.db import connection
from django.test import override_settings
from django.utils import timezone

from streamserve.api.call import Caller
from streamserve.api.usage import Used
from streamserve.conf import get_problems
from streamserve.dialects.batches import RowAnswer
from streamserve.models import Stream as StreamRow
from streamserve.models import UsageDay
from streamserve.protocol.embeddings import EmbedRequest
from streamserve.protocol.errors import BadRequest, StreamserveError
from streamserve.protocol.events import Usage
from streamserve.protocol.prices import Price
from streamserve.protocol.requests import Admission
from streamserve.rows import orm, usage
from streamserve.rows.reaper import RowAges, Sweeper
from streamserve.rows.receivers import note_refusal
from tests.rows.conftest import NUM_TOKENS, asked
from tests.support.sites.rows import in_row
from tests.support.sites.two_workers import Worker
from tests.support.streams.hand_made import Gate, until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("one_day")]

PRICE = {"MODELS": {"echo": {"PATH": "echo"}}, "LOG": "memory", "CLIENT": "thread"}


@pytest.fixture(autouse=True)
def no_refusals() -> Iterator[None]:
    """Each test begins without refusals that wait to be written."""
    usage._noted.clear()
    yield
    usage._noted.clear()


async def answered(worker: Worker, **decided: Any) -> str:
    stream = await worker.start(asked(), **decided)
    await worker.read(stream.id)
    await in_row(stream.id, state="finished")
    return stream.id


async def the_day(**values: Any) -> UsageDay:
    """Return the only row with these values."""
    return await UsageDay.objects.aget(**values)


async def test_an_answer_is_added_to_its_owners_day(one: Worker) -> None:
    """Two answers make one row, with the sums of what their ends say, and the seconds that engines worked."""
    ids = [await answered(one), await answered(one)]
    rows = [await StreamRow.objects.aget(pk=pk) for pk in ids]
    day = await the_day()
    assert (day.day, day.owner, day.tenant, day.model, day.kind) == (
        timezone.localdate(),
        "user:1",
        "user:1",
        "echo",
        "answer",
    )
    assert (day.requests, day.errors, day.refused) == (2, 0, 0)
    assert day.prompt_tokens == sum(row.prompt_tokens for row in rows)
    assert day.cached_tokens == sum(row.cached_tokens for row in rows)
    assert day.completion_tokens == sum(row.completion_tokens for row in rows) == 2 * NUM_TOKENS
    computed = sum(row.phases.get(name, 0.0) for row in rows for name in ("prefill", "first_decode", "generation"))
    assert day.engine_seconds == pytest.approx(computed, abs=0.001)


async def test_rows_are_apart_by_owner_model_kind_and_team(one: Worker) -> None:
    """A key of the same user, a job, and an answer that a team is counted for have rows of their own."""
    await answered(one)
    await answered(one, owner="key:3")
    await answered(one, on_disconnect="job")
    await answered(one, counted_as="team:red")
    found = {(row.owner, row.kind, row.team) async for row in UsageDay.objects.all()}
    assert found == {
        ("user:1", "answer", ""),
        ("key:3", "answer", ""),
        ("user:1", "job", ""),
        ("user:1", "answer", "red"),
    }


async def test_an_answer_that_two_processes_end_is_added_once(one: Worker, two: Worker, gate: Gate) -> None:
    """One takes over from a process that is taken for dead; both write the end, and usage has it once."""
    gate.allow(2)
    stream = await one.start(asked(), on_disconnect="finish")
    reading = asyncio.create_task(one.read(stream.id))
    await until(lambda: stream.last_seq > 2, "it has tokens")
    one.release_lock()
    await two.reaper.round()
    gate.open()
    await reading
    await two.read(stream.id)
    await in_row(stream.id, state="finished")
    summary = replace(stream.summary(), finish_reason="length", usage=Usage(prompt_tokens=1, completion_tokens=1))
    await one.store.finish(summary, last_seq=5, text="")
    row = await StreamRow.objects.aget(pk=stream.id)
    day = await the_day()
    assert (day.requests, day.completion_tokens) == (1, row.completion_tokens)


async def test_a_lost_answer_is_an_error(one: Worker, two: Worker) -> None:
    """What the reaper ends, since its events are gone, counts as a request with an error."""
    dead = f"{one.workers.host}-dead"
    stream = await one.start(asked())
    await one.read(stream.id)
    await in_row(stream.id, state="finished")
    await UsageDay.objects.all().adelete()
    await one.log.drop(stream.log_id)
    await StreamRow.objects.filter(pk=stream.id).aupdate(state="running", producer=dead, on_disconnect="abort")
    await two.reaper.round()
    day = await the_day()
    assert (day.requests, day.errors, day.completion_tokens) == (1, 1, 0)


async def test_refused_requests_are_counted(one: Worker) -> None:
    """Those of known callers, in memory until the reaper's next round; a failure of the server is none."""
    caller = Caller("user:1")
    for error in (BadRequest("no"), BadRequest("no"), StreamserveError("failed")):
        note_refusal(error, caller, "http", "echo")
    note_refusal(BadRequest("no"), None, "http", "echo")
    assert not await UsageDay.objects.aexists()
    await one.reaper.round()
    await one.reaper.round()
    day = await the_day()
    assert (day.requests, day.refused, day.owner) == (0, 2, "user:1")


async def test_embeddings_are_counted(one: Worker) -> None:
    """As refusals are; rows of batches as such."""
    asked_for = EmbedRequest(model="search", inputs=("a",))
    admission = Admission(owner="user:1", tenant="user:1")
    for request in (asked_for, asked_for, replace(asked_for, is_batch=True)):
        usage.note_embedded(request, admission, 7)
    await one.reaper.round()
    day = await the_day(kind="embedding")
    assert (day.model, day.requests, day.prompt_tokens, day.owner) == ("search", 2, 14, "user:1")
    assert (await the_day(kind="batch")).prompt_tokens == 7


async def test_where_logs_are_in_memory_the_sweeper_writes_refusals(one: Worker) -> None:
    """There is no reaper there."""
    note_refusal(BadRequest("no"), Caller("user:1"), "http", "echo")
    await Sweeper(one.streams, RowAges()).round()
    assert (await the_day()).refused == 1


async def test_rows_of_a_batch_are_added_and_cost_half(one: Worker) -> None:
    """Rows that are stored together are added together, by model."""
    row = RowAnswer(
        stream_id="1",
        model="echo",
        usage=Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=5, reasoning_tokens=2),
        finish_reason="stop",
        error_code="",
        seconds=1.0,
        ttft_seconds=None,
        phases={"queue": 9.0, "prefill": 0.5, "generation": 0.25},
    )
    price = {"PROMPT": 2.0, "CACHED": 0.5, "COMPLETION": 10.0}
    with override_settings(STREAMSERVE={**PRICE, "PRICES": {"echo": price}}):
        await orm.call(usage.add_rows, [row, None, row], "key:3", "user:1")
        await orm.call(usage.add_rows, [replace(row, error_code="engine_died", finish_reason="")], "key:3", "user:1")
    day = await the_day(kind="batch")
    assert (day.requests, day.prompt_tokens, day.cached_tokens, day.completion_tokens) == (3, 30, 12, 15)
    assert (day.reasoning_tokens, day.errors, day.engine_seconds) == (6, 1, 2.25)
    assert day.cost == 3 * (6 * Decimal(2) + 4 * Decimal("0.5") + 5 * Decimal(10)) / 1_000_000 / 2


async def test_many_ends_at_once_are_all_added(one: Worker, two: Worker) -> None:
    """Two processes that write the first row of a day at the same moment make one row, with both sums."""
    used = Used(requests=1, completion_tokens=7)
    entry = an_entry(used)
    await asyncio.gather(*(asyncio.to_thread(_in_transaction, entry) for _ in range(8)))
    day = await the_day()
    assert (day.requests, day.completion_tokens) == (8, 56)


def an_entry(used: Used, **fields: Any) -> usage.Entry:
    whose = usage.Whose(owner="user:1", tenant="user:1", team=fields.pop("team", ""))
    return usage.Entry(**{"whose": whose, "model": "echo", "kind": "answer", "used": used, **fields})


def _in_transaction(entry: usage.Entry) -> None:
    orm._insistently(lambda: usage.add_all([entry]))
    connection.close()


async def test_other_databases_add_in_two_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are the same as by ON CONFLICT."""
    used = Used(requests=1, prompt_tokens=9, engine_seconds=0.5)
    for team in ("a", "b"):
        for _ in range(2):
            await orm.call(usage.add_all, [an_entry(used, team=team)])
        monkeypatch.setattr(usage, "_UPSERT", ())
    rows = [row async for row in UsageDay.objects.order_by("team").values()]
    assert [{**row, "id": 0, "team": ""} for row in rows[:1]] == [{**row, "id": 0, "team": ""} for row in rows[1:]]
    assert (rows[0]["requests"], rows[0]["prompt_tokens"], rows[0]["engine_seconds"]) == (2, 18, 1.0)


async def test_a_site_may_keep_none(one: Worker) -> None:
    """With USAGE off an end writes no row, and refusals are not counted."""
    with override_settings(STREAMSERVE={**PRICE, "USAGE": False}):
        await answered(one)
        note_refusal(BadRequest("no"), Caller("user:1"), "http", "echo")
        await one.reaper.round()
    assert not await UsageDay.objects.aexists()


@pytest.mark.parametrize(
    "wrong", [{"USAGE": 1}, {"PRICES": {"echo": {"PROMT": 1.0}}}, {"PRICES": {"echo": {"PROMPT": -1}}}]
)
def test_a_wrong_setting_is_named(wrong: dict[str, Any]) -> None:
    """`check` shows what is wrong with a price."""
    with override_settings(STREAMSERVE={**PRICE, **wrong}):
        assert get_problems()


def test_a_price_without_a_price_for_cached_tokens_takes_them_as_others() -> None:
    """A million tokens of a prompt cost the price."""
    assert Price(prompt=3.0).of(1_000_000, 400_000, 5) == Decimal(3)
