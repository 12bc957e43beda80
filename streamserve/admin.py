"""Models in the admin, and the live page: metrics each second by SSE, a stop button for each stream, and pause, resume
and drain for each engine.

Rows are read-only here: they are a record. The live page is the admin of a proxy model, so that the default AdminSite
and any other one list and serve it.
"""

from __future__ import annotations

from typing import Any, cast

from asgiref.sync import sync_to_async
from django import forms
from django.contrib import admin
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth import get_user_model
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase, HttpResponseNotAllowed, JsonResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, get_script_prefix, path, reverse
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.translation import gettext_lazy as _

from streamserve.api.call import Reply
from streamserve.api.logs import get_logger
from streamserve.api.ops import engine_metrics
from streamserve.keys import new_key
from streamserve.models import ApiKey, Live, Stream, Watch, default_scopes
from streamserve.protocol.engine import EngineStats
from streamserve.protocol.errors import StreamserveError
from streamserve.protocol.metrics import METRICS, PREFIX
from streamserve.web import work_admin  # noqa: F401  (registers its own)
from streamserve.web.audit import WATCH_PERMISSION
from streamserve.web.chat_page import CONTENT_SECURITY_POLICY
from streamserve.web.live.delivery import LiveDelivery
from streamserve.web.probe import Plan, token_for
from streamserve.web.site import get_site
from streamserve.web.views import non_atomic, to_django
from streamserve.web.websocket import socket_path
from streamserve.web.words import in_words
from streamserve.web.work_admin import RecordAdmin, in_short

log = get_logger(__name__)

_WATCH_PAGE = "streamserve_stream_watch"


def _record_action(request: HttpRequest, stream_id: str, words: str) -> None:
    """Write what staff did to the admin's log, where Django keeps its own entries: who, when, what."""
    LogEntry.objects.create(
        user_id=cast(int, request.user.pk),  # of any type that the user model has
        content_type=ContentType.objects.get_for_model(Stream if stream_id else Live, for_concrete_model=False),
        object_id=stream_id,
        object_repr=words[:200],
        action_flag=CHANGE,
        change_message=words,
    )


def _record_reading(request: HttpRequest, stream: Stream) -> None:
    """Record that a stored answer is read, as a watch that is over. Raises if it cannot be: then nothing is shown."""
    user, now = request.user, timezone.now()
    row = Watch.objects.create(
        stream_id=stream.pk,
        stream_owner=stream.owner,
        watcher=f"user:{user.pk}",
        username=user.get_username(),
        address=request.META.get("REMOTE_ADDR", "")[:45],
        last_seq=stream.last_seq,
        began_at=now,
        ended_at=now,
    )
    log.info("stored_answer_read", stream_id=stream.pk, watcher=row.watcher, username=row.username)


class KeyForm(forms.ModelForm):  # type: ignore[type-arg]  # generic in its stubs only
    """What a new key may do, and for how long."""

    scopes = forms.MultipleChoiceField(
        label=_("Scopes"),
        choices=[
            ("chat", _("chat: ask, read and stop its own answers")),
            ("ops", _("ops: read /metrics")),
            ("watch", _("watch: read others' answers, if its user may")),
        ],
        initial=default_scopes,
        widget=forms.CheckboxSelectMultiple,
    )

    class Meta:
        model = ApiKey
        fields = ("name", "user", "scopes", "latency_class", "expires_at")


