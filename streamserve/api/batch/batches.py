"""The endpoints under /v1/batches, in the OpenAI shape. asyncio; framework-free. Workers do the work (web/batches/)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from streamserve.api.batch.files import FileSite
from streamserve.api.batch.rows import check_endpoint
from streamserve.api.call import Call, Caller, Reply, json_reply
from streamserve.api.idempotency import once_of
from streamserve.dialects.openai.batches import (
    FEWEST_BATCHES,
    MOST_BATCHES,
    BatchRecord,
    NewBatch,
    Page,
    batch_json,
    list_json,
    parse,
    parse_page,
)
from streamserve.protocol.errors import NotFound
from streamserve.streams.store import Once


class Batches(Protocol):
    """The batches of the site's tenants. `api` is the one that a batch was made by, and is seen by."""

    async def create(
        self, caller: Caller, batch: NewBatch, *, api: str = "openai", num_rows: int = 0, once: Once | None = None
    ) -> BatchRecord:
        """Queue a batch; with `once`, return the one that its key has queued before. `num_rows` as far as it is known.

        Raises NotFound for its file, QuotaExceeded, KeyReused.
        """

    async def sent_before(self, once: Once | None) -> BatchRecord | None:
        """Return the batch that this key has queued before, if there is one. Raises KeyReused."""

    async def find(self, caller: Caller, batch_id: str, *, api: str = "openai") -> BatchRecord:
        """Return the batch. Raises NotFound for an unknown id, and for one of another tenant or API."""

    async def page(self, caller: Caller, page: Page, *, api: str = "openai") -> tuple[Sequence[BatchRecord], bool]:
        """Return a part of the tenant's batches of an API, and whether there are more."""

    async def cancel(self, caller: Caller, batch_id: str, *, api: str = "openai") -> BatchRecord:
        """Have the batch run no more rows. Raises NotFound; BadRequest for one that has ended."""

    async def delete(self, caller: Caller, batch_id: str, *, api: str) -> None:
        """Forget a batch that has ended."""


class BatchSite(FileSite, Protocol):
    """A site with a database, a storage and workers."""

    @property
    def batches(self) -> Batches: ...


async def batches(call: Call, site: BatchSite) -> Reply:
    """POST /v1/batches: create one. GET: list them."""
    if call.method == "POST":
        body = await call.json(site.limits)
        asked, once = parse(body, site.limits), once_of(call, "batches", body)
        check_endpoint(asked.endpoint, site)
        return json_reply(batch_json(await site.batches.create(call.caller, asked, once=once)))
    page = parse_page(call.query(), most=MOST_BATCHES, usual=FEWEST_BATCHES)
    found, has_more = await site.batches.page(call.caller, page)
    return json_reply(list_json([batch_json(one) for one in found], has_more=has_more))


async def batch(call: Call, site: BatchSite) -> Reply:
    """GET /v1/batches/{id}: its status and counts."""
    return json_reply(batch_json(await site.batches.find(call.caller, call.params["batch_id"])))


async def cancel(call: Call, site: BatchSite) -> Reply:
    """POST /v1/batches/{id}/cancel: run no more rows; those that have finished are kept."""
    await call.json(site.limits, optional=True)
    return json_reply(batch_json(await site.batches.cancel(call.caller, call.params["batch_id"])))


def no_batch(batch_id: str) -> NotFound:
    """Return the error for an id that names no batch of the caller's, whatever it looks like."""
    return NotFound(f"There is no batch {batch_id[:64]!r} here.", code="batch_not_found", param="batch_id")
