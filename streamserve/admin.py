"""Models in the admin, and the live page: metrics each second by SSE, a stop button for each stream, and pause, resume
and drain for each engine.

Rows are read-only here: they are a record. The live page is the admin of a proxy model, so that the default AdminSite
and any other one list and serve it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, HttpResponseNotAllowed, JsonResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _

from streamserve.api.call import Reply
from streamserve.api.logs import get_logger
from streamserve.models import ApiKey, Live, Stream, Watch
from streamserve.protocol.errors import StreamserveError
from streamserve.web.chat_page import CONTENT_SECURITY_POLICY
from streamserve.web.live import LiveDelivery, site_metrics
from streamserve.web.permissions import WATCH_PERMISSION
from streamserve.web.site import get_site
from streamserve.web.views import non_atomic, to_django

log = get_logger(__name__)

_WATCH_PAGE = "streamserve_stream_watch"


if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
else:
    ModelAdmin = admin.ModelAdmin  # generic in its stubs only


class ReadOnlyAdmin(ModelAdmin):
    """Without adding, changing and deleting."""

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(ApiKey)
class ApiKeyAdmin(ReadOnlyAdmin):
    """API keys. `manage.py streamserve_key create` makes one and shows it once; both revoke."""

    list_display = (
        "prefix",
        "name",
        "user",
        "scopes",
        "latency_class",
        "state",
        "created_at",
        "last_used_at",
        "expires_at",
    )
    list_filter = ("revoked_at", "created_at")
    search_fields = ("prefix", "name", "user__username")
    list_select_related = ("user",)
    actions = ("revoke",)

    @admin.action(description=_("Revoke the selected keys"), permissions=("revoke",))
    def revoke(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Revoke the keys permanently; their running answers end within half a minute."""
        num_revoked = ApiKey.objects.filter(pk__in=queryset.values("pk")).revoke()
        self.message_user(request, _("%(num)d keys revoked.") % {"num": num_revoked})

    def has_revoke_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("streamserve.change_apikey")


@admin.register(Stream)
class StreamAdmin(ReadOnlyAdmin):
    """Every answer, newest first. Neither prompt nor answer is shown; a user who may watch has a link."""

    list_display = (
        "id",
        "model",
        "owner",
        "state",
        "finish_reason",
        "error_code",
        "prompt_tokens",
        "cached_tokens",
        "completion_tokens",
        "ttft_seconds",
        "created_at",
    )
    list_filter = ("state", "finish_reason", "model", "created_at")
    search_fields = ("id", "owner", "tenant")
    exclude = ("request", "text")
    date_hierarchy = "created_at"

    def get_urls(self) -> list[URLPattern]:
        """Return the model's own pages and the watch page."""
        watch = path("<str:stream_id>/watch/", self.admin_site.admin_view(self.show_watch), name=_WATCH_PAGE)
        return [watch, *super().get_urls()]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> tuple[str, ...]:
        """Return the watch link too, for a user who may watch."""
        return ("watch",) if request.user.has_perm(WATCH_PERMISSION) else ()

    @admin.display(description=_("answer"))
    def watch(self, stream: Stream) -> str:
        """Return a link to the watch page."""
        address = reverse(f"admin:{_WATCH_PAGE}", args=[stream.pk], current_app=self.admin_site.name)
        return format_html('<a href="{}">{}</a>', address, _("Watch"))

    def show_watch(self, request: HttpRequest, stream_id: str) -> HttpResponse:
        """Show the watch page. Its script requests the events; that request is checked and recorded."""
        if not request.user.has_perm(WATCH_PERMISSION):
            raise PermissionDenied
        if self.get_object(request, stream_id) is None:
            raise Http404
        context = {
            **self.admin_site.each_context(request),
            "title": _("Watch"),
            "opts": self.opts,
            "stream_id": stream_id,
            "events_url": reverse("streamserve:watch_stream", args=[stream_id]),
        }
        response = TemplateResponse(request, "streamserve/admin/watch.html", context)
        response["Content-Security-Policy"] = CONTENT_SECURITY_POLICY
        return response


@admin.register(Watch)
class WatchAdmin(ReadOnlyAdmin):
    """The watches: user, stream and its owner, newest first."""

    list_display = (
        "username",
        "watcher",
        "stream_id",
        "stream_owner",
        "address",
        "after_seq",
        "last_seq",
        "began_at",
        "ended_at",
    )
    list_filter = ("began_at",)
    search_fields = ("username", "watcher", "stream_id", "stream_owner", "address")
    date_hierarchy = "began_at"


@admin.register(Live)
class LiveAdmin(ReadOnlyAdmin):
    """The live page, in place of a list of rows. Viewing, stopping and control each need a permission."""

    def get_urls(self) -> list[URLPattern]:
        """Return the page, its events and its buttons, instead of a model's own pages."""
        return [
            path("", self.admin_site.admin_view(self.show), name="streamserve_live_changelist"),
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
            "can_stop": request.user.has_perm("streamserve.stop_stream"),
            "can_control": request.user.has_perm("streamserve.control_engine"),
        }

    async def events(self, request: HttpRequest) -> HttpResponseBase:
        """GET: one `figures` event each second."""
        if not hasattr(request, "scope"):
            return JsonResponse({"error": {"code": "asgi_required"}}, status=503)
        if not await self._may(request, "streamserve.view_live"):
            return JsonResponse({"error": {"code": "forbidden"}}, status=403)
        site = get_site()
        return to_django(request, Reply(body=LiveDelivery(lambda: site_metrics(site))))

    async def stop(self, request: HttpRequest, stream_id: str) -> HttpResponseBase:
        """POST: stop a stream of any owner. The CSRF middleware has checked the request."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        if not await self._may(request, "streamserve.stop_stream"):
            return JsonResponse({"error": {"code": "forbidden"}}, status=403)
        stream = await get_site().streams.reach(stream_id)
        if stream is None:
            return JsonResponse({"error": {"code": "stream_not_found"}}, status=404)
        await stream.stop(None)
        log.info("stream_stopped_by_staff", stream_id=stream_id, user_id=request.user.pk)
        return JsonResponse({"id": stream.id, "state": stream.state})

    async def control(self, request: HttpRequest, action: str, alias: str) -> HttpResponseBase:
        """POST: pause, resume or drain a model's engine. The CSRF middleware has checked the request."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        if not await self._may(request, "streamserve.control_engine"):
            return JsonResponse({"error": {"code": "forbidden"}}, status=403)
        try:
            state = await get_site().control_engine(alias, action)
        except StreamserveError as error:
            return JsonResponse({"error": {"code": error.code, "message": error.message}}, status=error.http_status)
        log.info("engine_controlled_by_staff", action=action, model=alias, user_id=request.user.pk)
        return JsonResponse({"model": alias, "state": state})

    async def _may(self, request: HttpRequest, permission: str) -> bool:
        """Return whether the user is staff of this site with `permission`."""

        def look() -> bool:
            return self.admin_site.has_permission(request) and request.user.has_perm(permission)

        await request.auser()
        return await sync_to_async(look)()
