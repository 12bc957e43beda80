"""What several tables share: idempotency keys, pages of lists, limits, and deletes of many rows. Queries block.

`hold_limit` is a lock under which rows are counted and a row is inserted, so that no limit is passed. PostgreSQL: an
advisory lock of the transaction (its manual, 13.3.5). SQLite: its write lock, taken before the count. On other
databases two requests at the same moment may pass a limit by one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from django.db import IntegrityError, connections, models
from django.db.models import F, Q
from django.utils.translation import gettext_lazy as _

from streamserve.dialects.batches import Page
from streamserve.protocol.errors import KeyReused, NotFound, Overloaded, QuotaExceeded
from streamserve.protocol.requests import Once

T = TypeVar("T")
RowT = TypeVar("RowT", bound=models.Model)

_OTHER_BODY = "This Idempotency-Key was sent with another body. Send a new key with a new request."
_ROWS_AT_ONCE = 1000  # a transaction that deletes, so that it holds no lock for long


class Keyed(models.Model):
    """The columns of a row that a request with an Idempotency-Key has made: abstract."""

    request_key = models.CharField(
        max_length=64, null=True, unique=True, editable=False, help_text=_("SHA-256 of the caller and Idempotency-Key.")
    )
    request_digest = models.CharField(
        max_length=64, null=True, editable=False, help_text=_("SHA-256 of what came with the key.")
    )

    class Meta:
        abstract = True


async def made_once(find: Callable[[], Awaitable[T | None]], make: Callable[[], Awaitable[T]]) -> T:
    """Return what the request's Idempotency-Key has made before, as `find` finds it; else `make` it.

    Of two equal requests at the same moment the first makes it, and the second finds it.
    """
    earlier = await find()
    if earlier is not None:
        return earlier
    try:
        return await make()
    except (IntegrityError, Overloaded, QuotaExceeded):
        earlier = await find()  # the other was faster, and may have taken the last place
        if earlier is None:
            raise
        return earlier


def sent_before(rows: models.QuerySet[RowT], once: Once, refusal: str = _OTHER_BODY) -> RowT | None:
    """Return the row that a request with this Idempotency-Key has made before, or None. Raises KeyReused."""
    row: Any = rows.filter(request_key=once.key).first()
    if row is not None and row.request_digest != once.digest:
        raise KeyReused(refusal)
    return row  # type: ignore[no-any-return]


def last_of(rows: models.QuerySet[RowT], page: Page, missing: Callable[[str, str], NotFound]) -> RowT | None:
    """Return the row after which a page begins, None for the first page. Raises `missing(id, "after")`."""
    if not page.after:
        return None
    row = None if "\0" in page.after else rows.filter(pk=page.after).first()  # PostgreSQL refuses NUL
    if row is None:
        raise missing(page.after, "after")
    return row


def part_of(rows: models.QuerySet[RowT], page: Page, last: Any) -> tuple[list[RowT], bool]:
    """Return the rows of a page, by their times and keys, and whether there are more; those after the row `last`."""
    sign, step = ("-", "lt") if page.is_newest_first else ("", "gt")
    if last is not None:
        later = Q(**{f"created_at__{step}": last.created_at})
        rows = rows.filter(later | Q(created_at=last.created_at, **{f"pk__{step}": last.pk}))
    found = list(rows.order_by(f"{sign}created_at", f"{sign}pk")[: page.limit + 1])
    return found[: page.limit], len(found) > page.limit


def hold_limit(rows: models.QuerySet[models.Model], of: str) -> None:
    """Hold the limit on `rows` of a tenant or an owner until the transaction ends. Call it inside a transaction."""
    connection = connections[rows.db]
    name = f"{rows.model._meta.db_table} {of}"
    if connection.vendor == "postgresql":
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [key])
    elif connection.vendor == "sqlite":
        rows.filter(pk="").update(created_at=F("created_at"))  # changes nothing, and is a write


def delete_in_parts(rows: models.QuerySet[Any]) -> int:
    """Delete rows, some in each transaction; return how many, without those that went with them."""
    num = 0
    while keys := list(rows.order_by().values_list("pk", flat=True)[:_ROWS_AT_ONCE]):
        num += rows.model._default_manager.filter(pk__in=keys).delete()[1].get(rows.model._meta.label, 0)
    return num
