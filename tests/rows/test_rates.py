"""Laws of limits over time: no window is passed, by however many processes, and nothing stays held after an end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from django.db import IntegrityError, connection, transaction
from django.db.models import F
from django.test import override_settings
from django.utils import timezone

from streamserve.api.usage import Used
from streamserve.conf import get_problems
from streamserve.models import RateWindow
from streamserve.models import Stream as StreamRow
from streamserve.protocol.embeddings import EmbedRequest
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.rates import Left, RateLimited, Rates, anthropic_headers
from streamserve.protocol.requests import Admission, GenerateRequest, Once
from streamserve.rows import orm, rates, usage
from streamserve.rows.receivers import finish_stream, insert_stream
from streamserve.streams.store import KeyTaken
from tests.rows.conftest import NUM_TOKENS, asked
from tests.support.sites.rows import in_row
from tests.support.sites.two_workers import Worker
from tests.support.streams.hand_made import Gate, until

pytestmark = pytest.mark.django_db(transaction=True)

SITE = {"MODELS": {"echo": {"PATH": "echo"}}, "LOG": "memory", "CLIENT": "thread"}
MINE = Admission(owner="user:1", tenant="user:1")


@pytest.fixture(autouse=True)
def nothing_known() -> Iterator[None]:
    """Each test begins without subjects that are known to be out of requests."""
    rates._full.clear()
    yield
    rates._full.clear()


@pytest.fixture(autouse=True, params=["one statement", "by the ORM"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows are counted as this database can, and as any other does."""
    if request.param == "by the ORM":
        monkeypatch.setattr(rates, "_UPSERT", ())


def limited(**scopes: dict[str, float]) -> Any:
    return override_settings(STREAMSERVE={**SITE, "RATES": scopes})


def per_minute(requests: int = 0, tokens: int = 0) -> dict[str, float]:
    return {"REQUESTS_PER_MINUTE": requests, "TOKENS_PER_MINUTE": tokens}


async def used(subject: str, what: str = "tokens") -> int:
    return (await RateWindow.objects.aget(subject=subject, what=what)).used


async def all_used() -> dict[tuple[str, str, int], int]:
    """Return how much is used of each window."""
    windows = RateWindow.objects.values_list("subject", "what", "seconds", "used")
    return {(subject, what, seconds): used async for subject, what, seconds, used in windows}


async def ended(worker: Worker, stream_id: str) -> StreamRow:
    await worker.read(stream_id)
    await in_row(stream_id, state="finished")
    return await StreamRow.objects.aget(pk=stream_id)


async def test_without_limits_nothing_is_counted(one: Worker) -> None:
    """No window, nothing held, nothing left to tell."""
    stream = await one.start(asked())
    assert stream.rates is None
    row = await ended(one, stream.id)
    assert not await RateWindow.objects.aexists()
    assert row.held is None


async def test_an_answer_holds_its_tokens_and_gives_back_what_it_did_not_use(one: Worker, gate: Gate) -> None:
    """While it runs its prompt and what it asks are held; at its end what its usage says stays counted."""
    with limited(owner=per_minute(tokens=10_000)):
        gate.allow(2)
        request = asked()
        stream = await one.start(request)
        most = request.sampling.max_tokens
        assert most is not None
        prompt = stream.usage.prompt_tokens
        assert await used("owner:user:1") == prompt + most
        assert stream.rates == Rates(
            tokens=replace(stream.rates.tokens, limit=10_000, remaining=10_000 - prompt - most)  # type: ignore[union-attr,type-var]
        )
        gate.open()
        row = await ended(one, stream.id)
        assert await used("owner:user:1") == row.prompt_tokens + row.completion_tokens == prompt + NUM_TOKENS


async def test_fifty_callers_at_the_bound_over_two_processes(one: Worker, two: Worker) -> None:
    """Twenty answers begin, whichever process is asked, and the others are told when to come back."""
    with limited(site=per_minute(requests=20)):
        starts = [
            worker.start(asked(), owner=f"user:{number}", tenant=f"user:{number}")
            for number in range(25)
            for worker in (one, two)
        ]
        found = await asyncio.gather(*starts, return_exceptions=True)
        begun = [each for each in found if not isinstance(each, BaseException)]
        refused = [each for each in found if isinstance(each, RateLimited)]
        assert (len(begun), len(refused)) == (20, 30)
        assert await used("site:", "requests") == 20
        assert all(1 <= each.retry_after <= 60 and each.rates.requests is not None for each in refused)
        for stream in begun:
            await ended(one if one.streams.find(stream.id) else two, stream.id)


