"""Limits over time, in the site's database: right over all its processes. protocol/rates.py has the scopes.

    start of an answer ──► `reserve`: count it in every window, or RateLimited           (before the row's insert)
    its row            ──► `held`: the tokens that it holds, and of which windows
    end of an answer   ──► `settle`: what it has used stays counted, the rest is given back  (after the row's update)

Both are in the transaction of the stream's row: what has no row holds nothing, and an answer whose process was killed
is settled by whoever writes its end. A start is one statement for all windows, as every answer makes it; PostgreSQL
locks its rows in the order of its values. Without RATES nothing is asked. Blocks.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

from django.db import connections, router, transaction

from streamserve.api.answers import TEAM
from streamserve.conf import get_settings
from streamserve.dialects.batches import RowAnswer
from streamserve.models import RateWindow
from streamserve.protocol.embeddings import EmbedRequest
from streamserve.protocol.errors import BadRequest
from streamserve.protocol.rates import (
    ADDRESS,
    DAY,
    KEY,
    MINUTE,
    OWNER,
    REQUESTS,
    SITE,
    TENANT,
    TOKENS,
    WORK,
    Left,
    Rate,
    RateLimited,
    Rates,
    refusal,
    too_long,
)
from streamserve.protocol.requests import Admission
from streamserve.rows import orm
from streamserve.streams.store import ANONYMOUS, groups_of

CHARS_A_TOKEN = 4  # of a text that no engine has counted yet
_MAX_FULL = 10_000  # subjects that a process knows to be out of requests
_UPSERT = ("sqlite", "postgresql")  # that have ON CONFLICT
_Key = tuple[str, str, int]  # of a window: whose, what is counted, its seconds


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a request needs of a window."""

    scope: str
    subject: str
    what: str
    seconds: int
    limit: int
    amount: int
    weight: float = 1.0

    @property
    def key(self) -> _Key:
        """Return what names the window."""
        return self.subject, self.what, self.seconds


@dataclass(frozen=True, slots=True)
class _Window:
    """A window with a request counted in it."""

    used: int
    ends_at_ms: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """What is left of the tightest windows, and what the stream's row keeps of its reservation: None for no tokens."""

    left: Rates
    held: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """How many tokens a request may take: its prompt's, and as many of its answers' as are reserved."""

    prompt: int = 0
    answer: int = 0


_full: dict[str, float] = {}  # subjects without a request left, until when on the monotonic clock


def refuse_early(admission: Admission) -> None:
    """Raise RateLimited where this process knows that a window of requests is full. Asks no database."""
    now = time.monotonic()
    for scope, subject, rate in _subjects(admission, is_work=False):
        until = _full.get(subject, 0.0)
        if until > now:
            left = Left(limit=rate.requests_per_minute, remaining=0, seconds=until - now)
            raise _limited(scope, REQUESTS, MINUTE, rate.requests_per_minute, Rates(requests=left), until - now)


def reserve(admission: Admission, needs: Needs, *, is_work: bool = False) -> Reserved | None:
    """Count a request and its tokens in every window of its caller's. In a transaction. None without limits.

    Raises RateLimited, BadRequest for a prompt that no window has room for: then the transaction must be undone.
    """
    asked = _asked(admission, needs, is_work=is_work)
    if not asked:
        return None
    now_ms = _now_ms()
    windows = _counted(asked, now_ms)
    full = [one for one in asked if windows[one.key].used > one.limit]
    if full:
        _refuse(full, asked, windows, now_ms)
    held = [
        (one.subject, one.seconds, windows[one.key].ends_at_ms, one.weight, one.amount)
        for one in asked
        if one.what == TOKENS
    ]
    return Reserved(_rates(asked, windows, now_ms), json.dumps(held) if held else None)