@admin.register(ApiKey)
class ApiKeyAdmin(RecordAdmin):
    """API keys. A new key is shown once, on the page that answers its form; it is neither stored nor logged."""

    form = KeyForm
    list_display = ("prefix", "name", "user", "may", "state", "created", "used", "expires")
    list_filter = ("revoked_at", "created_at")
    search_fields = ("prefix", "name", "user__username")
    list_select_related = ("user",)
    actions = ("revoke",)

    @admin.display(description=_("scopes"))
    def may(self, key: ApiKey) -> str:
        """Return the scopes, and the class that its answers have."""
        return ", ".join([*key.scopes, *([key.latency_class] if key.latency_class else [])])

    @admin.display(description=_("last used"), ordering="last_used_at")
    def used(self, key: ApiKey) -> str:
        """Return when, without the year."""
        return in_short(key.last_used_at)

    @admin.display(description=_("expires"), ordering="expires_at")
    def expires(self, key: ApiKey) -> str:
        """Return the day."""
        return "–" if key.expires_at is None else date_format(timezone.localtime(key.expires_at), "j M Y")

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """A key is as good as its user's login: see `formfield_for_foreignkey`."""
        return request.user.has_perm("streamserve.add_apikey")

    def formfield_for_foreignkey(self, db_field: Any, request: HttpRequest, **kwargs: Any) -> Any:
        """Let a superuser make keys for every user, and other staff for themselves."""
        if db_field.name == "user" and not request.user.is_superuser:
            kwargs["queryset"] = get_user_model().objects.filter(pk=request.user.pk or 0)
        return super().formfield_for_foreignkey(db_field, request, **kwargs)

    def add_view(
        self, request: HttpRequest, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the form with one button: whatever is pressed, the key is shown next."""
        no_other_buttons = {"show_save_and_add_another": False, "show_save_and_continue": False}
        return super().add_view(request, form_url, {**(extra_context or {}), **no_other_buttons})

    def save_model(self, request: HttpRequest, obj: ApiKey, form: Any, change: bool) -> None:
        """Make the key; the form's row has its name, user, scopes and end."""
        obj.set_key(key := new_key())
        super().save_model(request, obj, form, change)
        request.streamserve_key = key  # type: ignore[attr-defined]

    def response_add(self, request: HttpRequest, obj: ApiKey, post_url_continue: str | None = None) -> HttpResponse:
        """Show the key, this once. No redirect: that would have to store it."""
        context = {
            **self.admin_site.each_context(request),
            "title": _("The new key"),
            "opts": self.opts,
            "key": request.streamserve_key,  # type: ignore[attr-defined]
            "row": obj,
        }
        response = TemplateResponse(request, "streamserve/admin/new_key.html", context)
        response["Cache-Control"] = "no-store"
        return response

    @admin.action(description=_("Revoke the selected keys"), permissions=("revoke",))
    def revoke(self, request: HttpRequest, queryset: QuerySet[Any]) -> None:
        """Revoke the keys permanently; their running answers end within half a minute."""
        num_revoked = ApiKey.objects.filter(pk__in=queryset.values("pk")).revoke()
        self.message_user(request, _("%(num)d keys revoked.") % {"num": num_revoked})

    def has_revoke_permission(self, request: HttpRequest) -> bool:
        return request.user.has_perm("streamserve.change_apikey")


@admin.register(Stream)
class StreamAdmin(RecordAdmin):
    """Every answer, newest first. The answer itself is shown to those who may watch, on demand, which is recorded."""

    list_display = ("short_id", "began", "model", "short_owner", "result", "num_tokens", "first_token", "took")
    list_filter = ("state", "finish_reason", "error_code", "model", "created_at")
    search_fields = ("id", "owner", "tenant")
    date_hierarchy = "created_at"
    change_form_template = "streamserve/admin/stream.html"
    fieldsets = (
        (None, {"fields": ("id", "model", "owner", "tenant", "result")}),
        (_("Figures"), {"fields": ("tokens", "first_token", "took", "phases_in_words", "created_at", "finished_at")}),
        (_("Where it runs"), {"fields": ("producer", "released_at", "on_disconnect", "log_id", "last_seq", "fence")}),
    )
    readonly_fields = ("result", "tokens", "first_token", "took", "phases_in_words")

    def get_urls(self) -> list[URLPattern]:
        """Return the model's own pages and the watch page."""
        watch = path("<str:stream_id>/watch/", self.admin_site.admin_view(self.show_watch), name=_WATCH_PAGE)
        return [watch, *super().get_urls()]

    @admin.display(description=_("stream"), ordering="id")
    def short_id(self, stream: Stream) -> str:
        """Return the id as the live page shows it."""
        return stream.pk[:8]

    @admin.display(description=_("result"), ordering="finish_reason")
    def result(self, stream: Stream) -> str:
        """Return how it ended, or that it has not."""
        if stream.state == "running":
            return str(_("running") if stream.producer else _("parked"))
        return f"error: {stream.error_code}" if stream.error_code else stream.finish_reason or "–"

    @admin.display(description=_("began"), ordering="created_at")
    def began(self, stream: Stream) -> str:
        """Return when, without the year."""
        return in_short(stream.created_at)

    @admin.display(description=_("tokens"), ordering="completion_tokens")
    def num_tokens(self, stream: Stream) -> str:
        """Return the answer's tokens."""
        return "–" if stream.state == "running" else f"{stream.completion_tokens:,}"

    @admin.display(description=_("tokens"))
    def tokens(self, stream: Stream) -> str:
        """Return the answer's tokens, and the prompt's with those that were cached."""
        if stream.state == "running":
            return "–"
        cached = f", {stream.cached_tokens:,} cached" if stream.cached_tokens else ""
        return f"{stream.completion_tokens:,} (prompt {stream.prompt_tokens:,}{cached})"

    @admin.display(description=_("first token"), ordering="ttft_seconds")
    def first_token(self, stream: Stream) -> str:
        """Return the time to it."""
        return in_words(stream.ttft_seconds)

    @admin.display(description=_("took"))
    def took(self, stream: Stream) -> str:
        """Return the time from arrival to end: what the phases add up to; of an old row, from its creation on."""
        end, phases = stream.finished_at, stream.phases
        if phases:
            return in_words(sum(phases.values()) - phases.get("network_in", 0.0))
        return in_words(None if end is None else (end - stream.created_at).total_seconds())

    @admin.display(description=_("where the time went"))
    def phases_in_words(self, stream: Stream) -> str:
        """Return its phases, in order."""
        phases = stream.phases or {}
        return ", ".join(f"{name.replace('_', ' ')} {in_words(seconds)}" for name, seconds in phases.items()) or "–"

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the stream; to a user who may watch, with a button that shows the answer, and a link to it."""
        more: dict[str, Any] = {}
        stream = self.get_object(request, object_id)
        if stream is not None and request.user.has_perm(WATCH_PERMISSION):
            name = self.admin_site.name
            more["events_url"] = reverse("streamserve:watch_stream", args=[object_id])
            more["watch_url"] = reverse(f"admin:{_WATCH_PAGE}", args=[object_id], current_app=name)
            more["has_text"] = stream.text != ""
        return super().change_view(request, object_id, form_url, {**(extra_context or {}), **more})

    def show_watch(self, request: HttpRequest, stream_id: str) -> HttpResponse:
        """Show the watch page: the stored text, or a script that requests the events. Either is recorded."""
        if not request.user.has_perm(WATCH_PERMISSION):
            raise PermissionDenied
        stream = self.get_object(request, stream_id)
        if stream is None:
            raise Http404
        if stream.text:
            _record_reading(request, stream)
        context = {
            **self.admin_site.each_context(request),
            "title": _("Watch"),
            "opts": self.opts,
            "stream_id": stream_id,
            "events_url": reverse("streamserve:watch_stream", args=[stream_id]),
            "stored_text": stream.text,
            "result": self.result(stream),
        }
        response = TemplateResponse(request, "streamserve/admin/watch.html", context)
        response["Content-Security-Policy"] = CONTENT_SECURITY_POLICY
        return response


@admin.register(Watch)
class WatchAdmin(RecordAdmin):
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
        await sync_to_async(_record_action)(request, stream_id, f"Stopped stream {stream_id}")
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
            state = await get_site().ops.control(alias, action)
        except StreamserveError as error:
            return JsonResponse({"error": {"code": error.code, "message": error.message}}, status=error.http_status)
        await sync_to_async(_record_action)(request, "", f"{action.capitalize()} of model {alias}: it is {state}")
        log.info("engine_controlled_by_staff", action=action, model=alias, user_id=request.user.pk)
        return JsonResponse({"model": alias, "state": state})

    async def _may(self, request: HttpRequest, permission: str) -> bool:
        """Return whether the user is staff of this site with `permission`."""

        def look() -> bool:
            return self.admin_site.has_permission(request) and request.user.has_perm(permission)

        await request.auser()
        return await sync_to_async(look)()
