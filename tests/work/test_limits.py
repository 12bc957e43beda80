"""Limits that are counted before an insert: of many requests at the same moment no more come through than may.

On SQLite and, by tests/web/sites/test_postgres.py, on PostgreSQL, where transactions do not see each other's rows.
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connections
from django.utils import timezone

from streamserve.conf import get_settings
from streamserve.models import Batch, Job, StoredFile
from streamserve.protocol.errors import NotFound, Overloaded, QuotaExceeded, StorageFull
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import Admission, GenerateRequest, Message
from streamserve.rows.store import needs_of, row_of
from streamserve.work.batches import Batches
from streamserve.work.files import Files
from streamserve.work.jobs import Jobs, _row_of

pytestmark = pytest.mark.django_db(transaction=True)

NUM_AT_ONCE, MOST = 12, 3
LIMITS = Limits(
    max_batches=MOST,
    max_jobs_per_principal=MOST,
    max_jobs_per_visitor=MOST - 1,
    max_jobs_anonymous=MOST,
    max_tenant_file_bytes=MOST << 20,
)
SETTINGS = SimpleNamespace(limits=LIMITS, rates={}, jobs=get_settings().jobs, batches=get_settings().batches)


def at_once(insert: Callable[[int], None]) -> Counter[str]:
    """Call `insert` on many threads at the same moment; count how they ended."""
    outcomes: list[str] = []
    barrier = threading.Barrier(NUM_AT_ONCE)

    def run(number: int) -> None:
        try:
            connections["default"].ensure_connection()
            barrier.wait()
            insert(number)
            outcomes.append("inserted")
        except (Overloaded, QuotaExceeded, StorageFull) as error:
            outcomes.append(error.code)
        finally:
            connections["default"].close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(NUM_AT_ONCE)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return Counter(outcomes)


def file(name: str, num_bytes: int) -> StoredFile:
    row = StoredFile(id=name, name=name, filename=name, owner="o", tenant="t", purpose="batch", num_bytes=num_bytes)
    row.is_ready = True
    return row


def test_batches() -> None:
    file("file-1", 1).save(force_insert=True)
    store: Any = Batches(SETTINGS, lambda: None)  # type: ignore[arg-type]

    def insert(number: int) -> None:
        row = Batch(id=f"batch_{number}", owner="o", tenant="t", endpoint="/x", input_file_id="file-1")
        row.expires_at = timezone.now()
        store._insert(row)

    assert at_once(insert) == {"inserted": MOST, "too_many_batches": NUM_AT_ONCE - MOST}
    assert Batch.objects.count() == MOST


def test_a_file_is_deleted_or_has_its_batch() -> None:
    """Of both at the same moment one comes through: no batch begins with a file that is gone."""
    names = [f"file-{number // 2}" for number in range(NUM_AT_ONCE)]
    for name in set(names):
        file(name, 1).save(force_insert=True)
    plenty = SimpleNamespace(**{**vars(SETTINGS), "limits": Limits()})
    store: Any = Batches(plenty, lambda: None)  # type: ignore[arg-type]
    files: Any = Files(plenty)  # type: ignore[arg-type]
    refused: list[str] = []

    def insert(number: int) -> None:
        name = names[number]
        if number % 2:
            if files._take_away(StoredFile.objects.get(pk=name)) is not None:
                refused.append(name)
            return
        row = Batch(id=f"batch_{number}", owner="o", tenant="t", endpoint="/x", input_file_id=name)
        row.expires_at = timezone.now()
        try:
            store._insert(row)
        except NotFound:
            refused.append(name)

    assert at_once(insert) == {"inserted": NUM_AT_ONCE}
    assert sorted(refused) == sorted(set(names))
    read = set(Batch.objects.values_list("input_file_id", flat=True))
    assert read == set(StoredFile.objects.of("t").values_list("pk", flat=True))


def test_files() -> None:
    store: Any = Files(SETTINGS)  # type: ignore[arg-type]
    outcomes = at_once(lambda number: store._insert(file(f"file-{number}", 1 << 20), True))
    assert outcomes == {"inserted": MOST, "storage_full": NUM_AT_ONCE - MOST}


@pytest.mark.parametrize(
    ("owner", "counted_as", "most", "code"),
    [
        ("key:1", "", MOST, "too_many_jobs"),
        ("anon:{}", "", MOST, "anonymous_places_taken"),
        ("anon:{}", "anon:@address", MOST - 1, "too_many_jobs"),
    ],
)
def test_jobs(owner: str, counted_as: str, most: int, code: str) -> None:
    jobs: Any = Jobs(SimpleNamespace(streams=None), SETTINGS, lambda: None)  # type: ignore[arg-type]
    request = GenerateRequest(model="p", messages=(Message(role="user", content="hi"),))

    def insert(number: int) -> None:
        stream_id = secrets.token_hex(16)
        caller = Admission(owner=owner.format(number), tenant="t", counted_as=counted_as, stream_id=stream_id)
        record = jobs._record(caller, request)
        jobs._insert(caller, _row_of(record, "", None), row_of(record), needs_of(record))

    assert at_once(insert) == {"inserted": most, code: NUM_AT_ONCE - most}
    assert Job.objects.count() == most
