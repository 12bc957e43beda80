"""GET /streams/{id}/watch: somebody else's stream, for who has the permission. Each watch is written down (watches.py).

A watcher reads and does nothing else: the stream is parked, ended and kept at its owner's pace as if nobody were here.
"""

from __future__ import annotations

from channels.db import database_sync_to_async
from django.http import HttpRequest, HttpResponse, HttpResponseBase

from streamserve.models import Stream as StreamRow
from streamserve.protocol.errors import NotFound
from streamserve.web.access import Access, route
from streamserve.web.auth import Principal
from streamserve.web.permissions import watching_user
from streamserve.web.responses import stream_response
from streamserve.web.site import get_runtime
from streamserve.web.views_native import asked_after, gone


@route(Access(callers=("session", "key"), scope="watch"))
async def watch_stream(request: HttpRequest, principal: Principal, stream_id: str) -> HttpResponseBase:
    """Replay what the watcher has not seen, and follow. Without the permission no id is known here, nor one's own."""
    user = await database_sync_to_async(watching_user)(principal.owner)
    if user is None or not await StreamRow.objects.for_watcher(user).filter(pk=stream_id).aexists():
        raise NotFound("There is no stream of that id.", code="stream_not_found")
    runtime = get_runtime()
    stream = await runtime.streams.reach(stream_id)
    if stream is None:
        return gone(request)
    after = asked_after(request, stream)
    if after is None or not 0 <= after <= stream.last_seq:
        return gone(request)
    if stream.terminal is not None and after >= stream.last_seq:
        return HttpResponse(status=204)  # nothing is shown: nothing is written down
    address = request.META.get("REMOTE_ADDR") or ""
    delivery = await runtime.audit.begin(principal, user.get_username(), stream, after=after, address=address[:45])
    runtime.permissions.ensure_running()
    return stream_response(request, delivery)
