"""The law of a batch's status: it changes as the table says, whatever a worker and a caller ask at the same moment."""

from __future__ import annotations

from itertools import product

import pytest
from django.utils import timezone

from streamserve.dialects.batches import ENDED
from streamserve.models import Batch
from streamserve.rows.work import BEFORE, RUNNING, BatchQuerySet

pytestmark = pytest.mark.django_db

STATUSES = (*RUNNING, *ENDED)


def held(status: str) -> BatchQuerySet:
    """Return the queryset of a batch of that status that a worker holds."""
    fields = {"owner": "o", "tenant": "t", "endpoint": "/x", "input_file_id": "f", "expires_at": timezone.now()}
    Batch.objects.create(id="batch_1", status=status, **fields)
    (taken,) = Batch.objects.take("w")
    return Batch.objects.all().held(taken.pk, taken.fence, "w")


def change(rows: BatchQuerySet, to: str) -> int:
    """Ask for a change as the code does: a caller cancels, a worker moves and ends."""
    if to == "cancelling":
        return Batch.objects.cancel("batch_1")
    return rows.end(to) if to in ENDED else rows.move(to)


def test_every_status_but_the_first_has_a_way_to_it() -> None:
    """And none leads back to the first, nor out of an end."""
    assert set(BEFORE) == set(STATUSES) - {"validating"}
    assert not {status for before in BEFORE.values() for status in before} & set(ENDED)


@pytest.mark.parametrize(("status", "to"), list(product(STATUSES, BEFORE)))
def test_a_status_changes_as_the_table_says(status: str, to: str) -> None:
    """A change that the table does not have finds no row, and leaves the row as it is."""
    is_allowed = status in BEFORE[to]
    assert bool(change(held(status), to)) == is_allowed
    row = Batch.objects.get()
    assert row.status == (to if is_allowed else status)
    assert (getattr(row, f"{to}_at") is not None) == is_allowed
    assert row.is_finished == (is_allowed and to in ENDED)
