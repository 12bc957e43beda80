"""What a server elsewhere answers instead of an event stream → an error of ours, and a line in the log.

Its own words reach a caller only where they are about the caller's request (400, 413, 422), cut and without control
characters. What is about the site's configuration (a wrong key, a wrong address) is logged, and the caller's error is
that the model is not available. The key is in no message. Pure but for the log, which `report` writes.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from streamserve.protocol.errors import BadRequest, EngineUnavailable, Overloaded, StreamserveError, TooLarge

# Of the body of an error response: what is read of it, and how much of its message is shown.
MAX_ERROR_BYTES = 64 * 1024
_MAX_SHOWN_CHARS = 500
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")
_PARAM = re.compile(r"[A-Za-z0-9_.\[\]-]{1,100}")
_RETRY_SECONDS = 5


class UpstreamBroken(Exception):
    """The server's response is not what it should be; the message is for the operator."""


class UpstreamLost(Exception):
    """The connection ended, or nothing came in time; the message is for the operator."""


class UpstreamAway(UpstreamLost):
    """The server could not be reached, or says nothing to anyone: no fault of the request."""


class UpstreamError(Exception):
    """The server ended the answer by an error of its own, after the response had begun; the message is for the log."""


def unavailable(
    alias: str, *, code: str = "engine_unavailable", retry_after: int = _RETRY_SECONDS
) -> EngineUnavailable:
    """Return the error for a server that cannot be used now; the reason is in the log."""
    return EngineUnavailable(
        f"model {alias} is not available. Try again in a moment.", code=code, retry_after=retry_after
    )


# Statuses that any other request would get, too: the site's address or key of this server is wrong.
MISCONFIGURED = (401, 403, 404, *range(300, 400))


def error_of(
    alias: str,
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    now: float,
    report: Callable[[int, str], None],
) -> StreamserveError:
    """Return the error that a response with this status is. `now` is wall time, for a date in Retry-After."""
    message, param = message_of(_json(body))
    if status in (400, 422):
        return BadRequest(message or "the model's server refuses this request.", code="upstream_refused", param=param)
    if status == 413:
        return TooLarge(message or "the model's server refuses a request of this size.")
    if status in (429, 503):
        seconds = retry_after(headers.get("retry-after", ""), now)
        report(logging.WARNING, f"its server is busy ({status}): {message}")
        return Overloaded(f"model {alias} is busy. Try again in {seconds} s.", retry_after=seconds)
    if status in (401, 403):
        report(logging.ERROR, f"its server refuses our key ({status}): {message}. Check API_KEY_ENV.")
    elif 300 <= status < 400:
        report(
            logging.ERROR, f"its server redirects ({status}), which is not followed: give the address itself in URL."
        )
    elif status == 404:
        report(logging.ERROR, f"its server does not know the route or the model (404): {message}.")
    else:
        report(logging.ERROR, f"its server answers {status}: {message}")
    return unavailable(alias, retry_after=30 if status in MISCONFIGURED else _RETRY_SECONDS)


# How servers report that the prompt fits, and the maximum beside it does not: vLLM, older vLLM and OpenAI, SGLang.
_WINDOW = re.compile(r"maximum context length (?:is|of) (\d+)")
_PROMPT = re.compile(r"(\d+) (?:input tokens|in the (?:messages|prompt)|tokens from the input)")
_MOST = re.compile(r"at most (\d+) completion tokens")


def room_of(message: str) -> int | None:
    """Return how many tokens of an answer a server would take where it refuses a `max_tokens`; None for any other."""
    most, window, prompt = _MOST.search(message), _WINDOW.search(message), _PROMPT.search(message)
    if most is not None:
        return int(most[1])
    return None if window is None or prompt is None else int(window[1]) - int(prompt[1])


def retry_after(value: str, now: float) -> int:
    """Return the seconds of a Retry-After header, a number or a date; a guess for anything else."""
    try:
        return max(1, min(120, math.ceil(float(value))))
    except (ValueError, OverflowError):
        pass
    try:
        return max(1, min(120, math.ceil(parsedate_to_datetime(value).timestamp() - now)))
    except (TypeError, ValueError, IndexError):
        return _RETRY_SECONDS


def clean(text: object) -> str:
    """Return another server's text as one line of bounded length; "" for anything but text."""
    return _CONTROL.sub(" ", text)[:_MAX_SHOWN_CHARS].strip() if isinstance(text, str) else ""


def _json(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except (ValueError, RecursionError):
        return None


_MESSAGES = ("error", "message", "msg", "detail", "errors")
_MAX_MESSAGES, _MAX_DEPTH = 5, 8


def message_of(value: Any) -> tuple[str, str | None]:
    """Return message and param of an error body in any form that servers give it: a text, a list, an object of them.

    OpenAI's {"error": {"message", "param"}}, vLLM's older flat object, FastAPI's {"detail": [{"loc", "msg"}]}.
    """
    messages: list[str] = []
    params: list[str] = []
    _gather(value, messages, params, _MAX_DEPTH)
    return clean("; ".join(messages)), params[0] if params else None


def _gather(value: Any, messages: list[str], params: list[str], depth: int) -> None:
    """Append the messages of a value, and the fields that they are about."""
    if depth == 0 or len(messages) >= _MAX_MESSAGES:
        return
    if isinstance(value, str) and (text := clean(value)):
        messages.append(text)
    elif isinstance(value, list):
        for one in value:
            _gather(one, messages, params, depth - 1)
    elif isinstance(value, dict):
        param, place = value.get("param"), value.get("loc")
        if isinstance(place, list):  # of a JSON body: ["body", "messages", 0, "role"]
            param = ".".join(str(one) for one in (place[1:] if place[:1] == ["body"] else place))
        is_known = isinstance(param, str) and _PARAM.fullmatch(param) is not None
        params += [str(param)] if is_known else []
        inner = next((value[name] for name in _MESSAGES if value.get(name)), None)
        num_before = len(messages)
        _gather(inner, messages, params, depth - 1)
        if isinstance(place, list) and is_known and len(messages) > num_before:
            messages[num_before] = f"{param}: {messages[num_before]}"
