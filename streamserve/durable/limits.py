"""`hold_limit`: a lock under which rows are counted and one more is inserted, so that no limit is passed. Blocking.

PostgreSQL: an advisory lock of the transaction (its manual, 13.3.5). SQLite: its write lock, taken before the count.
On other databases two requests at the same moment may pass a limit by one.
"""

from __future__ import annotations

import hashlib

from django.db import connections, models
from django.db.models import F


def hold_limit(rows: models.QuerySet[models.Model], of: str) -> None:
    """Hold the limit on `rows` of a tenant or an owner until the transaction ends. Call it inside one."""
    connection = connections[rows.db]
    name = f"{rows.model._meta.db_table} {of}"
    if connection.vendor == "postgresql":
        key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [key])
    elif connection.vendor == "sqlite":
        rows.filter(pk="").update(created_at=F("created_at"))  # changes nothing, and is a write
