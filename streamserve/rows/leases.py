"""`LeasedQuerySet` and `WorkQuerySet`: rows that one process at a time works on. Streams, jobs and batch rows share it.

    queued ── take: fence + 1, producer = the worker ──► running ── finish ──► done, failed, cancelled
       ▲                                                    │
       └── retry, give_back, requeue_of (a dead worker's) ──┘

A claim is committed at once, and no row lock is held over the work. Every later write names the fence and the worker in
its WHERE, so that a worker that lost its claim changes nothing. (Idea: Kleppmann, "How to do distributed locking";
SKIP LOCKED as in PostgreSQL's queues.)
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Any, Self, TypeVar

from django.db import connections, models, transaction
from django.db.models import F, Q
from django.db.models.functions import Coalesce
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

RowT = TypeVar("RowT", bound=models.Model)
WorkT = TypeVar("WorkT", bound="Work")

# Where rows are not skipped that another worker is claiming: so many more are read, for those that are lost to it.
_SPARE = 4
UNFINISHED = ("queued", "running")


class LeasedQuerySet(models.QuerySet[RowT]):
    """Rows with the columns `fence`, which grows with each claim, and `producer`, the worker that has the row or ""."""

    def lease(self, pk: Any, seen_fence: int, worker_id: str, **columns: Any) -> int:
        """Give the row to `worker_id` with the next fence, and write `columns`; 0 if a claim followed `seen_fence`."""
        return self.filter(pk=pk, fence=seen_fence).update(fence=F("fence") + 1, producer=worker_id, **columns)

    def leased(self, pk: Any, fence: int, worker_id: str) -> Self:
        """Return the row, if `worker_id` holds it with that fence."""
        return self.filter(pk=pk, fence=fence, producer=worker_id)

    def producers(self) -> models.QuerySet[RowT, str]:
        """Return the ids of the workers that have running rows."""
        held = self.filter(state="running").exclude(producer="")
        return held.order_by().values_list("producer", flat=True).distinct()


class WorkQuerySet(LeasedQuerySet[WorkT]):
    """Rows of a queue: see `Work`. What runs out of attempts is taken once more, to be ended as failed."""

    def unfinished(self) -> Self:
        """Return the rows that have not ended."""
        return self.filter(state__in=UNFINISHED)

    def finished_before(self, when: datetime) -> Self:
        """Return the rows that ended before `when`."""
        return self.filter(finished_at__lt=when).exclude(state__in=UNFINISHED)

    def due(self, now: datetime | None = None) -> Self:
        """Return the rows that may be taken, the next one first.

        A row without a waiting time is due when it is created, by any clock: clocks differ, and are set back.
        """
        is_due = Q(due_at__lte=now or timezone.now()) | Q(due_at__lte=F("created_at"))
        return self.filter(is_due, state="queued").order_by("due_at", "created_at", "pk")

    def take(self, worker_id: str, most: int = 1) -> list[WorkT]:
        """Claim the next rows that are due for `worker_id`, `most` at most. Two workers never get the same row."""
        if connections[self.db].features.has_select_for_update_skip_locked:
            with transaction.atomic(using=self.db):
                locked = list(self.due().select_for_update(skip_locked=True)[:most])
                return [row for row in locked if self._take(row, worker_id)]
        taken: list[WorkT] = []
        for row in self.due()[: most + _SPARE]:
            if len(taken) < most and self._take(row, worker_id):
                taken.append(row)
        return taken

    def _take(self, row: WorkT, worker_id: str) -> bool:
        queued, now = self.model._default_manager.using(self.db).filter(state="queued"), timezone.now()
        num = queued.lease(  # type: ignore[attr-defined]
            row.pk,
            row.fence,
            worker_id,
            state="running",
            attempts=F("attempts") + 1,
            started_at=Coalesce(F("started_at"), now),
        )
        if num:
            row.state, row.producer = "running", worker_id
            row.fence, row.attempts, row.started_at = row.fence + 1, row.attempts + 1, row.started_at or now
        return bool(num)

    def held(self, pk: Any, fence: int, worker_id: str) -> Self:
        """Return the running row, if `worker_id` holds it with that fence: each write about it starts from here."""
        return self.leased(pk, fence, worker_id).filter(state="running")

    def finish(self, state: str, **columns: Any) -> int:
        """End these rows as `state`: done, failed or cancelled."""
        return self.update(state=state, producer="", finished_at=timezone.now(), **_without_nul(columns))

    def retry(self, due_at: datetime, **columns: Any) -> int:
        """Queue these rows again, not before `due_at`."""
        return self.update(state="queued", producer="", due_at=due_at, **_without_nul(columns))

    def give_back(self) -> int:
        """Queue these rows again at once; the attempt does not count: their worker stops in good order."""
        return self.update(state="queued", producer="", due_at=F("created_at"), attempts=F("attempts") - 1)

    def requeue_of(self, worker_id: str, *, but: Iterable[Any] = ()) -> int:
        """Queue again what a worker holds but does not work on: all rows of a dead worker. Return how many.

        The attempt counts: what runs may have killed it.
        """
        rows = self.filter(state="running", producer=worker_id).exclude(pk__in=list(but))
        return rows.retry(timezone.now())


def _without_nul(columns: dict[str, Any]) -> dict[str, Any]:
    """Return the columns as PostgreSQL takes them, which refuses NUL in texts: messages may have it."""
    texts = {name: value for name, value in columns.items() if isinstance(value, str)}
    return {**columns, **{name: text.replace("\0", "\N{REPLACEMENT CHARACTER}") for name, text in texts.items()}}


class Work(models.Model):
    """The columns of a row that a worker takes from a queue: abstract. Its manager comes from a `WorkQuerySet`.

    A row whose attempts are used up is failed: the dead letters are the failed rows.
    """

    STATES = (
        ("queued", _("queued")),
        ("running", _("running")),
        ("done", _("done")),
        ("failed", _("failed")),
        ("cancelled", _("cancelled")),
    )

    state = models.CharField(_("state"), max_length=10, choices=STATES, default="queued", editable=False)
    fence = models.PositiveIntegerField(default=0, editable=False, help_text=_("Grows with each claim."))
    producer = models.CharField(
        _("worker"), max_length=32, blank=True, editable=False, help_text=_("The worker that runs it.")
    )
    attempts = models.PositiveSmallIntegerField(_("attempts"), default=0, editable=False)
    due_at = models.DateTimeField(
        _("due"), default=timezone.now, editable=False, help_text=_("No worker takes it before this time.")
    )
    error_code = models.CharField(_("error"), max_length=64, blank=True, editable=False)
    error_message = models.TextField(_("message"), blank=True, editable=False)
    created_at = models.DateTimeField(_("created"), default=timezone.now, editable=False)
    started_at = models.DateTimeField(_("started"), null=True, editable=False)
    finished_at = models.DateTimeField(_("finished"), null=True, editable=False)

    class Meta:
        abstract = True
        indexes = (
            models.Index(
                fields=["due_at", "created_at"], condition=models.Q(state="queued"), name="streamserve_%(class)s_due"
            ),
            models.Index(fields=["producer"], condition=models.Q(state="running"), name="streamserve_%(class)s_held"),
        )

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self.state not in UNFINISHED
