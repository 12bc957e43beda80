"""Limits over time, in the site's database: right over all its processes. protocol/rates.py has the scopes.

    start of an answer ──► `reserve`: room in every window, or RateLimited; it holds its tokens      (the row's insert)
    end of an answer   ──► `settle`: what it has used stays counted, what it held beyond is given back  (the row's end)

Both are in the transaction of the stream's row: what has no row holds nothing, and an answer whose process was killed
is settled by whoever writes its end. Without RATES nothing is asked. Blocks.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from django.db import transaction
from django.db.models import F
from django.db.models.functions import Greatest
from django.utils import timezone

from streamserve.api.answers import TEAM
from streamserve.conf import get_settings
from streamserve.dialects.batches import RowAnswer
from streamserve.models import RateHold, RateWindow
from streamserve.models import Stream as StreamRow
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
    def key(self) -> tuple[str, str, int]:
        """Return what names the window."""
        return self.subject, self.what, self.seconds


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


def reserve(admission: Admission, needs: Needs, *, is_work: bool = False) -> Rates | None:
    """Count a request in every window of its caller's, and hold its tokens; return what is left. In a transaction.

    None without limits; without a stream nothing is held, and what it counts stays. Raises RateLimited, BadRequest for
    a prompt that no window has room for: then the transaction must be undone.
    """
    asked = _asked(admission, needs, is_work=is_work)
    if not asked:
        return None
    now = timezone.now()
    windows = _locked(asked, now)
    for one in asked:
        window = windows[one.key]
        if window.used + one.amount > one.limit:
            _refuse(one, asked, windows, now)
        window.used += one.amount
    _write(windows.values())
    held = [one for one in asked if one.what == TOKENS]
    if held and admission.stream_id:
        rows = [(windows[one.key], one) for one in held]
        kept = [[row.pk, row.started_at.timestamp(), one.weight, one.amount] for row, one in rows]
        RateHold.objects.create(stream_id=admission.stream_id, windows=json.dumps(kept))
    return _rates(asked, windows, now)


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
    """Count what an answer has used instead of what it holds, in the transaction that writes its end. Idempotent."""
    hold = RateHold.objects.filter(pk=stream_id).first()
    if hold is None:
        return
    for pk, started_at, weight, amount in sorted(json.loads(hold.windows)):
        window = RateWindow.objects.filter(pk=pk, started_at__lt=_after(started_at))
        window.update(used=Greatest(F("used") + math.ceil(num_tokens * weight) - amount, 0))
    hold.delete()


def settling(stream_id: str, num_tokens: int) -> Callable[[], None] | None:
    """Return what settles an answer; None where the site has no limits over time."""
    return partial(settle, stream_id, num_tokens) if get_settings().rates else None


def count(admission: Admission, num_tokens: int, *, is_work: bool = False) -> None:
    """Count tokens that were used without a reservation, in a transaction: of a title, or of a batch's rows."""
    asked = [one for one in _asked(admission, Needs(answer=num_tokens), is_work=is_work) if one.what == TOKENS]
    if asked:
        windows = _locked(asked, timezone.now())
        for one in asked:
            windows[one.key].used += one.amount
        _write(windows.values())


def counting_rows(answers: Iterable[RowAnswer], admission: Admission) -> Callable[[], None] | None:
    """Return what counts the tokens of a batch's rows, in the transaction that stores them; None without limits."""
    if not get_settings().rates:
        return None
    tokens = sum(one.usage.prompt_tokens + one.usage.completion_tokens for one in answers)
    return partial(count, admission, tokens, is_work=True)


def seconds_until_room(admission: Admission) -> float:
    """Return how long the work of an owner has to wait until its windows have any room; 0: it has."""
    now, longest = timezone.now(), 0.0
    for one in _asked(admission, Needs(answer=1), is_work=True):
        window = RateWindow.objects.filter(subject=one.subject, what=one.what, seconds=one.seconds).first()
        if window is not None and window.used + one.amount > one.limit:
            longest = max(longest, _seconds_left(window, now))
    return longest


def drop_old(now: datetime) -> None:
    """Delete windows that are over, and holds of streams whose rows are gone."""
    RateWindow.objects.filter(started_at__lt=now - timedelta(seconds=2 * DAY)).delete()
    old = RateHold.objects.filter(created_at__lt=now - timedelta(seconds=DAY))
    old.exclude(stream_id__in=StreamRow.objects.filter(state="running").values("pk")).delete()


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


def _locked(asked: Sequence[_Asked], now: datetime) -> dict[tuple[str, str, int], RateWindow]:
    """Return the windows, locked until the transaction ends; a window that is over begins anew."""
    new = [RateWindow(subject=one.subject, what=one.what, seconds=one.seconds, started_at=now) for one in asked]
    found = _find(asked)
    if len(found) < len(asked):
        RateWindow.objects.bulk_create(
            [one for one in new if (one.subject, one.what, one.seconds) not in found], ignore_conflicts=True
        )
        found = _find(asked)
    for window in found.values():
        if _seconds_left(window, now) <= 0:
            window.used, window.started_at = 0, now
    return found


def _find(asked: Sequence[_Asked]) -> dict[tuple[str, str, int], RateWindow]:
    rows = RateWindow.objects.select_for_update().filter(subject__in={one.subject for one in asked}).order_by("pk")
    found = {(row.subject, row.what, row.seconds): row for row in rows}
    return {one.key: found[one.key] for one in asked if one.key in found}


def _write(windows: Iterable[RateWindow]) -> None:
    RateWindow.objects.bulk_update(windows, ["used", "started_at"])


def _refuse(
    one: _Asked, asked: Sequence[_Asked], windows: dict[tuple[str, str, int], RateWindow], now: datetime
) -> None:
    """Raise RateLimited for the window that has no room."""
    full = [other for other in asked if windows[other.key].used + other.amount > other.limit and other.key >= one.key]
    seconds = max(_seconds_left(windows[other.key], now) for other in full)
    if one.what == REQUESTS and len(_full) < _MAX_FULL:
        _full[one.subject] = time.monotonic() + _seconds_left(windows[one.key], now)
    raise _limited(one.scope, one.what, one.seconds, one.limit, _rates(asked, windows, now), seconds)


def _limited(scope: str, what: str, seconds: int, limit: int, rates: Rates, wait: float) -> RateLimited:
    return RateLimited(refusal(scope, what, seconds, limit), retry_after=max(1, math.ceil(wait)), rates=rates)


def _seconds_left(window: RateWindow, now: datetime) -> float:
    return window.seconds - (now - window.started_at).total_seconds()


def _rates(asked: Sequence[_Asked], windows: dict[tuple[str, str, int], RateWindow], now: datetime) -> Rates:
    """Return the windows with the smallest share left."""
    best: dict[str, Left] = {}
    for one in asked:
        window = windows[one.key]
        left = Left(
            limit=one.limit, remaining=max(0, one.limit - window.used), seconds=max(0.0, _seconds_left(window, now))
        )
        if one.what not in best or left.remaining / left.limit < best[one.what].remaining / best[one.what].limit:
            best[one.what] = left
    return Rates(requests=best.get(REQUESTS), tokens=best.get(TOKENS))


def _after(timestamp: float) -> datetime:
    """Return a moment just after a window's start: a window that has begun anew since is another."""
    return datetime.fromtimestamp(timestamp, tz=timezone.get_current_timezone()) + timedelta(milliseconds=1)
