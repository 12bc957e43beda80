"""The lab's pages, the state that they show, and the two buttons that kill.

State and kills are for visitors from this machine, and only while DEBUG is on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBadRequest, JsonResponse, StreamingHttpResponse
from django.middleware.csrf import get_token
from django.views.decorators.http import require_GET, require_POST

from project.lab.pace import SCENARIOS
from project.lab.reports import EVERY_SECONDS, Report, merged, read
from streamserve.protocol.sse import CONTENT_TYPE, FIRST_BYTES, frame, one_line_json
from streamserve.web.chat_page import chat_page
from streamserve.web.local import is_local

LIFE_SECONDS = 600.0  # then the page asks again
KILL_SECONDS = 3.0  # in which the process to be killed is reported: it may have begun just now
_GUIDE = Path(__file__).parents[2] / "docs" / "img" / "deliveries.svg"
# How the simulator's panes show the answer (static/lab/deliveries.js).
WAYS = (
    {
        "key": "whole",
        "name": "Buffered",
        "what": "A response without a stream, or behind a proxy that buffers: all at the end.",
    },
    {"key": "streamed", "name": "Streamed", "what": "Each token is written into the page as it comes."},
    {
        "key": "janky",
        "name": "With jank",
        "what": "The same tokens, held for 0.3 to 1.3 s now and then: a busy page, a proxy that sends blocks.",
    },
    {
        "key": "flushed",
        "name": "Frame flush",
        "what": "What has come is written once for each frame that the browser draws.",
    },
)


async def page(request: HttpRequest) -> HttpResponse:
    """Show the lab."""
    return await _page(request, "lab.html", **_of_the_lab(request))


async def compare(request: HttpRequest) -> HttpResponse:
    """Show the simulator: one answer, delivered in four ways."""
    return await _page(request, "lab_compare.html", scenarios=SCENARIOS, ways=WAYS)


async def token(request: HttpRequest) -> HttpResponse:
    """Show the way of a token, and where the time to the first token goes."""
    return await _page(request, "lab_token.html", **_of_the_lab(request))


async def guide(request: HttpRequest) -> HttpResponse:
    """Send the picture of docs/deliveries.md."""
    return HttpResponse(_GUIDE.read_bytes(), content_type="image/svg+xml")


def _of_the_lab(request: HttpRequest) -> dict[str, Any]:
    return {
        "model": settings.LAB_MODEL,
        "question": settings.LAB_QUESTION,
        "is_read_out": settings.LAB_MODEL == "lab",  # by an engine without weights
        "is_at_this_machine": is_at_this_machine(request),
    }


async def _page(request: HttpRequest, template: str, **shown: Any) -> HttpResponse:
    get_token(request)  # its scripts send it
    request.lab = shown  # type: ignore[attr-defined]  # for the template
    return await chat_page(request, template)


@require_GET
async def state(request: HttpRequest, stream_id: str) -> StreamingHttpResponse:
    """Send what the server holds of an answer, five times a second."""
    _check(request)
    response = StreamingHttpResponse(_frames(stream_id), content_type=CONTENT_TYPE)
    response["Cache-Control"] = "no-cache, no-transform"
    response["X-Accel-Buffering"] = "no"
    return response


async def _frames(stream_id: str) -> AsyncIterator[bytes]:
    yield FIRST_BYTES
    for _ in range(round(LIFE_SECONDS / EVERY_SECONDS)):
        yield frame(one_line_json(merged(read(folder()), stream_id)), event="state")
        await asyncio.sleep(EVERY_SECONDS)


@require_POST
def kill(request: HttpRequest, what: str, stream_id: str) -> HttpResponse:
    """Kill the engine of the lab's model, or the web process that makes an answer, by SIGKILL."""
    _check(request)
    until = time.monotonic() + KILL_SECONDS
    while (pid := victim(read(folder()), what, stream_id)) is None and time.monotonic() < until:
        time.sleep(EVERY_SECONDS)
    if pid is None:
        return HttpResponseBadRequest("It does not run now: try again when the page shows it.")
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return JsonResponse({"killed": pid})


def victim(reports: list[Report], what: str, stream_id: str) -> int | None:
    """Return the process to kill: the lab's engine, or the web process that makes the answer and has our parent."""
    if what == "engine":
        return next((report["engine"]["pid"] for report in reports if report["engine"]["pid"]), None)
    ours = [report for report in reports if report["parent"] == os.getppid()]
    makers = [one for one in ours if one["answers"].get(stream_id, {}).get("is_made_here")]
    return makers[0]["pid"] if makers else None


def folder() -> Path:
    """Return the folder of the reports."""
    return Path(settings.STATE_DIR) / "lab"


def is_at_this_machine(request: HttpRequest) -> bool:
    """Whether the visitor may kill: DEBUG is on, and the request comes from this machine."""
    return is_local(request.headers, request.META.get("REMOTE_ADDR", ""))


def _check(request: HttpRequest) -> None:
    if not is_at_this_machine(request):
        raise Http404("The lab shows and kills only for visitors from its own machine, while DEBUG is on.")