async def test_starts_and_ends_at_the_same_moment_wait_for_each_other() -> None:
    """Windows are locked in one order: no transaction is undone as a deadlock, and no count is lost."""
    everywhere = {"TOKENS_PER_MINUTE": 10**6, "TOKENS_PER_DAY": 10**6}

    def answer(number: int) -> None:
        owner = f"user:{number % 3}"
        row = StreamRow(id=f"{number:032x}", log_id=f"{number:012d}", owner=owner, tenant=owner, model="echo")
        with transaction.atomic():
            reserved = rates.reserve(Admission(owner=owner, tenant=owner), rates.Needs(prompt=5, answer=20))
            assert reserved is not None
            row.held = reserved.held
            row.save(force_insert=True)
        with transaction.atomic():
            StreamRow.objects.finish(row.pk)
            rates.settle_all({row.pk: 7})

    with limited(owner=everywhere, tenant=everywhere, site=everywhere):
        await asyncio.gather(*(orm.bulk(answer, number) for number in range(120)))
        found = {row.subject: row.used async for row in RateWindow.objects.all()}
    each = {f"{scope}:user:{number}": 40 * 7 for scope in ("owner", "tenant") for number in range(3)}
    assert found == {**each, "site:": 120 * 7}


async def test_a_refused_request_counts_nowhere(one: Worker) -> None:
    """One full window undoes the request in all others; no row of a stream is left."""
    with limited(owner=per_minute(requests=5, tokens=10_000), site=per_minute(requests=1)):
        stream = await one.start(asked())
        await ended(one, stream.id)
        before = await all_used()
        with pytest.raises(RateLimited, match="This site has used the 1 requests a minute"):
            await one.start(asked())
        assert await all_used() == before
        assert await StreamRow.objects.acount() == 1


def a_row(number: int, **columns: Any) -> StreamRow:
    whose = {"owner": "user:1", "tenant": "user:1", **columns}
    return StreamRow(id=f"{number:032x}", log_id=f"{number:012d}", model="echo", **whose)


def start_of(row: StreamRow, **needs: int) -> Coroutine[Any, Any, Rates | None]:
    """Return the start of a stream that counts so many tokens."""
    ask = rates.Ask(Admission(owner=row.owner, tenant=row.tenant), lambda: rates.Needs(**needs))
    return insert_stream(row, ask=ask)


