"""Limits over time, in the site's database: right over all its processes. protocol/rates.py has the scopes.

    starts of answers ──► `reserve_all`: count each in every window, or RateLimited        (before the rows' inserts)
    their rows        ──► `held`: the tokens that an answer holds, and of which windows
    ends of answers   ──► `settle_all`: what was used stays counted, the rest is given back  (after the rows' updates)

Both are in the transaction of the streams' rows: what has no row holds nothing, and an answer whose process was killed
is settled by the process that writes its end. Starts that share a transaction are one statement for all their windows,
and so are ends. Every transaction locks its windows once, in the order of their names: no two wait for each other.
Without RATES nothing is asked. Blocks.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from django.db import connections, router

from streamserve.api.answers import TEAM
from streamserve.conf import get_settings
from streamserve.dialects.batches import RowAnswer
from streamserve.models import RateWindow
from streamserve.protocol.embeddings import EmbedRequest
from streamserve.protocol.errors import BadRequest, StreamserveError
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
_WINDOWS_AT_ONCE = 100  # of a statement: SQLite may take no more than 999 values
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

    def is_full(self, window: _Window) -> bool:
        """Return whether the window has no room for it."""
        return window.used + self.amount > self.limit


@dataclass(frozen=True, slots=True)
class _Window:
    """How much of a window is used, and when it is over."""

    used: int
    ends_at_ms: int

    def with_more(self, amount: int) -> _Window:
        """Return it with more used."""
        return _Window(self.used + amount, self.ends_at_ms)


@dataclass(frozen=True, slots=True)
class Reserved:
    """What is left of the tightest windows, and what the stream's row keeps of its reservation: None for no tokens.

    Both None where the request counts in no window.
    """

    left: Rates | None = None
    held: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """How many tokens a request may take: its prompt's, and as many of its answers' as are reserved."""

    prompt: int = 0
    answer: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that is to be counted. `needs` is asked only if it counts somewhere."""

    admission: Admission
    needs: Callable[[], Needs]
    is_work: bool = False


_full: dict[str, float] = {}  # subjects without a request left, until when on the monotonic clock


def refuse_early(admission: Admission) -> None:
    """Raise RateLimited where this process knows that a window of requests is full. Asks no database."""
    now = time.monotonic()
    for scope, subject, rate in _subjects(admission, is_work=False):
        until = _full.get(subject, 0.0)
        if until > now:
            left = Left(limit=rate.requests_per_minute, remaining=0, seconds=until - now)
            message = refusal(scope, REQUESTS, MINUTE, rate.requests_per_minute)
            raise RateLimited(message, retry_after=max(1, math.ceil(until - now)), rates=Rates(requests=left))


def reserve_all(asks: Sequence[Ask | None]) -> list[Reserved | StreamserveError]:
    """Count requests and their tokens in every window of their callers', in order. In a transaction.

    Return for each what it holds, or why it is refused: RateLimited, BadRequest for a prompt that no window has room
    for. What is refused counts nowhere. None counts nowhere, too.
    """
    asked = [_asked_by(one) for one in asks]
    amounts: Counter[_Key] = Counter()
    for wants in asked:
        if isinstance(wants, list):
            amounts.update({one.key: one.amount for one in wants})
    if not amounts:
        return [Reserved() if isinstance(wants, list) else wants for wants in asked]
    now_ms = _now_ms()
    windows = {key: window.with_more(-amounts[key]) for key, window in _counted(amounts, now_ms).items()}
    out, too_many = list[Reserved | StreamserveError](), Counter[_Key]()
    for wants in asked:
        if not isinstance(wants, list):
            out.append(wants)
        elif any(one.is_full(windows[one.key]) for one in wants):
            out.append(_limited(wants, windows, now_ms))
            too_many.update({one.key: -one.amount for one in wants})
        else:
            windows.update((one.key, windows[one.key].with_more(one.amount)) for one in wants)
            out.append(_reserved(wants, windows, now_ms))
    if too_many:
        _counted(too_many, now_ms)
    return out


def reserve(admission: Admission, needs: Needs, *, is_work: bool = False) -> Reserved:
    """Count one request. In a transaction, which an error must undo. Raises RateLimited, BadRequest."""
    (found,) = reserve_all([Ask(admission, lambda: needs, is_work)])
    if isinstance(found, Reserved):
        return found
    remember(found)
    raise found


