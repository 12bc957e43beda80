"""Usage: what each owner used of a model on a day, added once per answer, in the transaction that writes its end.

    ends of streams, rows of a batch, a title ──► `add_all` ──► day │ owner │ model │ kind:  + tokens, + errors, + cost

An end is written once, whatever dies, and so is its usage. Refused requests, and embeddings, which have no row, are
counted in memory and written with the next round of the reaper: a flood of them must not become a flood of writes.
`note_refused` and `note_embedded` are of any thread; what writes blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import date, timedelta
from decimal import Decimal
from functools import cache
from threading import Lock
from typing import Any

from django.db import IntegrityError, connections, router, transaction
from django.db.models import F, Sum
from django.utils import timezone

from streamserve.api.answers import TEAM
from streamserve.api.call import Caller
from streamserve.api.usage import UsageView, Used
from streamserve.conf import get_settings
from streamserve.dialects.batches import RowAnswer
from streamserve.protocol.embeddings import EmbedRequest
from streamserve.protocol.events import SUCCESS_REASONS, Usage
from streamserve.protocol.requests import Admission
from streamserve.rows import orm
from streamserve.rows.usage_days import ANSWER, BATCH, EMBEDDING, JOB, UsageDay

_SUMMED = tuple(one.name for one in fields(Used))
_COMPUTED = ("prefill", "first_decode", "generation")  # phases in which an engine works on an answer


def used_by(usage: Usage, *, finish_reason: str, error_code: str, phases: Mapping[str, float]) -> Used:
    """Return what an answer has used. An answer that ended in an error counts as one, a stopped answer does not."""
    return Used(
        requests=1,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        reasoning_tokens=usage.reasoning_tokens,
        accepted_tokens=usage.accepted_prediction_tokens,
        errors=int(bool(error_code) and finish_reason not in SUCCESS_REASONS),
        engine_seconds=sum(phases.get(name, 0.0) for name in _COMPUTED),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Whose:
    """Whose usage it is. `team`: the name that TENANT gives, "" for none."""

    owner: str
    tenant: str
    team: str = ""


def whose_is(owner: str, tenant: str, counted_as: str | None) -> Whose:
    """Return whose usage an answer's is. Callers of a team are counted as the team; visitors as their addresses."""
    team = (counted_as or "").removeprefix(TEAM) if (counted_as or "").startswith(TEAM) else ""
    return Whose(owner=owner, tenant=tenant, team=team)


def kind_of(on_disconnect: str) -> str:
    """Return the kind of a stream's usage."""
    return JOB if on_disconnect == "job" else ANSWER


_MAX_NOTED = 10_000  # owners and models between two writes
_noted: dict[tuple[Whose, str, str], Used] = {}  # by whose, model and kind; under _lock
_lock = Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What is added to today's usage."""

    whose: Whose
    model: str
    kind: str
    used: Used


def add_all(entries: Iterable[Entry]) -> None:
    """Add to today's usage, in a transaction: a statement for some rows, locked in one order. Nothing without USAGE."""
    settings, day = get_settings(), timezone.localdate()
    rows: dict[tuple[str, ...], _Row] = {}
    for one in entries if settings.usage else ():
        key = (one.whose.owner, one.model, one.kind, one.whose.team)
        row = rows.setdefault(key, _Row(one.whose.tenant))
        row.used += one.used
        if (price := settings.prices.get(one.model)) is not None:
            used = one.used
            row.cost += price.of(
                used.prompt_tokens, used.cached_tokens, used.completion_tokens, is_batch=one.kind == BATCH
            )
    keys = sorted(rows)
    for start in range(0, len(keys), _ROWS_AT_ONCE):
        _add(day, {key: rows[key] for key in keys[start : start + _ROWS_AT_ONCE]})


def add_rows(ended: Iterable[RowAnswer | None], owner: str, tenant: str) -> None:
    """Add what rows of a batch have used, in the transaction that stores them."""
    by_model: dict[str, Used] = {}
    for answer in ended:
        if answer is not None:
            phases, reason, code = answer.phases, answer.finish_reason, answer.error_code
            used = used_by(answer.usage, finish_reason=reason, error_code=code, phases=phases)
            by_model[answer.model] = by_model.get(answer.model, Used()) + used
    whose = Whose(owner=owner, tenant=tenant)
    add_all(Entry(whose=whose, model=model, kind=BATCH, used=used) for model, used in by_model.items())


def note_refused(whose: Whose, model: str) -> None:
    """Count a refused request, until `write_noted`. Any thread."""
    _note(whose, model, ANSWER, Used(refused=1))