async def while_writes_wait(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """Have the calls write while another write is under way, so that they wait together; return what they return."""
    go = threading.Event()
    busy = asyncio.create_task(orm.call(go.wait))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(0)  # each is queued in the first step of its task
    go.set()
    await busy
    return await asyncio.gather(*waiting, return_exceptions=True)


async def test_starts_that_wait_together_are_one_transaction() -> None:
    """Twenty of three owners count in a statement each transaction, and then give back together what they held."""
    everywhere = {"TOKENS_PER_MINUTE": 10**6, "TOKENS_PER_DAY": 10**6}
    with limited(owner=everywhere, tenant=everywhere, site=everywhere):
        rows = [a_row(number, owner=f"user:{number % 3}") for number in range(20)]
        before = orm._door.writes.num_transactions
        left = await while_writes_wait(*(start_of(row, prompt=5, answer=20) for row in rows))
        assert orm._door.writes.num_transactions == before + 1
        assert [one.tokens.remaining for one in left] == [10**6 - 25 * number for number in range(1, 21)]
        assert await all_used() == windows_of(7 * 25, 7 * 25, 6 * 25)
        ends = await while_writes_wait(*(finish_stream(row.pk, num_tokens=7) for row in rows + rows[:2]))
        assert ends == [1] * 20 + [0] * 2, "an end is written once"
        assert orm._door.writes.num_transactions == before + 2
        assert await all_used() == windows_of(7 * 7, 7 * 7, 6 * 7)


def windows_of(*of_users: int) -> dict[tuple[str, str, int], int]:
    """Return what is used where each user of one tenant, and the site, have windows of a minute and a day."""
    subjects = {f"owner:user:{number}": used for number, used in enumerate(of_users)}
    subjects |= {"tenant:user:1": sum(of_users), "site:": sum(of_users)}
    return {(subject, "tokens", seconds): used for subject, used in subjects.items() for seconds in (60, 86_400)}


async def test_a_refusal_among_starts_is_its_own() -> None:
    """Each is told what was left when its turn came; a smaller one after it has room, and it counts nowhere."""
    with limited(owner=per_minute(requests=10, tokens=100), site=per_minute(tokens=1_000)):
        answers = (60, 50, 30, 200, 11, 10)
        before = orm._door.writes.num_transactions
        found = await while_writes_wait(
            *(start_of(a_row(number), answer=answer) for number, answer in enumerate(answers))
        )
        assert orm._door.writes.num_transactions == before + 1
        assert [type(one) for one in found] == [Rates, RateLimited, Rates, RateLimited, RateLimited, Rates]
        assert [one.rates.tokens.remaining for one in found if isinstance(one, RateLimited)] == [40, 10, 10]
        assert {row.pk async for row in StreamRow.objects.all()} == {a_row(number).pk for number in (0, 2, 5)}
        assert await used("owner:user:1") == await used("site:") == 100
        assert await used("owner:user:1", "requests") == 3


async def test_a_key_that_is_taken_undoes_one_start_of_many() -> None:
    """The others are counted once, although all were done again one by one; no refusal of the first try is kept."""
    with limited(owner=per_minute(requests=3)):
        await a_row(0, request_key="k" * 64).asave(force_insert=True)
        rows = [*(a_row(number, request_key="k" * 64) for number in (1, 2, 3)), a_row(4), a_row(5)]
        found = await while_writes_wait(*(start_of(row) for row in rows))
        assert [type(one) for one in found] == [IntegrityError] * 3 + [Rates] * 2
        assert await used("owner:user:1", "requests") == 2
        assert not rates._full
        assert isinstance(await start_of(a_row(6)), Rates)


async def test_a_prompt_for_no_window_is_refused_alone() -> None:
    """It is a 400 among starts that begin."""
    with limited(owner=per_minute(tokens=10)):
        found = await while_writes_wait(
            *(start_of(a_row(number), prompt=prompt) for number, prompt in enumerate((4, 10, 5)))
        )
        assert [type(one) for one in found] == [Rates, BadRequest, Rates]
        assert await used("owner:user:1") == 9


async def test_answers_of_an_old_and_a_new_window_end_together() -> None:
    """What the old window's gives back does not touch the new."""
    with limited(owner=per_minute(tokens=10_000)):
        old, new = a_row(1), a_row(2)
        await start_of(old, answer=100)
        await RateWindow.objects.aupdate(ends_at_ms=F("ends_at_ms") - 61_000)
        await start_of(new, answer=100)
        assert await while_writes_wait(*(finish_stream(row.pk, num_tokens=7) for row in (new, old))) == [1, 1]
        assert await used("owner:user:1") == 7


@pytest.mark.skipif(connection.vendor != "postgresql", reason="locks of rows are PostgreSQL's")
async def test_rows_are_locked_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for the last row has locked those before it, in whatever order its callers came: no circle."""
    monkeypatch.setattr(orm, "LOCK_SECONDS", 60.0)
    owners = [f"user:{number}" for number in (4, 2, 1)]
    rows = [a_row(number, owner=owners[number % 3]) for number in range(9)]
    windows = "SELECT split_part(subject, ':', 3) FROM streamserve_ratewindow"
    days = "SELECT split_part(owner, ':', 2) FROM streamserve_usageday"

    async def check_order(table: str, *calls: Coroutine[Any, Any, Any]) -> None:
        with (
            psycopg.connect(**connection.get_connection_params()) as holding,
            psycopg.connect(**connection.get_connection_params(), autocommit=True) as looking,
        ):
            assert holding.execute(f"SELECT FROM ({table}) AS t (n) WHERE n = '4'").rowcount == 1
            holding.execute(f"{table} WHERE {'subject' if table is windows else 'owner'} LIKE '%user:4' FOR UPDATE")
            writing = asyncio.create_task(while_writes_wait(*calls))
            await until(lambda: looking.execute("SELECT FROM pg_locks WHERE NOT granted").rowcount == 1, "it waits")
            assert looking.execute(f"{table} FOR UPDATE SKIP LOCKED").fetchall() == [("3",)]
            holding.rollback()
            assert not [one for one in await writing if isinstance(one, BaseException)]

    with limited(owner=per_minute(tokens=1_000)):
        for number in range(1, 5):
            await start_of(a_row(90 + number, owner=f"user:{number}"), answer=9)
            await end_of(a_row(90 + number, owner=f"user:{number}"))
        await check_order(windows, *(start_of(row, answer=9) for row in rows))
        await check_order(windows, *(end_of(row) for row in rows[:3]))
        await check_order(days, *(end_of(row) for row in rows[3:]))


def end_of(row: StreamRow) -> Coroutine[Any, Any, int]:
    """Return the end of a stream that has used a request and seven tokens."""
    whose = usage.Whose(owner=row.owner, tenant=row.tenant)
    entry = usage.Entry(whose=whose, model=row.model, kind="answer", used=Used(requests=1, completion_tokens=7))
    return finish_stream(row.pk, num_tokens=7, used=entry)


async def test_a_process_remembers_who_has_no_request_left(one: Worker) -> None:
    """It refuses the next request before the engine and the database are asked, until the window is over."""
    with limited(owner=per_minute(requests=1)):
        await ended(one, (await one.start(asked())).id)
        with pytest.raises(RateLimited):
            await one.start(asked())
        await RateWindow.objects.all().adelete()  # so that only what the process remembers can refuse
        with pytest.raises(RateLimited, match="You have used the 1 requests a minute"):
            await one.start(asked())
        rates.refuse_early(replace(MINE, owner="user:2", tenant="user:2"))


async def test_it_forgets_who_has_requests_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where as many are known as may be, those whose windows are over make room for others."""
    monkeypatch.setattr(rates, "_MAX_FULL", 2)
    rates._full.update({"owner:user:5": 0.0, "owner:user:6": float("inf")})
    with limited(owner=per_minute(requests=1)):
        await orm.call(transaction.atomic(rates.reserve), MINE, rates.Needs())
        for _ in range(2):
            with pytest.raises(RateLimited):
                await orm.call(transaction.atomic(rates.reserve), MINE, rates.Needs())
    assert rates._full.keys() == {"owner:user:1", "owner:user:6"}


async def test_a_window_that_is_over_begins_anew(one: Worker, gate: Gate) -> None:
    """With the next request; what an answer of the old window gives back does not touch the new."""
    with limited(owner=per_minute(tokens=10_000)):
        gate.allow(1)
        old = await one.start(asked())
        await RateWindow.objects.aupdate(ends_at_ms=F("ends_at_ms") - 61_000, used=9_999)
        new = await one.start(asked())
        gate.open()
        await ended(one, old.id)
        row = await ended(one, new.id)
        assert await used("owner:user:1") == row.prompt_tokens + row.completion_tokens


async def test_a_request_that_is_sent_again_reserves_nothing(one: Worker) -> None:
    """An Idempotency-Key that is taken undoes the reservation with the row."""
    with limited(owner=per_minute(requests=10)):
        once = Once(key="k" * 64, digest="d" * 64)
        stream = await one.start(asked(), once=once)
        with pytest.raises(KeyTaken):
            await one.start(asked(), once=once)
        assert await used("owner:user:1", "requests") == 1
        await ended(one, stream.id)


async def test_a_resume_reserves_nothing(one: Worker, two: Worker, gate: Gate) -> None:
    """An answer that another process continues is counted once, and settled by it."""
    with limited(owner=per_minute(requests=10, tokens=10_000)):
        gate.allow(2)
        stream = await one.start(asked(), on_disconnect="finish")
        await until(lambda: stream.last_seq > 2, "it has tokens")
        one.release_lock()
        await two.reaper.round()
        gate.open()
        row = await ended(two, stream.id)
        assert await used("owner:user:1", "requests") == 1
        assert await used("owner:user:1") == row.prompt_tokens + row.completion_tokens


async def test_a_lost_answer_gives_back_all(one: Worker, two: Worker, gate: Gate) -> None:
    """Its process was killed and its events are gone: the reaper writes its end, and nothing stays held."""
    with limited(owner=per_minute(tokens=10_000)):
        gate.allow(1)
        stream = await one.start(asked(), on_disconnect="abort")
        dead = f"{one.workers.host}-dead"
        await one.log.drop(stream.log_id)
        await StreamRow.objects.filter(pk=stream.id).aupdate(producer=dead)
        await two.reaper.round()
        await in_row(stream.id, error_code="producer_lost")
        assert await used("owner:user:1") == 0
        gate.open()


async def test_scopes_are_of_whoever_asks(one: Worker) -> None:
    """A key counts as itself, as an owner and for its user; a team for its members; a visitor for its address."""
    everywhere = {scope: per_minute(requests=100) for scope in ("owner", "key", "tenant", "address", "site")}
    with limited(**everywhere):
        for admission in (
            {"owner": "key:3", "tenant": "user:1"},
            {"owner": "user:2", "tenant": "user:2", "counted_as": "team:red"},
            {"owner": "anon:5", "tenant": "anon:5", "counted_as": "anon:@abc/5"},
        ):
            await ended(one, (await one.start(asked(), **admission)).id)
    found = {row.subject: row.used async for row in RateWindow.objects.all()}
    assert found == {
        "owner:key:3": 1,
        "key:key:3": 1,
        "tenant:user:1": 1,
        "owner:user:2": 1,
        "tenant:team:red": 1,
        "owner:anon:@abc/5": 1,
        "tenant:anon:@abc/5": 1,
        "address:anon:@abc/": 1,
        "site:": 3,
    }


async def test_several_answers_and_weights(one: Worker) -> None:
    """`n` answers hold as many times; a weight counts each token so often, up to the window."""
    with limited(owner={"TOKENS_PER_DAY": 1_000_000, "WEIGHT": 0.5}):
        request = replace(asked(), n=3)
        stream = await one.start(request)
        await ended(one, stream.id)
        row = await StreamRow.objects.aget()
        assert abs(await used("owner:user:1") - (row.prompt_tokens + row.completion_tokens) / 2) <= 1
        assert row.completion_tokens == 3 * NUM_TOKENS


async def test_a_prompt_that_no_window_has_room_for(one: Worker) -> None:
    """It is a 400 that says so: waiting would not help. An answer that asks for more than a window may begin."""
    with limited(owner=per_minute(tokens=10)):
        stream = await one.start(GenerateRequest(model="echo", prompt="hi", sampling=asked().sampling))
        await ended(one, stream.id)
        with pytest.raises(BadRequest, match="allowed here") as refusal:
            await one.start(GenerateRequest(model="echo", prompt="word " * 50, sampling=asked().sampling))
        assert refusal.value.code == "prompt_over_limit"


async def test_work_has_windows_of_its_own() -> None:
    """Rows of batches wait for room in the owner's window of work; the site counts them, too."""
    with limited(work=per_minute(tokens=10), site=per_minute(tokens=1_000), owner=per_minute(tokens=1)):
        assert await orm.read(rates.seconds_until_room, MINE) == 0
        await orm.call(rates.count, MINE, 10, is_work=True)
        assert 0 < await orm.read(rates.seconds_until_room, MINE) <= 60
        found = {row.subject: row.used async for row in RateWindow.objects.all()}
        assert found == {"work:user:1": 10, "site:": 10}


async def test_embeddings_count_and_hold_nothing() -> None:
    """A request counts its inputs as their characters tell, or their ids; rows of batches count as work."""
    request = EmbedRequest(model="search", inputs=("x" * 40, (1, 2, 3)))
    with limited(owner=per_minute(requests=1, tokens=100), work=per_minute(tokens=100)):
        await rates.enter(request, MINE)
        assert await used("owner:user:1") == 13
        with pytest.raises(RateLimited):
            await rates.enter(request, MINE)
        await rates.enter(replace(request, is_batch=True), MINE)
        assert await used("work:user:1") == 13


async def test_what_is_over_is_dropped() -> None:
    """Windows that were over a day ago."""
    with limited(owner=per_minute(tokens=1_000)):
        await orm.call(rates.count, MINE, 1)
    await orm.call(rates.drop_old)
    assert await RateWindow.objects.aexists()
    await RateWindow.objects.aupdate(ends_at_ms=F("ends_at_ms") - 86_460_001)
    await orm.call(rates.drop_old)
    assert not await RateWindow.objects.aexists()


def test_headers_say_what_is_left() -> None:
    """By OpenAI's names in seconds, by Anthropic's as moments."""
    left = Rates(requests=Left(limit=60, remaining=59, seconds=11.2))
    assert left.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "12s",
    }
    now = timezone.now().replace(year=2026, month=1, day=1, hour=0, minute=0, second=0)
    assert anthropic_headers(left, now)["anthropic-ratelimit-requests-reset"] == "2026-01-01T00:00:12Z"


_WRONG = ({"RATES": {"user": {}}}, {"RATES": {"owner": {"REQUESTS": 1}}}, {"RESERVE_TOKENS": -1})


@pytest.mark.parametrize("wrong", _WRONG)
def test_a_wrong_setting_is_named(wrong: dict[str, Any]) -> None:
    """`check` shows an unknown scope, an unknown limit, a negative number."""
    with override_settings(STREAMSERVE={**SITE, **wrong}):
        assert get_problems()