async def enter(request: EmbedRequest, admission: Admission) -> None:
    """Count a request for embeddings, which holds nothing: its tokens are counted as its characters tell. Any loop.

    Raises RateLimited, BadRequest. Rows of batches are counted with their batch's work.
    """
    if get_settings().rates:
        tokens = sum(-(-len(one) // CHARS_A_TOKEN) if isinstance(one, str) else len(one) for one in request.inputs)
        await orm.call(_atomically, partial(reserve, admission, Needs(prompt=tokens), is_work=request.is_batch))


def _atomically(write: Callable[[], object]) -> None:
    with transaction.atomic(using=RateWindow.objects.db):
        write()


def settle(stream_id: str, num_tokens: int) -> None:
    """Count what an answer has used instead of what it holds, in the transaction that writes its end, which is once."""
    connection = connections[router.db_for_write(RateWindow)]
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(_SETTLE_AT_ONCE, [num_tokens, stream_id])
            return
        cursor.execute("SELECT held FROM streamserve_stream WHERE id = %s", [stream_id])
        row = cursor.fetchone()
        held = json.loads(row[0]) if row is not None and row[0] else []
        more = [(math.ceil(num_tokens * weight) - amount, *window) for *window, weight, amount in held]
        if more:
            cursor.executemany(_SETTLE, [(one[0], *one) for one in more])


# A window that has begun anew since is another. Locks are taken in the order in which `reserve` takes them: that of
# `held`. PostgreSQL does all in one statement, as each is a round trip there; a window that was dropped comes back as
# a window that is over.
_SETTLE_AT_ONCE = (
    "INSERT INTO streamserve_ratewindow AS w (subject, what, seconds, used, ends_at_ms) "
    f"SELECT e->>0, '{TOKENS}', (e->>1)::int, ceil(%s * (e->>3)::float8)::bigint - (e->>4)::bigint, (e->>2)::bigint "
    "FROM streamserve_stream AS s, json_array_elements(NULLIF(s.held, '')::json) WITH ORDINALITY AS h (e, place) "
    "WHERE s.id = %s ORDER BY place ON CONFLICT (subject, what, seconds) DO UPDATE "
    "SET used = GREATEST(w.used + excluded.used, 0) WHERE w.ends_at_ms = excluded.ends_at_ms"
)
_SETTLE = (
    "UPDATE streamserve_ratewindow SET used = CASE WHEN used + %s < 0 THEN 0 ELSE used + %s END "
    f"WHERE subject = %s AND what = '{TOKENS}' AND seconds = %s AND ends_at_ms = %s"
)


def settling(stream_id: str, num_tokens: int) -> Callable[[], None] | None:
    """Return what settles an answer; None where the site has no limits over time."""
    return partial(settle, stream_id, num_tokens) if get_settings().rates else None


def count(admission: Admission, num_tokens: int, *, is_work: bool = False) -> None:
    """Count tokens that were used without a reservation, in a transaction: of a title, or of a batch's rows."""
    asked = [one for one in _asked(admission, Needs(answer=num_tokens), is_work=is_work) if one.what == TOKENS]
    if asked:
        _counted(asked, _now_ms())


def counting_rows(answers: Iterable[RowAnswer], admission: Admission) -> Callable[[], None] | None:
    """Return what counts the tokens of a batch's rows, in the transaction that stores them; None without limits."""
    if not get_settings().rates:
        return None
    tokens = sum(one.usage.prompt_tokens + one.usage.completion_tokens for one in answers)
    return partial(count, admission, tokens, is_work=True)


def seconds_until_room(admission: Admission) -> float:
    """Return how long the work of an owner has to wait until its windows have any room; 0: it has."""
    now_ms, longest = _now_ms(), 0.0
    for one in _asked(admission, Needs(answer=1), is_work=True):
        window = RateWindow.objects.filter(subject=one.subject, what=one.what, seconds=one.seconds).first()
        if window is not None and window.used + one.amount > one.limit:
            longest = max(longest, (window.ends_at_ms - now_ms) / 1000)
    return longest


def drop_old() -> None:
    """Delete the windows that were over a day ago."""
    RateWindow.objects.filter(ends_at_ms__lt=_now_ms() - DAY * 1000).delete()


# Windows


def _subjects(admission: Admission, *, is_work: bool) -> Iterator[tuple[str, str, Rate]]:
    """Yield scope, subject and limits of everything that a request counts in."""
    rates = get_settings().rates
    if not rates:
        return
    own = admission.place_of
    if is_work:
        found = [(WORK, own)]
    else:
        found = [(OWNER, admission.owner), (TENANT, admission.share_of or admission.tenant)]
        if admission.counted_as and not admission.counted_as.startswith(TEAM):
            found[0] = (OWNER, own)  # a visitor without a cookie is counted with the others of its address
        if admission.owner.startswith("key:"):
            found.append((KEY, admission.owner))
        if admission.owner in ANONYMOUS:
            found += [(ADDRESS, group.name) for group in groups_of(own) if group.is_prefix and group != ANONYMOUS]
    for scope, name in [*found, (SITE, "")]:
        if scope in rates and (name or scope == SITE):
            yield scope, f"{scope}:{name}", rates[scope]


def _asked(admission: Admission, needs: Needs, *, is_work: bool) -> list[_Asked]:
    """Return what a request needs of each window. Raises BadRequest for a prompt that is more than a whole window."""
    out = []
    for scope, subject, rate in _subjects(admission, is_work=is_work):
        for what, seconds, limit in rate.windows():
            if what == REQUESTS:
                out.append(_Asked(scope, subject, what, seconds, limit, 1))
                continue
            prompt, answer = math.ceil(needs.prompt * rate.weight), math.ceil(needs.answer * rate.weight)
            if prompt >= limit:
                raise BadRequest(too_long(needs.prompt, seconds, limit), code="prompt_over_limit", param="messages")
            out.append(_Asked(scope, subject, what, seconds, limit, min(prompt + answer, limit), rate.weight))
    return sorted(out, key=lambda one: one.key)  # locks are taken in one order


def _counted(asked: Sequence[_Asked], now_ms: int) -> dict[_Key, _Window]:
    """Count in the windows, and return them; they are locked until the transaction ends. One that is over begins anew.

    A window may be past its limit then.
    """
    connection = connections[router.db_for_write(RateWindow)]
    if connection.vendor not in _UPSERT or not connection.features.can_return_columns_from_insert:
        return _counted_by_orm(asked, now_ms)
    values: list[str | int] = []
    for one in asked:
        values += (*one.key, one.amount, now_ms + one.seconds * 1000)
    with connection.cursor() as cursor:
        cursor.execute(_statement(len(asked)), values)
        return {(subject, what, seconds): _Window(*row) for subject, what, seconds, *row in cursor.fetchall()}


@cache
def _statement(num: int) -> str:
    """Return the statement for so many windows. `excluded` is the row that it would insert: it began now."""
    is_over = "w.ends_at_ms <= excluded.ends_at_ms - excluded.seconds * 1000"
    return (
        "INSERT INTO streamserve_ratewindow AS w (subject, what, seconds, used, ends_at_ms) "
        f"VALUES {', '.join(['(%s, %s, %s, %s, %s)'] * num)} ON CONFLICT (subject, what, seconds) DO UPDATE SET "
        f"used = CASE WHEN {is_over} THEN excluded.used ELSE w.used + excluded.used END, "
        f"ends_at_ms = CASE WHEN {is_over} THEN excluded.ends_at_ms ELSE w.ends_at_ms END "
        "RETURNING subject, what, seconds, used, ends_at_ms"
    )


def _counted_by_orm(asked: Sequence[_Asked], now_ms: int) -> dict[_Key, _Window]:
    """Do the same window by window, for other databases."""
    out = {}
    for one in asked:
        ends_at_ms = now_ms + one.seconds * 1000
        row, is_new = RateWindow.objects.select_for_update().get_or_create(
            subject=one.subject,
            what=one.what,
            seconds=one.seconds,
            defaults={"used": one.amount, "ends_at_ms": ends_at_ms},
        )
        if not is_new:
            if row.ends_at_ms <= now_ms:
                row.used, row.ends_at_ms = 0, ends_at_ms
            row.used += one.amount
            row.save(update_fields=["used", "ends_at_ms"])
        out[one.key] = _Window(row.used, row.ends_at_ms)
    return out


def _refuse(full: Sequence[_Asked], asked: Sequence[_Asked], windows: dict[_Key, _Window], now_ms: int) -> None:
    """Raise RateLimited for the first of the windows that have no room. Retry when the last of them is over."""
    one = full[0]
    left = (windows[one.key].ends_at_ms - now_ms) / 1000
    if one.what == REQUESTS:
        _remember(one.subject, left)
    seconds = max((windows[each.key].ends_at_ms - now_ms) / 1000 for each in full)
    before = {each.key: _Window(windows[each.key].used - each.amount, windows[each.key].ends_at_ms) for each in asked}
    raise _limited(one.scope, one.what, one.seconds, one.limit, _rates(asked, before, now_ms), seconds)


def _remember(subject: str, seconds: float) -> None:
    """Note that a subject has no request left for so long; where too many are noted, forget those that have again."""
    now = time.monotonic()
    if len(_full) >= _MAX_FULL:
        for known, until in list(_full.items()):
            if until <= now:
                _full.pop(known, None)
    if len(_full) < _MAX_FULL:
        _full[subject] = now + seconds


def _limited(scope: str, what: str, seconds: int, limit: int, rates: Rates, wait: float) -> RateLimited:
    return RateLimited(refusal(scope, what, seconds, limit), retry_after=max(1, math.ceil(wait)), rates=rates)


def _rates(asked: Sequence[_Asked], windows: dict[_Key, _Window], now_ms: int) -> Rates:
    """Return the windows with the smallest share left."""
    best: dict[str, Left] = {}
    for one in asked:
        window = windows[one.key]
        seconds = (window.ends_at_ms - now_ms) / 1000
        left = Left(limit=one.limit, remaining=max(0, one.limit - window.used), seconds=seconds)
        if one.what not in best or left.remaining / left.limit < best[one.what].remaining / best[one.what].limit:
            best[one.what] = left
    return Rates(requests=best.get(REQUESTS), tokens=best.get(TOKENS))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
