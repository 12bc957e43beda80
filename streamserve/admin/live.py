"""The live page: metrics each second by SSE, stop for each stream, and pause, resume and drain for each engine.

It is the admin of a proxy model, so that the default AdminSite and any other one list and serve it.
"""

from __future__ import annotations

from typing import Any

from asgiref.sync import sync_to_async
from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseBase, HttpResponseNotAllowed, JsonResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, get_script_prefix, path, reverse
from django.utils.translation import gettext_lazy as _

from streamserve.admin.records import RecordAdmin, record_action
from streamserve.api.call import Reply
from streamserve.api.logs import get_logger
from streamserve.api.ops import engine_metrics
from streamserve.models import Live, Stream
from streamserve.protocol.engine import EngineStats
from streamserve.protocol.errors import StreamserveError
from streamserve.protocol.metrics import METRICS, PREFIX
from streamserve.web.chat_page import CONTENT_SECURITY_POLICY
from streamserve.web.live.delivery import LiveDelivery
from streamserve.web.probe import Plan, token_for
from streamserve.web.site import get_site
from streamserve.web.views import non_atomic, to_django
from streamserve.web.websocket import socket_path

log = get_logger(__name__)


@admin.register(Live)
class LiveAdmin(RecordAdmin):
    """The live page, in place of a list of rows. Viewing, stopping and control each need a permission."""

    def get_urls(self) -> list[URLPattern]:
        """Return the page, its events and its buttons, instead of a model's own pages."""
        return [
            path("", self.admin_site.admin_view(self.show), name="streamserve_live_changelist"),
            path("delivery/", self.admin_site.admin_view(self.show_delivery), name="streamserve_live_delivery"),
            path("events", non_atomic(self.events), name="streamserve_live_events"),
            path("stop/<str:stream_id>", non_atomic(self.stop), name="streamserve_live_stop"),
            path("control/<str:action>/<path:alias>", non_atomic(self.control), name="streamserve_live_control"),
        ]

    def show(self, request: HttpRequest) -> HttpResponse:
        """Show the page; its script keeps it up to date."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        response = TemplateResponse(request, "streamserve/admin/live.html", self._context(request))
        response["Content-Security-Policy"] = CONTENT_SECURITY_POLICY
        return response

    def show_delivery(self, request: HttpRequest) -> HttpResponse:
        """Show the page on which the operator's own browser measures how events arrive."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        context = {
            **self.admin_site.each_context(request),
            "title": _("Delivery"),
            "opts": self.opts,
            "probe_url": f"{reverse('streamserve:doctor')}?token={token_for(Plan())}",
            "socket_url": get_script_prefix() + socket_path().removeprefix("/"),
        }
        response = TemplateResponse(request, "streamserve/admin/delivery.html", context)
        response["Content-Security-Policy"] = CONTENT_SECURITY_POLICY
        response["Cache-Control"] = "no-store"  # the token is good for ten minutes
        return response

    def _context(self, request: HttpRequest) -> dict[str, Any]:
        name = self.admin_site.name
        return {
            **self.admin_site.each_context(request),
            "title": _("Live"),
            "opts": self.opts,
            "events_url": reverse("admin:streamserve_live_events", current_app=name),
            "stop_url_template": reverse("admin:streamserve_live_stop", args=["STREAM_ID"], current_app=name),
            "control_url_template": reverse(
                "admin:streamserve_live_control", args=["ACTION", "MODEL"], current_app=name
            ),
            "stream_url_template": reverse("admin:streamserve_stream_change", args=["STREAM_ID"], current_app=name),
            "can_view": request.user.has_perm("streamserve.view_stream"),
            "can_stop": request.user.has_perm("streamserve.stop_stream"),
            "can_control": request.user.has_perm("streamserve.control_engine"),
            "figures": [METRICS[name] for name in METRICS if name in engine_metrics(EngineStats())],
            "prefix": PREFIX,
        }

    async def events(self, request: HttpRequest) -> HttpResponseBase:
        """GET: one `figures` event each second."""
        if not hasattr(request, "scope"):
            return JsonResponse({"error": {"code": "asgi_required"}}, status=503)
        if not await self._may(request, "streamserve.view_live"):
            return JsonResponse({"error": {"code": "forbidden"}}, status=403)
        return to_django(request, Reply(body=LiveDelivery(get_site().live)))

    async def stop(self, request: HttpRequest, stream_id: str) -> HttpResponseBase:
        """POST: stop a stream of any owner. The CSRF middleware has checked the request."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        if not await self._may(request, "streamserve.stop_stream"):
            return JsonResponse({"error": {"code": "forbidden"}}, status=403)
        stream = await get_site().streams.reach(stream_id)
        if stream is None:
            return JsonResponse({"error": {"code": "stream_not_found"}}, status=404)
        await sync_to_async(record_action)(request, Stream, stream_id, f"Stopped stream {stream_id}")
        log.info("stream_stopped_by_staff", stream_id=stream_id, user_id=request.user.pk)
        try:
            await stream.stop(None)
        except StreamserveError as error:  # recorded, and it takes effect when the log is back
            return JsonResponse({"error": {"code": error.code, "message": error.message}}, status=error.http_status)
        return JsonResponse({"id": stream.id, "state": stream.state})

    async def control(self, request: HttpRequest, action: str, alias: str) -> HttpResponseBase:
        """POST: pause, resume or drain a model's engine. The CSRF middleware has checked the request."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        if not await self._may(request, "streamserve.control_engine"):
            return JsonResponse({"error": {"code": "forbidden"}}, status=403)
        try:
            state = await get_site().services.ops.control(alias, action)
        except StreamserveError as error:
            return JsonResponse({"error": {"code": error.code, "message": error.message}}, status=error.http_status)
        await sync_to_async(record_action)(request, Live, "", f"{action.capitalize()} of model {alias}: it is {state}")
        log.info("engine_controlled_by_staff", action=action, model=alias, user_id=request.user.pk)
        return JsonResponse({"model": alias, "state": state})

    async def _may(self, request: HttpRequest, permission: str) -> bool:
        """Return whether the user is staff of this site with `permission`."""

        def look() -> bool:
            return self.admin_site.has_permission(request) and request.user.has_perm(permission)

        await request.auser()
        return await sync_to_async(look)()
