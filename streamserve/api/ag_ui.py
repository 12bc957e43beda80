"""`/ag-ui/{name}`: a model or a pipeline as an agent of AG-UI 1.0. asyncio; framework-free. docs/ag-ui.md.

    POST /ag-ui/{name}                    start a run, or show the run of that `threadId` and `runId` again
    GET  /ag-ui/{name}/{thread}/messages  what is kept of a thread: its messages, its state, what it asks
    GET  /ag-ui/{name}/{thread}/stream    the run that goes on in a thread
    POST /ag-ui/{name}/{thread}/stop      end it

A `runId` is an idempotency key within its thread: sent again it starts no second run. With a `Last-Event-ID` a reader
gets what it lacks, else everything from RUN_STARTED on. `threadId` is a thread (threads.py).
"""

from __future__ import annotations

import hashlib
from typing import Any

from streamserve.api.answers import Answers
from streamserve.api.call import Call, Reply, json_reply
from streamserve.api.conversations import Conversations, MessageView, id_headers, path_of, turn_in
from streamserve.api.idempotency import continuation_of, once_for, once_of
from streamserve.api.interrupts import with_approvals
from streamserve.api.resume import AG_UI, HeadOnly, after_of, gone, gone_reply, not_there
from streamserve.api.threads import Sent, Threads, thread_key, with_thread
from streamserve.clients.pipeline.client import PipelineClient
from streamserve.dialects.ag_ui import events, request
from streamserve.dialects.ag_ui.events import RunEncoder, RunIds
from streamserve.dialects.ag_ui.request import RunRequest
from streamserve.dialects.fields import read
from streamserve.dialects.pace import SITES_OWN, Pace, pace_of_query
from streamserve.dialects.query import query_values
from streamserve.protocol.errors import NotFinished, NotFound
from streamserve.protocol.events import INTERRUPT, Approval
from streamserve.protocol.requests import GenerateRequest, Once, ThreadKey, Turn
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.stream import Stream


async def start_run(
    call: Call, answers: Answers, threads: Threads, conversations: Conversations | None = None
) -> Reply:
    """POST /ag-ui/{name} {threadId, runId, messages, …}: run a model or a pipeline as an AG-UI agent, and stream it."""
    name, body = call.params["name"], await call.json(answers.limits)
    is_pipeline = isinstance(await answers.client(call.caller, name), PipelineClient)
    asked = request.parse(body, answers.limits, model=name, is_pipeline=is_pipeline)
    key = thread_key(AG_UI, asked.thread_id, "threadId")
    thread_key(AG_UI, asked.run_id, "runId")
    # One run of that id in its thread, whatever messages come with it the second time.
    run_key = once_for(call.caller, _key_text(key, asked.run_id), AG_UI, {"model": name})
    once = once_of(call, f"{AG_UI}/{name}", body) or run_key
    if asked.resume is None:
        stream, turn = await _run(call, answers, threads, asked, key, once)
    else:
        stream, turn = await _resumed(call, answers, threads, asked, key, once)
    turn = await turn_in(stream, turn, conversations)
    return _delivered(call, answers, stream, turn, _ids(stream, asked.thread_id, asked.run_id, turn), asked.pace)


def _key_text(key: ThreadKey, run_id: str) -> str:
    """Return what names a run among its caller's keys, as an Idempotency-Key is written."""
    return hashlib.sha256(f"{AG_UI}\n{key.client_id}\n{run_id}".encode()).hexdigest()


async def _run(
    call: Call, answers: Answers, threads: Threads, asked: RunRequest, key: ThreadKey, once: Once
) -> tuple[Stream, Turn | None]:
    """Start the run, unless it was started before."""
    stream = await answers.earlier(once)
    if stream is not None:
        return stream, None
    if call.headers.get("last-event-id"):  # a reader that comes back to a run starts none
        raise gone()
    try:
        sent = [Sent(id=one.id, message=one.message) for one in asked.sent]
        generate, turn = await with_thread(asked.generate, sent, call.caller, key, answers, threads)
    except NotFinished:  # perhaps of the same run, which another task has begun meanwhile
        stream = await answers.earlier(once)
        if stream is None:
            raise
        return stream, None
    generate = answers.with_class(generate, asked, call.caller, "streams")
    return await _begun(call, answers, generate, asked, key, once, turn), turn


async def _resumed(
    call: Call, answers: Answers, threads: Threads, asked: RunRequest, key: ThreadKey, once: Once
) -> tuple[Stream, Turn | None]:
    """Start the run that goes on with an interrupted run, unless it was started before."""
    assert asked.resume is not None
    stream_id = asked.resume.stream_id
    generate = await with_approvals(call.caller, stream_id, asked.resume.approvals, answers, once)
    stream = await answers.earlier(continuation_of(stream_id, once))
    if stream is not None:
        return stream, None
    _, turn = await with_thread(generate, (), call.caller, key, answers, threads, continues=True)
    return await _begun(call, answers, generate, asked, key, once, turn), turn


