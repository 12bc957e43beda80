"""`POST /streams/{id}/timings`: what a reader measured of its answer (protocol/glass.py), once an answer. asyncio.

A report looks at a stream and never reaches for it: it restores none, attaches no reader, and keeps none alive. It is
one query, and one statement of one column at most; where the stream is in this process and was reported, none.
"""

from __future__ import annotations

from dataclasses import replace

from streamserve.api.answers import Answers
from streamserve.api.call import Call, Reply, json_reply
from streamserve.dialects import native
from streamserve.protocol.errors import NotFound, TooLarge
from streamserve.protocol.glass import observed

MAX_REPORT_BYTES = 4096  # a report has some three hundred


async def report(call: Call, answers: Answers) -> Reply:
    """POST /streams/{id}/timings: what the answer's reader measured, once. A later report counts nothing."""
    if not answers.config.takes_timings:
        raise NotFound("This site takes no readers' times: READER_TIMINGS in STREAMSERVE is off.", code="timings_off")
    try:
        body = await call.json(replace(answers.limits, max_body_bytes=MAX_REPORT_BYTES))
    except TooLarge as error:
        message = f"A report has {MAX_REPORT_BYTES:,} bytes at most: numbers only (docs/monitoring.md)."
        raise TooLarge(message, code=error.code) from error
    times = native.parse_times(body)
    seen = await answers.look(call.caller, call.params["stream_id"])
    is_counted = not seen.has_times and await answers.keep_times(seen.id, times)
    if is_counted:
        measures = answers.streams.measures.of(seen.model)
        measures.note_reader(observed(seen.ttft, times), times.reconnects)
        budget = answers.config.gap_budgets.get(seen.latency_class)
        if budget is not None and times.gap_p95 is not None:
            measures.note_gaps(seen.latency_class, is_kept=times.gap_p95 <= budget)
    return json_reply({"counted": is_counted})