def remember(error: StreamserveError) -> None:
    """Note whose windows of requests are full, by a refusal; where too many are noted, forget those that are over."""
    now = time.monotonic()
    for subject, seconds in error.full.items() if isinstance(error, RateLimited) else ():
        if len(_full) >= _MAX_FULL:
            for known, until in list(_full.items()):
                if until <= now:
                    _full.pop(known, None)
        if len(_full) < _MAX_FULL:
            _full[subject] = now + seconds


async def enter(request: EmbedRequest, admission: Admission) -> Rates | None:
    """Count a request for embeddings, which holds nothing: its tokens are counted as its characters tell. Any loop.

    Return what is left. Raises RateLimited, BadRequest. Rows of batches are counted with their batch's work.
    """
    if not get_settings().rates:
        return None
    tokens = sum(-(-len(one) // CHARS_A_TOKEN) if isinstance(one, str) else len(one) for one in request.inputs)
    ask = Ask(admission, lambda: Needs(prompt=tokens), request.is_batch)
    if not request.is_batch:
        refuse_early(admission)
    try:
        return (await orm.write_all(reserve_all, ask)).left
    except RateLimited as error:
        remember(error)
        raise


def settle_all(num_tokens: Mapping[str, int]) -> None:
    """Count what answers have used instead of what they hold, by stream, in the transaction that writes their ends.

    An end is written once, and so is this done. Nothing without RATES.
    """
    if not num_tokens or not get_settings().rates:
        return
    connection = connections[router.db_for_write(RateWindow)]
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(_SETTLE_AT_ONCE, [list(num_tokens), list(num_tokens.values())])
            return
        places = ", ".join(["%s"] * len(num_tokens))
        cursor.execute(f"SELECT id, held FROM streamserve_stream WHERE id IN ({places})", list(num_tokens))
        more: Counter[tuple[Any, ...]] = Counter()
        for stream_id, held in cursor.fetchall():
            for *window, weight, amount in json.loads(held) if held else ():
                more[tuple(window)] += math.ceil(num_tokens[stream_id] * weight) - amount
        if more:
            cursor.executemany(_SETTLE, [(more[window], more[window], *window) for window in sorted(more)])


# A window that has begun anew since is another. PostgreSQL does all in one statement, as each is a round trip there,
# and locks its rows in the order in which `_counted` does; of an answer's window that another answer's has followed
# nothing is left to change, and a window that was dropped comes back as a window that is over.
_SETTLE_AT_ONCE = (
    "INSERT INTO streamserve_ratewindow AS w (subject, what, seconds, used, ends_at_ms) "
    f"SELECT DISTINCT ON (subject, seconds) subject, '{TOKENS}', seconds, sum(more), ends_at_ms FROM ("
    'SELECT (h->>0) COLLATE "C" AS subject, (h->>1)::int AS seconds, (h->>2)::bigint AS ends_at_ms, '
    "ceil(num_tokens * (h->>3)::float8)::bigint - (h->>4)::bigint AS more "
    "FROM unnest(%s::text[], %s::bigint[]) AS e (id, num_tokens) JOIN streamserve_stream AS s USING (id), "
    "json_array_elements(NULLIF(s.held, '')::json) AS h) AS held "
    "GROUP BY subject, seconds, ends_at_ms ORDER BY subject, seconds, ends_at_ms DESC "
    "ON CONFLICT (subject, what, seconds) DO UPDATE "
    "SET used = GREATEST(w.used + excluded.used, 0) WHERE w.ends_at_ms = excluded.ends_at_ms"
)
_SETTLE = (
    "UPDATE streamserve_ratewindow SET used = CASE WHEN used + %s < 0 THEN 0 ELSE used + %s END "
    f"WHERE subject = %s AND what = '{TOKENS}' AND seconds = %s AND ends_at_ms = %s"
)


def count(admission: Admission, num_tokens: int, *, is_work: bool = False) -> None:
    """Count tokens that were used without a reservation, in a transaction: of a title, or of a batch's rows."""
    wants = _asked(admission, lambda: Needs(answer=num_tokens), is_work=is_work)
    amounts = {one.key: one.amount for one in wants if one.what == TOKENS}
    if amounts:
        _counted(amounts, _now_ms())


def counting_rows(answers: Iterable[RowAnswer], admission: Admission) -> Callable[[], None] | None:
    """Return what counts the tokens of a batch's rows, in the transaction that stores them; None without limits."""
    if not get_settings().rates:
        return None
    tokens = sum(one.usage.prompt_tokens + one.usage.completion_tokens for one in answers)
    return partial(count, admission, tokens, is_work=True)


def seconds_until_room(admission: Admission) -> float:
    """Return how long the work of an owner has to wait until its windows have any room; 0: it has."""
    now_ms, longest = _now_ms(), 0.0
    for one in _asked(admission, lambda: Needs(answer=1), is_work=True):
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


def _asked_by(ask: Ask | None) -> list[_Asked] | BadRequest:
    """Return what a request needs of each window, or why no window has room for it."""
    try:
        return [] if ask is None else _asked(ask.admission, ask.needs, is_work=ask.is_work)
    except BadRequest as error:
        return error


def _asked(admission: Admission, needs_of: Callable[[], Needs], *, is_work: bool) -> list[_Asked]:
    """Return what a request needs of each window. Raises BadRequest for a prompt that is more than a whole window."""
    out = []
    subjects = list(_subjects(admission, is_work=is_work))
    needs = needs_of() if subjects else Needs()
    for scope, subject, rate in subjects:
        for what, seconds, limit in rate.windows():
            if what == REQUESTS:
                out.append(_Asked(scope, subject, what, seconds, limit, 1))
                continue
            prompt, answer = math.ceil(needs.prompt * rate.weight), math.ceil(needs.answer * rate.weight)
            if prompt >= limit:
                raise BadRequest(too_long(needs.prompt, seconds, limit), code="prompt_over_limit", param="messages")
            out.append(_Asked(scope, subject, what, seconds, limit, min(prompt + answer, limit), rate.weight))
    return sorted(out, key=lambda one: one.key)


def _counted(amounts: Mapping[_Key, int], now_ms: int) -> dict[_Key, _Window]:
    """Count in the windows, and return them; they are locked until the transaction ends. One that is over begins anew.

    A window may be past its limit then.
    """
    connection = connections[router.db_for_write(RateWindow)]
    keys = sorted(amounts)  # Invariant: windows are locked in one order.
    if connection.vendor not in _UPSERT or not connection.features.can_return_columns_from_insert:
        return {key: _counted_by_orm(key, amounts[key], now_ms) for key in keys}
    out = {}
    with connection.cursor() as cursor:
        for start in range(0, len(keys), _WINDOWS_AT_ONCE):
            part, values = keys[start : start + _WINDOWS_AT_ONCE], list[str | int]()
            for subject, what, seconds in part:
                values += (subject, what, seconds, amounts[subject, what, seconds], now_ms + seconds * 1000)
            cursor.execute(_statement(len(part)), values)
            out.update({(subject, what, seconds): _Window(*row) for subject, what, seconds, *row in cursor.fetchall()})
    return out


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


def _counted_by_orm(key: _Key, amount: int, now_ms: int) -> _Window:
    """Do the same for a window, on other databases."""
    subject, what, seconds = key
    ends_at_ms = now_ms + seconds * 1000
    row, is_new = RateWindow.objects.select_for_update().get_or_create(
        subject=subject, what=what, seconds=seconds, defaults={"used": amount, "ends_at_ms": ends_at_ms}
    )
    if not is_new:
        if row.ends_at_ms <= now_ms:
            row.used, row.ends_at_ms = 0, ends_at_ms
        row.used += amount
        row.save(update_fields=["used", "ends_at_ms"])
    return _Window(row.used, row.ends_at_ms)


def _reserved(wants: Sequence[_Asked], windows: Mapping[_Key, _Window], now_ms: int) -> Reserved:
    """Return what a request holds that is counted in the windows."""
    held = [
        (one.subject, one.seconds, windows[one.key].ends_at_ms, one.weight, one.amount)
        for one in wants
        if one.what == TOKENS
    ]
    return Reserved(_rates(wants, windows, now_ms), json.dumps(held) if held else None)


def _limited(wants: Sequence[_Asked], windows: Mapping[_Key, _Window], now_ms: int) -> RateLimited:
    """Return the refusal, for the first of the windows that have no room. Retry when the last of them is over."""
    seconds = {one: (windows[one.key].ends_at_ms - now_ms) / 1000 for one in wants if one.is_full(windows[one.key])}
    first = next(iter(seconds))
    out_of_requests = {one.subject: left for one, left in seconds.items() if one.what == REQUESTS}
    return RateLimited(
        refusal(first.scope, first.what, first.seconds, first.limit),
        retry_after=max(1, math.ceil(max(seconds.values()))),
        rates=_rates(wants, windows, now_ms),
        full=out_of_requests,
    )


def _rates(asked: Sequence[_Asked], windows: Mapping[_Key, _Window], now_ms: int) -> Rates:
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