async def _begun(
    call: Call,
    answers: Answers,
    generate: GenerateRequest,
    asked: RunRequest,
    key: ThreadKey,
    once: Once,
    turn: Turn | None,
) -> Stream:
    return await answers.begin(
        call, generate, asked.on_disconnect, once=once, begins_unloaded=True, turn=turn, thread=key
    )


def _ids(stream: Stream, thread_id: str, run_id: str, turn: Turn | None) -> RunIds:
    return RunIds(
        thread_id=thread_id, run_id=run_id or stream.id, message_id=stream.id if turn is None else turn.answer_id
    )


def _delivered(
    call: Call, answers: Answers, stream: Stream, turn: Turn | None, ids: RunIds, pace: Pace = SITES_OWN
) -> Reply:
    """Return the events that the reader lacks: all of them without a Last-Event-ID; 204 where it lacks none."""
    after = after_of(call, stream, call.query())
    if after is None or after > stream.last_seq:
        return gone_reply(call, not_there(stream, after))
    if stream.terminal is not None and after >= stream.last_seq:
        return Reply(status=204)
    encoder = events.encoder_for(stream, ids=ids, last_id=call.headers.get("last-event-id", ""))
    delivery = Delivery(answers.streams, stream, encoder, after=after, pace=pace)
    return Reply(body=delivery, headers=id_headers(turn))


async def thread_messages(
    call: Call, answers: Answers, threads: Threads, conversations: Conversations | None = None
) -> Reply:
    """GET /ag-ui/{name}/{thread}/messages: what is kept of a thread, for a page that is opened again.

    `messages` are those of the branch that is shown, without a run that goes on; `state` is the last run's,
    `interrupts` what it asks. Nothing of these where the site keeps no conversations.
    """
    await answers.client(call.caller, call.params["name"])
    view = await threads.find(call.caller, thread_key(AG_UI, call.params["thread_id"], "threadId"))
    out: dict[str, Any] = {"threadId": call.params["thread_id"], "messages": [], "state": {}, "interrupts": []}
    if view is None or not view.conversation_id or conversations is None:
        return json_reply(out)
    found, rows = await conversations.whole(call.caller, view.conversation_id)
    path = [row for row in path_of(rows, found.leaf) if row.state != "running"]
    out["messages"] = [message for row in path for message in kept_messages(row)]
    if path and path[-1].role == "assistant":
        last = path[-1]
        out["state"] = last.run_state or {}
        if last.finish_reason == INTERRUPT:
            asked = [Approval(**one) for one in last.approvals]
            out["interrupts"] = [events.interrupt_json(last.stream_id, one) for one in asked]
    return json_reply(out)


def kept_messages(row: MessageView) -> list[dict[str, Any]]:
    """Return the messages of a row, under the ids that the client has or would have them."""
    if row.role == "assistant":
        return events.answer_messages(row.id, row.blocks)
    id_ = row.client_id or row.id
    if row.role == "tool":
        results = [{"toolCallId": block.get("id") or "", "content": block["text"]} for block in row.blocks]
        return [{"id": id_, "role": "tool", **result} for result in results]
    return [{"id": id_, "role": "user", "content": row.text}]


async def thread_stream(
    call: Call, answers: Answers, threads: Threads, conversations: Conversations | None = None
) -> Reply:
    """GET /ag-ui/{name}/{thread}/stream?runId=…: the run that goes on in a thread; 204 where none does.

    From RUN_STARTED on; with a `Last-Event-ID` or `?after=` what the reader lacks, also of a run that has ended.
    """
    query = call.query()
    run_id, pace = query.pop("runId", ""), pace_of_query(query_values(query))
    stream = await _last_of(call, answers, threads)
    if stream is None:
        return Reply(status=204)
    after = after_of(call, stream, query)
    if stream.terminal is not None and (not after or after >= stream.last_seq):
        return Reply(status=204)
    if call.is_head:
        return Reply(body=HeadOnly(RunEncoder.content_type, stream.id))
    turn = await turn_in(stream, None, conversations)
    ids = _ids(stream, call.params["thread_id"], run_id, turn)
    return _delivered(call, answers, stream, turn, ids, pace)


async def stop_thread(call: Call, answers: Answers, threads: Threads) -> Reply:
    """POST /ag-ui/{name}/{thread}/stop: end the run of a thread. Idempotent, also for a thread without a run."""
    read(await call.json(answers.limits, optional=True), {})
    stream = await _last_of(call, answers, threads)
    is_running = stream is not None and stream.terminal is None
    if stream is not None:
        await stream.stop()
    return json_reply({"threadId": call.params["thread_id"], "stopped": is_running})


async def _last_of(call: Call, answers: Answers, threads: Threads) -> Stream | None:
    """Return the thread's last stream of that model; None where there is none, or its events are dropped."""
    await answers.client(call.caller, call.params["name"])
    view = await threads.find(call.caller, thread_key(AG_UI, call.params["thread_id"], "threadId"))
    if view is None:
        return None
    try:
        stream = (await answers.find(call.caller, stream_id=view.stream_id)).stream
    except NotFound:
        return None
    return stream if stream is not None and stream.model == call.params["name"] else None
