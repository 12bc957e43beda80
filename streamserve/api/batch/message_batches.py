"""The endpoints under /v1/messages/batches, in Anthropic's shape. asyncio; framework-free.

The requests of a body become the input file of a batch, which runs as every other one does; its results are one file.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from typing import IO

from streamserve.api.anthropic import id_header
from streamserve.api.batch.batches import BatchSite
from streamserve.api.call import Call, Reply, json_reply
from streamserve.api.idempotency import once_of
from streamserve.dialects.anthropic import batches as dialect
from streamserve.dialects.anthropic.message import limit_of
from streamserve.dialects.openai.batches import ENDED, PURPOSE, BatchRecord, NewBatch, Page
from streamserve.protocol.errors import BadRequest, NotFound
from streamserve.protocol.requests import Limits

API = "anthropic"


async def message_batches(call: Call, site: BatchSite) -> Reply:
    """POST /v1/messages/batches: create one. GET: list them, newest first."""
    if call.method == "POST":
        return _reply(call, await _create(call, site))
    query = call.query()
    found, has_more = await _page(call, site, query)
    items = [dialect.batch_json(one) for one in found]
    edges = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    return json_reply({"data": items, "has_more": has_more, **edges}, headers=id_header(call.request_id))


async def message_batch(call: Call, site: BatchSite) -> Reply:
    """GET /v1/messages/batches/{id}: its status and counts. DELETE: delete it with its results, when it has ended."""
    batch = await site.batches.find(call.caller, call.params["batch_id"], api=API)
    if call.method != "DELETE":
        return _reply(call, batch)
    _refuse_unended(batch)
    for file_id in (batch.output_file_id, batch.input_file_id):
        with suppress(NotFound, BadRequest):  # another batch may read the requests: they stay for it
            await site.files.delete(call.caller, file_id)
    await site.batches.delete(call.caller, batch.id, api=API)
    return json_reply(dialect.deleted_json(batch.id), headers=id_header(call.request_id))


async def cancel(call: Call, site: BatchSite) -> Reply:
    """POST /v1/messages/batches/{id}/cancel: run no more requests; those that have finished are kept."""
    await call.json(site.limits, optional=True)
    return _reply(call, await site.batches.cancel(call.caller, call.params["batch_id"], api=API))


async def results(call: Call, site: BatchSite) -> Reply:
    """GET /v1/messages/batches/{id}/results: a line of JSON for each request, in the order of the requests."""
    batch = await site.batches.find(call.caller, call.params["batch_id"], api=API)
    _refuse_unended(batch)
    if not batch.output_file_id:
        message = f"The batch {batch.id} failed before any request was run, and has no results. Create it again."
        raise NotFound(message, code="results_not_found", param="batch_id")
    body = await site.files.content(call.caller, batch.output_file_id)
    return Reply(body=body, headers=id_header(call.request_id))


async def _create(call: Call, site: BatchSite) -> BatchRecord:
    is_lines = dialect.check_type(call.headers.get("content-type", ""))
    async with site.files.body(call) as body:
        with tempfile.TemporaryFile() as lines:
            num_rows, digest = await asyncio.to_thread(_write_lines, body, is_lines, lines, site.limits)
            body.close()
            once = once_of(call, "messages/batches", {"requests": digest})
            earlier = await site.batches.sent_before(once)
            if earlier is not None:
                return earlier
            num_bytes = lines.seek(0, os.SEEK_END)
            lines.seek(0, os.SEEK_SET)
            file = await site.files.store(
                lines, call.caller, filename="requests.jsonl", purpose=PURPOSE, num_bytes=num_bytes
            )
    asked = NewBatch(endpoint=dialect.ENDPOINT, input_file_id=file.id)
    try:
        batch = await site.batches.create(call.caller, asked, api=API, num_rows=num_rows, once=once)
    except BaseException:
        await site.files.delete(call.caller, file.id)
        raise
    if batch.input_file_id != file.id:  # the same request was faster
        await site.files.delete(call.caller, file.id)
    return batch


def _write_lines(body: IO[bytes], is_lines: bool, lines: IO[bytes], limits: Limits) -> tuple[int, str]:
    """Write the requests in the body as lines; return how many, and the lines' digest. Blocks."""
    num_rows = dialect.write_requests(body, is_lines, lines, limits)
    lines.seek(0, os.SEEK_SET)
    digest = hashlib.file_digest(lines, "sha256")  # type: ignore[arg-type]  # a file can be read into
    return num_rows, digest.hexdigest()


async def _page(call: Call, site: BatchSite, query: Mapping[str, str]) -> tuple[list[BatchRecord], bool]:
    """Return the batches that a query asks for, newest first, and whether there are more in its direction."""
    is_before = "before_id" in query
    after = query["before_id"] if is_before else query.get("after_id", "")
    page = Page(limit=limit_of(query), after=after, is_newest_first=not is_before)
    found, has_more = await site.batches.page(call.caller, page, api=API)
    return list(reversed(found)) if is_before else list(found), has_more


def _refuse_unended(batch: BatchRecord) -> None:
    if batch.status not in ENDED:
        message = f"The batch {batch.id} has not ended. Wait until it has, or cancel it."
        raise BadRequest(message, code="batch_not_ended", param="batch_id")


def _reply(call: Call, batch: BatchRecord) -> Reply:
    return json_reply(dialect.batch_json(batch), headers=id_header(call.request_id))
