"""The endpoints of `/v1/completions/stream`: plain tokens, also for a bare EventSource. asyncio; framework-free."""

from __future__ import annotations

from streamserve.api.answers import Answers
from streamserve.api.call import Call, Reply
from streamserve.api.idempotency import once_of
from streamserve.api.resume import HeadOnly, gone_reply, stream_of_event
from streamserve.dialects.openai import plain_tokens
from streamserve.dialects.openai.plain_tokens import PlainRequest
from streamserve.dialects.pace import Pace, pace_of_query
from streamserve.dialects.query import query_values
from streamserve.protocol.errors import Forbidden, StreamserveError
from streamserve.protocol.measures import RESPONSES
from streamserve.protocol.requests import Once
from streamserve.streams.reader.delivery import Delivery
from streamserve.streams.stream import Stream

_PROMPT_IN_URL = (
    "Answers are not started by GET here, because the prompt would be in the access logs. POST it to "
    "/v1/completions/stream, or turn PROMPT_IN_URL on in STREAMSERVE."
)


async def post_tokens(call: Call, answers: Answers) -> Reply:
    """POST /v1/completions/stream: plain tokens."""
    body = await call.json(answers.limits)
    asked = plain_tokens.parse(body, answers.limits, default_model=await answers.default_model(call.caller))
    return await _start_plain(call, answers, asked, once_of(call, "completions/stream", body))


async def get_tokens(call: Call, answers: Answers) -> Reply:
    """GET /v1/completions/stream: for a bare EventSource, which with a Last-Event-ID never starts again."""
    try:
        return await _get_plain(call, answers)
    except StreamserveError as error:
        if "text/event-stream" not in call.headers.get("accept", ""):
            raise
        RESPONSES.by_code[error.code] += 1
        headers = {"Content-Type": plain_tokens.PlainEncoder.content_type, "Cache-Control": "no-store"}
        return Reply(body=plain_tokens.refusal(error), headers=headers)


async def _get_plain(call: Call, answers: Answers) -> Reply:
    event_id, query = call.headers.get("last-event-id"), call.query()
    if not event_id:
        if not answers.config.takes_prompt_in_url:
            raise Forbidden(_PROMPT_IN_URL, code="prompt_in_url_off")
        model = await answers.default_model(call.caller)
        asked = plain_tokens.parse_query(query, answers.limits, default_model=model)
        return await _start_plain(call, answers, asked)
    stream, after = await stream_of_event(call, answers, event_id)
    if stream is None or not 0 <= after <= stream.last_seq:
        return gone_reply(call)
    if stream.terminal is not None and after >= stream.last_seq:
        return Reply(status=204)
    if call.is_head:
        return Reply(body=HeadOnly(plain_tokens.PlainEncoder.content_type, stream.id))
    return Reply(body=_plain_delivery(answers, stream, pace_of_query(query_values(query)), after))


async def _start_plain(call: Call, answers: Answers, asked: PlainRequest, once: Once | None = None) -> Reply:
    if call.is_head:
        return Reply(body=HeadOnly(plain_tokens.PlainEncoder.content_type))
    request = answers.with_class(asked.generate, asked, call.caller, "completions")
    stream = await answers.begin(call, request, asked.on_disconnect, once=once)
    return Reply(body=_plain_delivery(answers, stream, asked.pace, 0))


def _plain_delivery(answers: Answers, stream: Stream, pace: Pace, after: int) -> Delivery:
    encoder = plain_tokens.PlainEncoder(stream.log_id)
    return Delivery(answers.streams, stream, encoder, after=after, pace=pace)
