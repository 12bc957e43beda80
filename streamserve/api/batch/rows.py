"""`ENDPOINTS`: what the rows of a batch may ask, and `answer_line`, which asks it. asyncio; framework-free.

A row goes to the endpoint function of its route, so it is parsed, accepted and encoded as a request to that route is.
Another endpoint is another entry in `ENDPOINTS`: its function of `Call` and `Answers`, and the JSON of its errors.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from streamserve.api import anthropic, pipelines
from streamserve.api.answers import Answers
from streamserve.api.call import Call, Caller, Reply
from streamserve.api.logs import get_logger
from streamserve.api.openai import chats, completions, embeddings, responses
from streamserve.dialects import native
from streamserve.dialects.anthropic import message as anthropic_message
from streamserve.dialects.batches import Line, RowAnswer, RowResult
from streamserve.dialects.openai import shapes
from streamserve.protocol.errors import BadRequest, ErrorBody, Refused, StreamserveError, to_body
from streamserve.protocol.events import Usage
from streamserve.protocol.trace import Trace
from streamserve.streams.stream import Stream

log = get_logger(__name__)

T = TypeVar("T")

# A row that had begun and was lost through no fault of its own is begun again so often.
MAX_RUNS = 3
_NOT_BEGUN = "queue_timeout"  # of an answer that was accepted, and had no step
_FIRST_WAIT_SECONDS, _MAX_WAIT_SECONDS = 1.0, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What answers a row, and the JSON of its errors."""

    answer: Callable[[Call, Answers], Awaitable[Reply]]
    error_json: Callable[[ErrorBody], dict[str, Any]]


# By the `url` of a row, which is the `endpoint` of its batch.
ENDPOINTS: Mapping[str, Endpoint] = {
    "/v1/chat/completions": Endpoint(answer=chats.create_chat, error_json=shapes.error_json),
    "/v1/responses": Endpoint(answer=responses.create_response, error_json=shapes.error_json),
    "/v1/completions": Endpoint(answer=completions.completions, error_json=shapes.error_json),
    "/v1/embeddings": Endpoint(answer=embeddings.embeddings, error_json=shapes.error_json),
    "/v1/messages": Endpoint(answer=anthropic.messages, error_json=anthropic_message.error_json),
}
_RUN = Endpoint(answer=pipelines.post_run, error_json=native.error_json)


@dataclass(frozen=True, slots=True)
class RowReply:
    """The response of a row, and the answer in it."""

    status_code: int
    body: str
    answer: RowAnswer | None = None


class TryLater(Exception):
    """The row was refused for now, by the load or for the lack of an engine. `seconds` is how long to wait."""

    def __init__(self, error: Refused) -> None:
        super().__init__(error.message)
        self.seconds = error.retry_after


async def check_endpoint(url: str, answers: Answers, caller: Caller) -> None:
    """Raise BadRequest unless rows of the caller's may ask `url` here."""
    known = [*ENDPOINTS, *(f"/pipelines/{name}" for name in await answers.pipelines_of(caller))]
    if url not in known:
        message = f"{url[:128]!r} takes no batches here. Known: {', '.join(known)}."
        raise BadRequest(message, code="invalid_endpoint", param="endpoint")


async def answer_line(
    answers: Answers,
    caller: Caller,
    line: Line,
    on_wait: Callable[[str], None] = lambda message: None,
    origin: Trace | None = None,
) -> RowResult:
    """Return how a line's row ended. While it is refused for the load, or for the lack of an engine, wait.

    `origin`: the trace of its batch.
    """
    request_id, wait = f"req_{secrets.token_hex(12)}", _FIRST_WAIT_SECONDS
    while True:
        try:
            reply = await run_row(answers, caller, line.url, line.body, request_id, origin)
        except TryLater as refusal:
            on_wait(str(refusal))
            await asyncio.sleep(max(wait, min(refusal.seconds, _MAX_WAIT_SECONDS)))
            wait = min(2 * wait, _MAX_WAIT_SECONDS)
        else:
            return RowResult(
                line=line.number,
                custom_id=line.custom_id,
                request_id=request_id,
                status_code=reply.status_code,
                body=reply.body,
                answer=reply.answer,
            )


async def run_row(
    answers: Answers,
    caller: Caller,
    url: str,
    body: Mapping[str, Any],
    request_id: str,
    origin: Trace | None = None,
) -> RowReply:
    """Return the response that `url` gives to `body`. Raises TryLater; cancelled, it ends the answer."""
    endpoint = ENDPOINTS.get(url, _RUN)
    raw = json.dumps(body, ensure_ascii=False).encode()
    params = {} if endpoint is not _RUN else {"name": url.rpartition("/")[2]}
    num_runs = 0
    while True:
        call = Call(
            method="POST",
            headers={"content-type": "application/json"},
            caller=caller,
            request_id=request_id,
            body=lambda: _pieces(raw),
            wait=_wait,
            params=params,
            origin=origin,
        )
        try:
            reply = await endpoint.answer(call, answers)
            assert isinstance(reply.body, bytes)  # rows that want a stream are refused before
            return RowReply(reply.status, reply.body.decode(), _answer_of(call.started))
        except StreamserveError as error:
            if not isinstance(error, Refused):
                return _failed(endpoint, error, call.started)
            if not call.started or error.code == _NOT_BEGUN:
                raise TryLater(error) from error
            num_runs += 1
            if num_runs >= MAX_RUNS:
                return _failed(endpoint, error, call.started)
        except Exception:
            log.exception("batch_row_failed", request_id=request_id)
            message = f"The server failed on this row. Its log has the cause under {request_id}."
            return _failed(endpoint, StreamserveError(message), call.started)


def _failed(endpoint: Endpoint, error: StreamserveError, started: Sequence[Stream]) -> RowReply:
    body = json.dumps(endpoint.error_json(to_body(error)), ensure_ascii=False)
    return RowReply(error.http_status, body, _answer_of(started))


def _answer_of(started: Sequence[Stream]) -> RowAnswer | None:
    """Return what a row's answer took; the answers of several prompts are counted together."""
    if not started:
        return None
    summaries = [stream.summary() for stream in started]
    last, ttfts = summaries[-1], [one.ttft for one in summaries if one.ttft is not None]
    return RowAnswer(
        stream_id=summaries[0].id,
        model=last.model,
        usage=sum((stream.usage for stream in started), Usage()),
        finish_reason=last.finish_reason or "",
        error_code=next((one.error_code for one in summaries if one.error_code), ""),
        seconds=max(one.latency for one in summaries),
        ttft_seconds=min(ttfts, default=None),
        phases=last.phases,
    )


async def _pieces(raw: bytes) -> AsyncIterator[bytes]:
    yield raw


async def _wait(work: Coroutine[Any, Any, T], /) -> T:
    return await work
