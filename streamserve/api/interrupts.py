"""`with_approvals`: the request that continues an interrupted run with its user's answers. asyncio; framework-free.

    POST /streams            … approval{id: call_1} ─ done{interrupt}                 the run waits; nothing is held
    …/<id>/approvals         tool_result{id: call_1} ─ … ─ done{stop}                 another stream, with the rest

An interrupt has one continuation: its stream has the key of the interrupted stream in the unique column that
`Idempotency-Key` uses, so of two answers at once the second is refused (`continuation_of`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from streamserve.api.answers import Answers, Found
from streamserve.api.call import Caller
from streamserve.api.idempotency import continuation_of
from streamserve.clients.pipeline.interrupts import NOT_IN_TIME
from streamserve.protocol.errors import Answered, BadRequest, Gone, NotFinished
from streamserve.protocol.events import INTERRUPT, Approval, Done
from streamserve.protocol.requests import Approved, GenerateRequest, Once


async def with_approvals(
    caller: Caller, stream_id: str, approvals: Sequence[Approved], answers: Answers, once: Once | None = None
) -> GenerateRequest:
    """Return the interrupted run's own request with `continues` and `approvals`, to be started as any other.

    Its stream shows only what comes after: `tool_result` blocks with the calls' ids, then the rest. `once` is of the
    request's Idempotency-Key: the same answers with the same key give the stream that they have started.

    Raises NotFound for a stream that the caller may not read; NotFinished while it runs; Answered where it was answered
    before; Gone where it waited for too long; BadRequest for a stream that asks nothing, and for answers that name
    other calls than it asks for, or not all of them (`param` is `approvals` or `approvals[i].id`); LogUnavailable.
    """
    found = await answers.find(caller, stream_id=stream_id)
    own = continuation_of(stream_id, once)
    earlier = await answers.streams.store.find(request_key=own.key)
    if earlier is not None:
        if earlier.once is None or earlier.once.digest != own.digest:
            raise answered(earlier.id)
        return GenerateRequest(model=earlier.model, continues=stream_id, approvals=tuple(approvals))
    _check_interrupted(found)
    interrupted = await answers.streams.interrupts.find(stream_id)
    if interrupted is None:
        raise Gone(NOT_IN_TIME, code="approval_expired", param="id")
    _check_calls(interrupted.calls, approvals)
    before = interrupted.request
    return replace(before, continues=stream_id, approvals=(*before.approvals, *approvals))


def answered(stream_id: str = "") -> Answered:
    """Return the error for a second answer to an interrupt; `stream_id` is the stream that continues it."""
    where = f" Its answer is the stream {stream_id}." if stream_id else ""
    return Answered(f"This approval was given or refused before.{where}", param="id")


def _check_interrupted(found: Found) -> None:
    reason = None if found.record is None else found.record.finish_reason
    is_over = found.record is not None and found.record.is_finished
    if found.stream is not None and found.stream.terminal is not None:
        end, is_over = found.stream.terminal, True
        reason = end.finish_reason if isinstance(end, Done) else None
    if not is_over and found.stream is not None:
        raise NotFinished("The answer is still being made: it has asked nothing yet. Follow it to its end.", param="id")
    if reason != INTERRUPT and (is_over or found.record is not None):
        raise BadRequest("This answer waits for no approval.", code="not_interrupted", param="id")


def _check_calls(calls: Sequence[Approval], approvals: Sequence[Approved]) -> None:
    """Raise BadRequest unless each call has one answer."""
    left = {call.id: call.name for call in calls}
    for index, approved in enumerate(approvals):
        if approved.id not in left:
            known = ", ".join(call.id for call in calls)
            is_twice = any(call.id == approved.id for call in calls)
            what = "has two answers" if is_twice else "is no call that waits for an approval"
            message = f"The call {approved.id[:64]!r} {what}. These wait: {known}."
            raise BadRequest(message, code="unknown_call", param=f"approvals[{index}].id")
        del left[approved.id]
    if left:
        waiting = ", ".join(f"{call_id} ({name})" for call_id, name in left.items())
        message = f"Every call that waits needs an answer in the same request. Missing: {waiting}."
        raise BadRequest(message, code="missing_approval", param="approvals")
