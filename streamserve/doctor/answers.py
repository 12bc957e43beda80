"""The checks that need a model: a reader that leaves is seen by the scheduler, and a reader that returns gets the rest.

Each asks for one real answer through the address, with a key of its own, and looks at the answer's row: when the web
process ended it, and why. So a proxy that keeps asking for a reader that has left is told from an engine that computes
on by itself. Reads the database: call it on the thread that may.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping

from streamserve.doctor.verdicts import Verdict, found, ok, unknown
from streamserve.doctor.wire import Answer, Way, WayError
from streamserve.models import Stream

_NUM_TOKENS = 400  # seconds of work for a model, from which the reader leaves after the first
_NUM_RESUMED = 60
_PROMPT = "Count from 1 to 500, one number on a line."
_SEEN_SECONDS = 3.0  # a reader that leaves is seen within this time
_ENDS = ("stop", "length", "tool_calls")  # of an answer that ran to its end
_WAIT_SECONDS, _POLL_SECONDS = 20.0, 0.05
_EVENT_ID = re.compile(rb"^id: (\S+-(\d+))\r?\n", re.MULTILINE)
_STREAM_ID = re.compile(rb'"stream_id":"([0-9a-f]{32})"')
_TOKEN = b"event: token"


class NoAnswer(Exception):
    """The model gave no answer to look at. The message is for people."""


def disconnect(way: Way, path: str, headers: Mapping[str, str], model: str) -> Verdict:
    """Leave a stream in the middle, and see when its sequence leaves the engine. Raises NoAnswer."""
    started = _start(way, path, headers, model, _NUM_TOKENS, "abort")
    if b"event: done" in started.body:
        return unknown("disconnect", "The answer came in one piece and could not be left. Mend the buffering first.")
    row = _ended(_stream_id(started))
    if row is None:
        return unknown("disconnect", "The answer has no row in this site's database: does the address lead elsewhere?")
    return _disconnected(row, started.ended_at, "a stream", "disconnect_unseen")


def whole_disconnect(way: Way, path: str, headers: Mapping[str, str], model: str, owner: str) -> Verdict:
    """Leave an answer that is not streamed while it is computed: nothing is sent by which a proxy could notice.

    `owner` is the owner of the answers of the doctor's key, by which the row is found.
    """
    before = set(Stream.objects.filter(owner=owner).values_list("pk", flat=True))
    body = {"model": model, "messages": [{"role": "user", "content": _PROMPT}], "max_tokens": _NUM_TOKENS}
    with way.asking(path, headers, body):
        until = time.monotonic() + _WAIT_SECONDS
        while (row := Stream.objects.filter(owner=owner).exclude(pk__in=before).first()) is None:
            if time.monotonic() > until:
                return unknown("disconnect", "No whole answer began. See the verdicts on the model's other answers.")
            time.sleep(_POLL_SECONDS)
    left_at = time.time()
    ended = _ended(row.pk)
    return _disconnected(ended or row, left_at, "a whole answer", "whole_disconnect_unseen")


def _disconnected(row: Stream, left_at: float, what: str, fault: str) -> Verdict:
    if row.finished_at is None:
        said = f"The reader of {what} left {_WAIT_SECONDS:.0f} s ago, and the engine still computes it."
        return found("disconnect", fault, said)
    seconds, ran_to_its_end = max(row.finished_at.timestamp() - left_at, 0.0), row.finish_reason in _ENDS
    if not ran_to_its_end and seconds <= _SEEN_SECONDS:
        return ok("disconnect", f"The engine dropped {what} {seconds:.1f} s after its reader left.")
    if ran_to_its_end and seconds < 1.0:
        said = f"{what.capitalize()} had ended before its reader left: it is held back, or the model is fast (--model)."
        return unknown("disconnect", said)
    said = f"The reader of {what} left, and the engine computed it for another {seconds:.0f} s."
    return found("disconnect", fault, said)


def resume(way: Way, path: str, headers: Mapping[str, str], model: str) -> Verdict:
    """Leave an answer, return with the id of the last event, and get the rest, and nothing twice. Raises NoAnswer."""
    started = _start(way, path, headers, model, _NUM_RESUMED, "park")
    if b"event: done" in started.body:
        return unknown("resume", "The answer came in one piece and could not be left. Mend the buffering first.")
    shown, stream_id = _EVENT_ID.findall(started.body), _stream_id(started)
    if not shown or not stream_id:
        return unknown("resume", "No event with an id arrived.")
    last_id, last = shown[-1][0].decode(), int(shown[-1][1])
    rest = way.ask(f"{path}/{stream_id}/events", {**headers, "Last-Event-ID": last_id}, seconds=_WAIT_SECONDS)
    if rest.status != 200:
        said = f"A reader that returned got status {rest.status} instead of the rest: {_message(rest)}"
        return found("resume", "resume_broken", said)
    if b"event: done" not in rest.body:
        said = f"The rest of the answer did not come whole: {rest.cut or 'it ended early'}."
        return found("resume", "resume_broken", said)
    # An event has the number of the last one that it joins, so that the first number may be beyond the next.
    begins = int(rest.header("streamserve-from") or last + 1)
    if begins == last + 1 and all(int(seq) > last for _, seq in _EVENT_ID.findall(rest.body)):
        return ok("resume", "A reader that left and returned with Last-Event-ID got the rest, and nothing twice.")
    said = "A reader that returned got its answer from the start again: its Last-Event-ID did not arrive."
    return found("resume", "last_event_id_lost", said)


def _start(way: Way, path: str, headers: Mapping[str, str], model: str, num_tokens: int, on_disconnect: str) -> Answer:
    """Ask for an answer, read its first tokens and leave. Raises NoAnswer where no token comes."""
    body = {"prompt": _PROMPT, "model": model, "max_tokens": num_tokens, "on_disconnect": on_disconnect}
    try:
        answer = way.ask(path, headers, body=body, seconds=_WAIT_SECONDS, enough=_has_tokens(2))
    except WayError as error:
        raise NoAnswer(str(error)) from None
    if answer.status != 200:
        raise NoAnswer(f"No answer began (status {answer.status}): {_message(answer)}")
    if _TOKEN not in answer.body:
        raise NoAnswer("No token came. See manage.py streamserve_models for the state of the model.")
    return answer


def _has_tokens(count: int) -> Callable[[Answer], bool]:
    return lambda answer: answer.body.count(_TOKEN) >= count


def _ended(stream_id: str) -> Stream | None:
    """Wait for the end of an answer, for so long at most, and return its row; None where it has none."""
    until = time.monotonic() + _WAIT_SECONDS
    while True:
        row = Stream.objects.filter(pk=stream_id).first()
        if row is None or row.finished_at is not None or time.monotonic() > until:
            return row
        time.sleep(_POLL_SECONDS)


def _stream_id(answer: Answer) -> str:
    """Return the stream's id: from its first event, where a proxy drops the header."""
    shown = _STREAM_ID.search(answer.body)
    return answer.header("x-stream-id") or (shown[1].decode() if shown else "")


def _message(answer: Answer) -> str:
    """Return what an error says: ours, or the beginning of a proxy's page."""
    try:
        return str(json.loads(answer.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.body[:120].decode("utf-8", "replace").strip() or "it says nothing."
