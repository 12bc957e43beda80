"""The endpoints under /v1/batches, in OpenAI's shape, and those under /v1/messages/batches, in Anthropic's.

The requests of a message batch become the input file of a batch, which runs as every other batch does; its results are
one file. asyncio; framework-free. Workers do the work (work/).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Protocol

from streamserve.api.answers import Answers
from streamserve.api.anthropic import id_header
from streamserve.api.batch.files import Files
from streamserve.api.batch.rows import check_endpoint
from streamserve.api.call import Call, Caller, Reply, json_reply
from streamserve.api.idempotency import once_of
from streamserve.dialects.anthropic import batches as anthropic_batches
from streamserve.dialects.anthropic.batches import ANTHROPIC
from streamserve.dialects.anthropic.message import parse_list
from streamserve.dialects.batches import ENDED, PURPOSE, BatchDialect, BatchRecord, NewBatch, Page
from streamserve.dialects.openai.batches import (
    FEWEST_BATCHES,
    MOST_BATCHES,
    OPENAI,
    batch_json,
    list_json,
    parse,
    parse_page,
)
from streamserve.protocol.errors import BadRequest, NotFound
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import Once
from streamserve.protocol.trace import Trace


class Batches(Protocol):
    """The batches of the site's tenants. `dialect` is the API that made a batch; only this API shows it."""

    async def create(
        self,
        caller: Caller,
        batch: NewBatch,
        *,
        dialect: BatchDialect = OPENAI,
        num_rows: int = 0,
        once: Once | None = None,
        trace: Trace | None = None,
    ) -> BatchRecord:
        """Queue a batch; with `once`, return the batch that its key has queued before. `num_rows` as far as known.

        Raises NotFound for its file, QuotaExceeded, KeyReused.
        """

    async def sent_before(self, once: Once | None) -> BatchRecord | None:
        """Return the batch that this key has queued before, or None. Raises KeyReused."""

    async def find(self, caller: Caller, batch_id: str, *, dialect: BatchDialect = OPENAI) -> BatchRecord:
        """Return the batch. Raises NotFound for an unknown id, and for a batch of another tenant or API."""

    async def page(
        self, caller: Caller, page: Page, *, dialect: BatchDialect = OPENAI
    ) -> tuple[Sequence[BatchRecord], bool]:
        """Return a part of the tenant's batches of an API, and whether there are more."""

    async def cancel(self, caller: Caller, batch_id: str, *, dialect: BatchDialect = OPENAI) -> BatchRecord:
        """Have the batch run no more rows. Raises NotFound; BadRequest if it has ended."""

    async def delete(self, caller: Caller, batch_id: str, *, dialect: BatchDialect) -> None:
        """Forget a batch that has ended."""


async def create(call: Call, batches: Batches, answers: Answers) -> Reply:
    """POST /v1/batches: create a batch."""
    body = await call.json(answers.limits)
    asked, once = parse(body, answers.limits), once_of(call, "batches", body)
    await check_endpoint(asked.endpoint, answers, call.caller)
    return json_reply(batch_json(await batches.create(call.caller, asked, once=once, trace=call.trace)))


async def list_batches(call: Call, batches: Batches) -> Reply:
    """GET /v1/batches: a page of the tenant's batches."""
    page = parse_page(call.query(), most=MOST_BATCHES, usual=FEWEST_BATCHES)
    found, has_more = await batches.page(call.caller, page)
    return json_reply(list_json([batch_json(record) for record in found], has_more=has_more))


async def batch(call: Call, batches: Batches) -> Reply:
    """GET /v1/batches/{id}: its status and counts."""
    return json_reply(batch_json(await batches.find(call.caller, call.params["batch_id"])))


async def cancel(call: Call, batches: Batches, answers: Answers) -> Reply:
    """POST /v1/batches/{id}/cancel: run no more rows; those that have finished are kept."""
    await call.json(answers.limits, optional=True)
    return json_reply(batch_json(await batches.cancel(call.caller, call.params["batch_id"])))


def no_batch(batch_id: str, param: str = "batch_id") -> NotFound:
    """Return the error for an id that names no batch of the caller's, whatever it looks like."""
    return NotFound(f"There is no batch {batch_id[:64]!r} here.", code="batch_not_found", param=param)


async def list_messages(call: Call, batches: Batches) -> Reply:
    """GET /v1/messages/batches: a page of the tenant's batches, the newest first."""
    found, has_more = await _message_page(call, batches, call.query())
    items = [anthropic_batches.batch_json(record) for record in found]
    edges = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    return json_reply({"data": items, "has_more": has_more, **edges}, headers=id_header(call.request_id))


