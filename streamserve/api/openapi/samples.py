"""Values of which replies are made, one of each kind and with every field: `/openapi.json` shows what they look like.

The functions that answer requests turn them into JSON, so that a reply is described by what writes it. Tests
compare real replies with it. docs/reference/events.md shows the events. Values only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from streamserve.api.conversations import AttachmentView, ConversationView, MessageView, ShareView
from streamserve.api.jobs import JobView
from streamserve.api.usage import UsageView, Used
from streamserve.dialects.batches import TIMES, BatchRecord, FileRecord, LineError
from streamserve.dialects.encoder import Encoder
from streamserve.protocol import events
from streamserve.protocol.engine import ModelDescription
from streamserve.protocol.events import Approval, Citation, Event, LoggedEvent, PositionLogprobs, Status, TokenLogprob
from streamserve.protocol.requests import GenerateRequest, SamplingParams

ID = "0" * 31 + "1"
NOW, NOW_SECONDS = datetime.fromtimestamp(1795651200, UTC), 1795651200
_USAGE = events.Usage(prompt_tokens=12, completion_tokens=2, cached_tokens=0)
_META = events.Meta(model="helpdesk", stream_id=ID, created=NOW_SECONDS, prompt_tokens=12)
_APPROVAL = Approval(id="call_1", name="cancel_invoice", arguments='{"number": 1042}', message="Cancel invoice 1042?")
_CUSTOM = events.Custom(name="chart", value='{"points":[1,2]}')
_ERROR = events.Error(code="queue_timeout", message="The engine was too busy.", retryable=True)
_DONE = events.Done(
    finish_reason="stop",
    usage=_USAGE,
    latency=0.25,
    breakdown={"ttft": 0.1, "tpot": 0.05},
    phases={"intake": 0.02, "prefill": 0.08, "generation": 0.15},
)
# One event of each kind.
EVENTS: tuple[Event, ...] = (
    _META,
    events.Status(status="queued", step=3),
    events.BlockStart(choice=0, index=0, kind="tool_use", id="call_1", name="find_invoice"),
    events.Token(text="Hel", token_ids=(1012,)),
    events.BlockStop(choice=0, index=0),
    events.Citation(source="billing", id="pause", title="Pause your subscription", choice=0, index=0, start=0, end=9),
    _APPROVAL,
    events.State(delta='[{"op":"replace","path":"/progress","value":2}]'),
    _CUSTOM,
    events.ChoiceDone(choice=1, finish_reason="stop"),
    events.Snapshot(seq=640, choices=(events.ChoiceText(text="Hello, and"),)),
    _DONE,
    _ERROR,
    events.Unknown(kind="a_later_event", fields=b""),
)
_SCORE = PositionLogprobs(
    chosen=TokenLogprob(token_id=5, token="Hi", bytes_=b"Hi", logprob=-0.5),
    top=(TokenLogprob(token_id=6, token="Ho", bytes_=b"Ho", logprob=-1.5),),
)
_FIRST = PositionLogprobs(chosen=TokenLogprob(token_id=4, token="A", bytes_=b"A", logprob=None))
# The same kinds with every field, or without those that may be absent.
MORE: tuple[Event, ...] = (
    events.Meta(model="elsewhere", stream_id=ID, created=NOW_SECONDS, has_token_ids=False),
    events.Status(status="prefill", step=3, of=9, message="Reading", resumable=False),
    events.Status(status="generating"),
    events.BlockStart(choice=0, index=0, kind="text"),
    events.Token(text="Hel", token_ids=(1012,), logprobs=(_SCORE, _FIRST)),
    events.BlockStop(choice=0, index=0, signature="s"),
    events.Citation(source="billing", id="pause", url="https://example.com/pause"),
    events.Approval(id="call_1", name="cancel_invoice", arguments="{}"),
    events.State(snapshot="{}"),
    events.ChoiceDone(choice=1, finish_reason="stop", stop_string="."),
    events.Snapshot(
        seq=640,
        choices=(
            events.ChoiceText(text="A", blocks=(events.BlockText(index=0, kind="text", text="A", is_open=True),)),
        ),
        citations=(Citation(source="billing", id="pause"),),
        approvals=(Approval(id="call_1", name="cancel_invoice", arguments="{}"),),
        state="{}",
        customs=(events.Custom(name="chart", value="1"),),
    ),
    events.Snapshot(seq=640, choices=(events.ChoiceText(text="A"), events.ChoiceText(text="B", finish_reason="stop"))),
    events.Done(finish_reason="stop", usage=events.Usage(reasoning_tokens=1), kept_seq=3, stop_string="."),
)


_REQUEST = GenerateRequest(model="helpdesk", prompt="Hi", sampling=SamplingParams(logprobs=1))


@dataclass(kw_only=True)
class Sample:
    """An answer, and what names its stream to a dialect."""

    log: tuple[LoggedEvent, ...]
    request: GenerateRequest = _REQUEST
    id: str = ID
    log_id: str = "1" * 32
    model: str = "helpdesk"
    created: int = NOW_SECONDS
    has_token_ids: bool = True
    outline: Sequence[Citation | Status | Approval] = field(default_factory=tuple)


def _sample(*of: Event) -> Sample:
    shown = tuple(one for one in of if isinstance(one, Citation | Status | Approval))
    return Sample(log=tuple(LoggedEvent(seq, one) for seq, one in enumerate(of, start=1)), outline=shown)


def _block(index: int, kind: str, *texts: events.Token, **named: str) -> Iterator[Event]:
    yield events.BlockStart(choice=0, index=index, kind=kind, **named)
    yield from (replace(one, index=index) for one in texts)
    yield events.BlockStop(choice=0, index=index)


_TOKEN, _SCORED = events.Token(text="Hi", token_ids=(5,)), events.Token(text="Hi", token_ids=(5,), logprobs=(_SCORE,))
_ARGUMENTS = events.Token(text='{"number":1042}', token_ids=(7,))
_CITED = Citation(source="billing", id="pause", url="https://example.com/pause", choice=0, index=1, start=0, end=2)
_TITLED = replace(_CITED, id="end", title="End your subscription")
PLAIN = _sample(_META, _TOKEN, replace(_DONE, finish_reason="length"))
RICH = _sample(
    _META,
    *_block(0, "thinking", _TOKEN),
    *_block(1, "text", _SCORED),
    _CITED,
    _TITLED,
    *_block(2, "tool_use", _ARGUMENTS, id="call_1", name="find_invoice"),
    replace(_DONE, finish_reason="tool_calls", stop_string="."),
)
STOPPED = _sample(_META, _TOKEN, replace(_DONE, stop_string="."))
RUN = _sample(
    _META,
    events.Status(status="step", step=1, of=2, message="Looking up your bill"),
    events.Status(status="trimmed", step=1, of=2, message="One passage is left out"),
    events.State(snapshot='{"progress":1}'),
    _CUSTOM,
    *_block(0, "server_tool_use", _ARGUMENTS, id="call_1", name="find_invoice"),
    *_block(1, "tool_result", _TOKEN, id="call_1"),
    *_block(2, "text", _TOKEN),
    *_block(3, "server_tool_use", _ARGUMENTS, id="call_2", name="cancel_invoice"),
    replace(_APPROVAL, id="call_2"),
    replace(_DONE, finish_reason="interrupt"),
)
ASKS = _sample(
    _META,
    *_block(0, "server_tool_use", _ARGUMENTS, id="call_1", name="cancel_invoice"),
    Approval(id="call_1", name="cancel_invoice", arguments="{}"),
    replace(_DONE, finish_reason="interrupt"),
)
PROMPTED = _sample(_META, events.Token(text="", token_ids=(), logprobs=(_FIRST, _SCORE)), _TOKEN, _DONE)
FAILED = _sample(_META, _ERROR)
SAMPLES = (PLAIN, RICH, STOPPED, RUN, ASKS)


def frames(encoder: Encoder, sample: Sample) -> Iterator[tuple[str, object]]:
    """Yield the event and the data of each frame that an encoder makes of a sample, as far as the data are JSON."""
    for logged in sample.log:
        for block in encoder.encode(logged).decode().split("\n\n"):
            lines = [line.partition(":") for line in block.splitlines()]
            found = {name: value.removeprefix(" ") for name, _, value in lines}
            if found.get("data", "[DONE]") != "[DONE]":
                yield found.get("event", ""), json.loads(found["data"])


MODEL = ModelDescription(alias="helpdesk", state="ready", created=NOW_SECONDS, max_model_len=8192)
EMBEDDER = replace(MODEL, alias="search", kind="embeddings", dimensions=384, max_model_len=0)
JOB = JobView(
    id=ID,
    stream_id=ID,
    pipeline="billing",
    status="queued",
    attempts=0,
    place=0,
    waits_for="turn",
    progress=None,
    result=None,
    error=None,
    webhook="",
    created_at=NOW,
    due_at=NOW,
    started_at=None,
    finished_at=None,
)
JOBS = (
    JOB,
    replace(JOB, place=None, waits_for=None),
    replace(JOB, status="done", started_at=NOW, finished_at=NOW, result={"text": "Hi"}, progress={"step": 1}),
    replace(JOB, status="failed", error=("timeout", "It took too long."), webhook="crm"),
)
CONVERSATION = ConversationView(
    id=ID,
    title="Invoices",
    model="helpdesk",
    source="chat",
    is_pinned=False,
    leaf=ID,
    is_running=False,
    created_at=NOW,
    updated_at=NOW,
)
CONVERSATIONS = (CONVERSATION, replace(CONVERSATION, leaf=""))
ATTACHMENT = AttachmentView(
    id=ID, name="a.txt", content_type="text/plain", num_bytes=3, num_chars=3, created_at=NOW, num_kept=3
)
ATTACHMENTS = (ATTACHMENT, replace(ATTACHMENT, num_kept=None))
QUESTION = MessageView(
    id=ID,
    parent="",
    role="user",
    state="finished",
    blocks=[{"index": 0, "kind": "text", "text": "Hi"}],
    citations=[],
    steps=[],
    attachments=ATTACHMENTS,
    text="Hi",
    stream_id="",
    model="",
    finish_reason="",
    error_code="",
    prompt_tokens=0,
    cached_tokens=0,
    completion_tokens=0,
    rating=None,
    comment="",
    created_at=NOW,
    finished_at=None,
)
MESSAGES = (
    QUESTION,
    replace(
        QUESTION,
        parent=ID,
        role="assistant",
        stream_id=ID,
        finish_reason="stop",
        error_code="timeout",
        rating=1,
        finished_at=NOW,
        citations=[one.payload() for one in (*EVENTS, *MORE) if isinstance(one, Citation)],
        steps=[one.payload() for one in (*EVENTS, *MORE) if isinstance(one, Status)],
        approvals=[one.payload() for one in (*EVENTS, *MORE) if isinstance(one, Approval)],
        customs=[one.payload() for one in EVENTS if isinstance(one, events.Custom)],
        run_state={},
    ),
)
_OTHERS = {"approvals": (), "customs": (), "run_state": None, "citations": (), "steps": (), "finished_at": NOW}


def _answered(*blocks: tuple[str, str], **fields: Any) -> MessageView:
    """Return an answer of blocks, each a kind and its text; the ids of calls and of their results count up."""
    shown: list[dict[str, Any]] = []
    for index, (kind, words) in enumerate(blocks):
        calls = sum(one["kind"].endswith("tool_use") for one in shown)
        named = {"id": f"call_{calls}", "name": "find_invoice"} if kind.endswith("tool_use") else {}
        named = {"id": f"call_{calls - 1}"} if kind == "tool_result" else named
        shown.append({"index": index, "kind": kind, "text": words, **named})
    given = {**_OTHERS, "role": "assistant", "stream_id": ID, "finish_reason": "stop", "blocks": shown, **fields}
    return replace(QUESTION, **given)


# A conversation with all that an answer may have: thoughts, tools of its client and of its run, sources, a refusal.
CONVERSED = (
    QUESTION,
    _answered(("thinking", "Hm"), ("text", "Hi"), ("tool_use", '{"number":1042}'), citations=MESSAGES[1].citations),
    replace(QUESTION, role="tool", blocks=[{"index": 0, "kind": "tool_result", "id": "call_0", "text": '{"due":1}'}]),
    _answered(("text", "Hi")),
    QUESTION,
    _answered(
        ("server_tool_use", "{}"),
        ("tool_result", "paid"),
        ("server_tool_use", '{"number":'),
        ("server_tool_use", "{}"),
        ("tool_result", "Error: gone"),
        ("server_tool_use", "{}"),
        ("tool_result", "The user has refused this call."),
        ("text", "Hi"),
        customs=MESSAGES[1].customs,
        run_state={},
        approvals=[{"id": "call_3", "name": "find_invoice", "arguments": "{}", "message": "May I?"}],
    ),
    QUESTION,
    _answered(
        ("server_tool_use", "{}"),
        finish_reason="interrupt",
        approvals=[{"id": "call_0", "name": "find_invoice", "arguments": "{}"}],
    ),
)
SHARES = (
    ShareView(id=ID, created_at=NOW, expires_at=None),
    ShareView(id=ID, created_at=NOW, expires_at=NOW),
)
USAGE = UsageView(day=date(2026, 11, 26), model="helpdesk", kind="streams", used=Used(), cost=Decimal(1))
FILE = FileRecord(id="file-1", filename="in.jsonl", num_bytes=3, purpose="batch", created_at=NOW_SECONDS)
FILES = (FILE, replace(FILE, expires_at=NOW_SECONDS))
BATCH = BatchRecord(id="batch_1", endpoint="/v1/chat/completions", status="validating", input_file_id="file-1")
BATCHES = (
    BATCH,
    replace(
        BATCH,
        status="completed",
        output_file_id="file-2",
        error_file_id="file-3",
        metadata={"ticket": "1042"},
        errors=(
            LineError(code="invalid_url", message="", line=1, param="url"),
            LineError(code="invalid_body", message=""),
        ),
        times=dict.fromkeys(TIMES, NOW_SECONDS),
    ),
)