def note_embedded(request: EmbedRequest, admission: Admission, num_tokens: int) -> None:
    """Count a request for embeddings, until `write_noted`. Any thread."""
    whose = whose_is(admission.owner, admission.tenant, admission.counted_as)
    kind = BATCH if request.is_batch else EMBEDDING
    _note(whose, request.model, kind, Used(requests=1, prompt_tokens=num_tokens))


def _note(whose: Whose, model: str, kind: str, used: Used) -> None:
    key = whose, model, kind
    with _lock:
        if get_settings().usage and (len(_noted) < _MAX_NOTED or key in _noted):
            _noted[key] = _noted.get(key, Used()) + used


def write_noted() -> None:
    """Write what was counted since."""
    with _lock:
        noted = dict(_noted)
        _noted.clear()
    with transaction.atomic(using=UsageDay.objects.db):
        add_all(Entry(whose=whose, model=model, kind=kind, used=used) for (whose, model, kind), used in noted.items())


_KEY = ("day", "owner", "model", "kind", "team")
_COLUMNS = (*_KEY, "tenant", *_SUMMED, "cost")
_UPSERT = ("sqlite", "postgresql")  # that have ON CONFLICT
_ROWS_AT_ONCE = 50  # of a statement: SQLite may take no more than 999 values


@dataclass(slots=True)
class _Row:
    """What is added to a row of usage, whose tenant it is of if it is new."""

    tenant: str
    used: Used = field(default_factory=Used)
    cost: Decimal = Decimal(0)


def _add(day: date, rows: Mapping[tuple[str, ...], _Row]) -> None:
    """Add to rows of a day, by owner, model, kind and team; insert what is new. One statement: every end makes it."""
    connection = connections[router.db_for_write(UsageDay)]
    if connection.vendor not in _UPSERT:
        for key, row in rows.items():
            _add_by_orm(dict(zip(_KEY, (day, *key), strict=True)), row.tenant, {**asdict(row.used), "cost": row.cost})
        return
    ops = connection.ops
    values = list[Any]()
    for key, row in rows.items():
        values += [ops.adapt_datefield_value(day), *key, row.tenant]
        values += [getattr(row.used, name) for name in _SUMMED]
        values.append(ops.adapt_decimalfield_value(row.cost, 20, 9))
    with connection.cursor() as cursor:
        cursor.execute(_upsert(UsageDay._meta.db_table, len(rows)), values)


@cache
def _upsert(table: str, num: int) -> str:
    """Return the statement for so many rows. Names of columns are ours, and stand in no value."""
    more = ", ".join(f'"{name}" = "{table}"."{name}" + excluded."{name}"' for name in (*_SUMMED, "cost"))
    columns, key = (", ".join(f'"{name}"' for name in names) for names in (_COLUMNS, _KEY))
    places = f"({', '.join(['%s'] * len(_COLUMNS))})"
    values = ", ".join([places] * num)
    return f'INSERT INTO "{table}" ({columns}) VALUES {values} ON CONFLICT ({key}) DO UPDATE SET {more}'


def _add_by_orm(key: Mapping[str, Any], tenant: str, values: Mapping[str, Any]) -> None:
    """Do the same in two statements, for other databases."""
    rows = UsageDay.objects.filter(**key)
    more: dict[str, Any] = {name: F(name) + value for name, value in values.items()}
    if rows.update(**more):
        return
    try:
        with transaction.atomic(using=rows.db):
            UsageDay.objects.create(**key, tenant=tenant, **values)
    except IntegrityError:  # another process was faster
        rows.update(**more)


class UsageRows:
    """See `Usage` in api/usage.py. Any event loop."""

    async def page(self, caller: Caller, num_days: int) -> Sequence[UsageView]:
        """Return what the caller's tenant has used in the last days, the newest first; owners together."""
        return await orm.read(_views, caller.tenant, timezone.localdate() - timedelta(days=num_days - 1))


def _views(tenant: str, since: date) -> list[UsageView]:
    rows = UsageDay.objects.filter(tenant=tenant, day__gte=since).values("day", "model", "kind")
    found: Any = rows.annotate(**{f"sum_{name}": Sum(name) for name in (*_SUMMED, "cost")}).order_by(
        "-day", "model", "kind"
    )
    return [
        UsageView(
            day=row["day"],
            model=row["model"],
            kind=row["kind"],
            used=Used(**{name: row[f"sum_{name}"] for name in _SUMMED}),
            cost=row["sum_cost"],
        )
        for row in found
    ]