async def message_batch(call: Call, batches: Batches) -> Reply:
    """GET /v1/messages/batches/{id}: its status and counts."""
    return _message_reply(call, await batches.find(call.caller, call.params["batch_id"], dialect=ANTHROPIC))


async def delete_messages(call: Call, batches: Batches, files: Files) -> Reply:
    """DELETE /v1/messages/batches/{id}: delete a batch that has ended, with its results."""
    batch = await batches.find(call.caller, call.params["batch_id"], dialect=ANTHROPIC)
    _refuse_unended(batch)
    for file_id in (batch.output_file_id, batch.input_file_id):
        with suppress(NotFound, BadRequest):  # another batch may read the requests: they stay for it
            await files.delete(call.caller, file_id)
    await batches.delete(call.caller, batch.id, dialect=ANTHROPIC)
    return json_reply(anthropic_batches.deleted_json(batch.id), headers=id_header(call.request_id))


async def cancel_messages(call: Call, batches: Batches, answers: Answers) -> Reply:
    """POST /v1/messages/batches/{id}/cancel: run no more requests; those that have finished are kept."""
    await call.json(answers.limits, optional=True)
    return _message_reply(call, await batches.cancel(call.caller, call.params["batch_id"], dialect=ANTHROPIC))


async def message_results(call: Call, batches: Batches, files: Files) -> Reply:
    """GET /v1/messages/batches/{id}/results: a line of JSON for each request, in the order of the requests."""
    batch = await batches.find(call.caller, call.params["batch_id"], dialect=ANTHROPIC)
    _refuse_unended(batch)
    if not batch.output_file_id:
        message = f"The batch {batch.id} failed before any request was run, and has no results. Create it again."
        raise NotFound(message, code="results_not_found", param="batch_id")
    body = await files.content(call.caller, batch.output_file_id)
    return Reply(body=body, headers=id_header(call.request_id))


async def create_messages(call: Call, batches: Batches, files: Files, answers: Answers) -> Reply:
    """POST /v1/messages/batches: create a batch of the requests in the body."""
    return _message_reply(call, await _create_messages(call, batches, files, answers.limits))


async def _create_messages(call: Call, batches: Batches, files: Files, limits: Limits) -> BatchRecord:
    is_lines = anthropic_batches.check_type(call.headers.get("content-type", ""))
    async with files.body(call) as body:
        with tempfile.TemporaryFile() as lines:
            num_rows, digest = await asyncio.to_thread(_write_lines, body, is_lines, lines, limits)
            body.close()
            once = once_of(call, "messages/batches", {"requests": digest})
            earlier = await batches.sent_before(once)
            if earlier is not None:
                return earlier
            num_bytes = lines.seek(0, os.SEEK_END)
            lines.seek(0, os.SEEK_SET)
            file = await files.store(
                lines, call.caller, filename="requests.jsonl", purpose=PURPOSE, num_bytes=num_bytes
            )
    asked = NewBatch(endpoint=anthropic_batches.ENDPOINT, input_file_id=file.id)
    try:
        batch = await batches.create(
            call.caller, asked, dialect=ANTHROPIC, num_rows=num_rows, once=once, trace=call.trace
        )
    except BaseException:
        await files.delete(call.caller, file.id)
        raise
    if batch.input_file_id != file.id:  # the same request was faster
        await files.delete(call.caller, file.id)
    return batch


def _write_lines(body: IO[bytes], is_lines: bool, lines: IO[bytes], limits: Limits) -> tuple[int, str]:
    """Write the requests in the body as lines; return how many, and the lines' digest. Blocks."""
    num_rows = anthropic_batches.write_requests(body, is_lines, lines, limits)
    lines.seek(0, os.SEEK_SET)
    digest = hashlib.file_digest(lines, "sha256")  # type: ignore[arg-type]  # a file can be read into
    return num_rows, digest.hexdigest()


async def _message_page(call: Call, batches: Batches, query: Mapping[str, str]) -> tuple[list[BatchRecord], bool]:
    """Return the batches that a query asks for, newest first, and whether there are more in its direction."""
    asked = parse_list(query)
    is_before = "before_id" in asked
    after = asked["before_id"] if is_before else asked.get("after_id", "")
    page = Page(limit=asked["limit"], after=after, is_newest_first=not is_before)
    found, has_more = await batches.page(call.caller, page, dialect=ANTHROPIC)
    return list(reversed(found)) if is_before else list(found), has_more


def _refuse_unended(batch: BatchRecord) -> None:
    if batch.status not in ENDED:
        message = f"The batch {batch.id} has not ended. Wait until it has, or cancel it."
        raise BadRequest(message, code="batch_not_ended", param="batch_id")


def _message_reply(call: Call, batch: BatchRecord) -> Reply:
    return json_reply(anthropic_batches.batch_json(batch), headers=id_header(call.request_id))
