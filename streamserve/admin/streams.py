"""Streams and watches in the admin. The text of an answer is for those who may watch, and reading it is recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.html import format_html_join
from django.utils.translation import gettext_lazy as _

from streamserve.admin.glass import context_of
from streamserve.admin.records import NOTHING, RecentValues, RecordAdmin, moment, short
from streamserve.api.logs import get_logger
from streamserve.conf import get_settings
from streamserve.models import Job, Message, Stream, Watch
from streamserve.protocol.glass import ReaderTimes, hops
from streamserve.web.audit import WATCH_PERMISSION
from streamserve.web.chat_page import CONTENT_SECURITY_POLICY
from streamserve.web.words import in_words

log = get_logger(__name__)

_WATCH_PAGE, _GLASS_PAGE = "streamserve_stream_watch", "streamserve_stream_glass"


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


def _times(stream: Stream) -> ReaderTimes | None:
    return None if stream.reader is None else ReaderTimes.of_json(stream.reader)


def _sum_in_words(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {in_words(seconds)}" for name, seconds in parts.items()) or NOTHING


def _hops_in_words(stream: Stream, which: str, painted: str, came: str) -> str:
    """Return when the reader saw it, and what that is made of where both sides are known."""
    times = _times(stream)
    seen: float | None = getattr(times, painted, None) or getattr(times, came, None)
    if times is None or seen is None:
        return NOTHING
    parts = hops(stream.ttft_seconds, stream.phases, times).get(which)
    return f"{in_words(seen)}: {_sum_in_words(parts)}" if parts else in_words(seen)


@admin.register(Stream)
class StreamAdmin(RecordAdmin):
    """Every answer, newest first. The answer itself is shown to those who may watch, on demand, which is recorded."""

    list_display = ("short_id", "began", "short_model", "short_owner", "result", "num_tokens", "first_token", "took")
    list_filter = (
        "state",
        ("finish_reason", RecentValues),
        ("error_code", RecentValues),
        ("model", RecentValues),
        "created_at",
    )
    search_fields = ("id",)
    search_help_text = _("The beginning of a stream's id, or the name of a user or key")
    sortable_by = ("began",)
    change_form_template = "streamserve/admin/stream.html"
    fieldsets = (
        (None, {"fields": ("id", "model", "who", "whose", "result", "belongs_to")}),
        (
            _("Figures"),
            {
                "fields": (
                    "tokens",
                    "first_token",
                    "took",
                    "phases_in_words",
                    "first_at_reader",
                    "whole_at_reader",
                    "gaps_at_reader",
                    "created",
                    "finished",
                )
            },
        ),
        (
            _("Where it runs"),
            {
                "fields": ("producer", "released", "on_disconnect", "log_id", "last_seq", "fence"),
                "classes": ("collapse",),
            },
        ),
    )
    empty_words = _(
        "No answer yet. Each has a row here from its first moment: of the chat page, of every API, and of jobs. "
        "Rows go after KEEP_STREAMS_DAYS."
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Stream]:
        """Return the rows without request and text: a list shows neither."""
        return super().get_queryset(request).defer("request", "text")

    def get_urls(self) -> list[URLPattern]:
        """Return the model's own pages and the watch page."""
        watch = path("<str:stream_id>/watch/", self.admin_site.admin_view(self.show_watch), name=_WATCH_PAGE)
        times = path("glass/", self.admin_site.admin_view(self.show_glass), name=_GLASS_PAGE)
        return [watch, times, *super().get_urls()]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the list, with a link to where the time went."""
        url = reverse(f"admin:{_GLASS_PAGE}", current_app=self.admin_site.name)
        tools = [{"name": _("From GPU to glass"), "url": url}]
        return super().changelist_view(request, {"tools": tools, **(extra_context or {})})

    def show_glass(self, request: HttpRequest) -> HttpResponse:
        """Show where the time of answers went, by hop and over time."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        page = {**self.admin_site.each_context(request), "title": _("From GPU to glass"), "opts": self.opts}
        response = TemplateResponse(request, "streamserve/admin/glass.html", {**page, **context_of(request)})
        response["Content-Security-Policy"] = CONTENT_SECURITY_POLICY
        return response

    @admin.display(description=_("result"))
    def result(self, stream: Stream) -> str:
        """Return how it ended, or that it has not."""
        if stream.state == "running":
            return str(_("running") if stream.producer else _("parked"))
        return f"error: {stream.error_code}" if stream.error_code else stream.finish_reason or "–"

    began = moment("created_at", _("began"))

    @admin.display(description=_("model"))
    def short_model(self, stream: Stream) -> str:
        """Return the model or pipeline, shortened."""
        return short(stream.model)

    @admin.display(description=_("belongs to"))
    def belongs_to(self, stream: Stream) -> str:
        """Return links to the message that it answers, the job that it is of, and its watches."""
        of_stream = {"stream_id": stream.pk}
        messages = Message.objects.filter(**of_stream).values_list("pk", "conversation_id")
        found = [row for pk, conversation in messages for row in (("message", pk), ("conversation", conversation))]
        found += [("job", pk) for pk in Job.objects.filter(**of_stream).values_list("pk", flat=True)]
        links = [self.linked(f"streamserve_{name}", pk, f"{name} {pk[:8]}") for name, pk in found]
        if num := Watch.objects.filter(**of_stream).count():
            links.append(self.listed("streamserve_watch", f"watched {num} ×", stream_id=stream.pk))
        return format_html_join(", ", "{}", ((link,) for link in links)) or NOTHING

    @admin.display(description=_("tokens"))
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

    @admin.display(description=_("first token"))
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
        return _sum_in_words(stream.phases or {})

    @admin.display(description=_("first token at the reader"))
    def first_at_reader(self, stream: Stream) -> str:
        """Return its first paint by its own clock, and the hops that make it."""
        return _hops_in_words(stream, "first", "first_paint", "first_delta")

    @admin.display(description=_("answer at the reader"))
    def whole_at_reader(self, stream: Stream) -> str:
        """Return its last paint by its own clock, and the hops that make it."""
        return _hops_in_words(stream, "whole", "last_paint", "ended")

    @admin.display(description=_("gaps at the reader (p95)"))
    def gaps_at_reader(self, stream: Stream) -> str:
        """Return the tail of its gaps beside the budget of its class, and what else it reported."""
        times = _times(stream)
        if times is None or times.gap_p95 is None:
            return NOTHING
        of_class = get_settings().classes.get(stream.latency_class or "")
        budget = of_class and of_class.gap_p95_seconds
        parts = [f"{in_words(times.gap_p95)} of {in_words(budget)}" if budget else in_words(times.gap_p95)]
        if times.paint_gap_p95 is not None:
            parts.append(f"painted {in_words(times.paint_gap_p95)}")
        parts.append(f"rendering {in_words(times.render)} in all")
        if times.reconnects:
            parts.append(f"{times.reconnects} reconnects")
        if times.hidden:
            parts.append("in the background meanwhile")
        return ", ".join(parts)

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

    list_display = ("began", "short_user", "watched_by", "stream", "watched_owner", "events", "address", "ended")
    list_filter = ("began_at",)
    search_fields = ("stream_id", "username", "watcher")
    search_help_text = _("The beginning of a stream's id, of a user's name, or of a watcher as key:3")
    sortable_by = ("began",)
    owner_columns = ("watcher", "stream_owner")
    fields = ("username", "by", "stream_in_full", "of", "address", "events", "began", "ended")
    empty_words = _(
        "Nobody has watched an answer of another owner. A row is written before the first byte is shown: of the button "
        "on a stream's page, and of GET /streams/{id}/watch."
    )
    began, ended = moment("began_at", _("began")), moment("ended_at", _("ended"))

    @admin.display(description=_("user name"))
    def short_user(self, watch: Watch) -> str:
        """Return the user's name as it was then, shortened."""
        return short(watch.username)

    @admin.display(description=_("watcher"))
    def watched_by(self, watch: Watch) -> str:
        """Return the user or key."""
        return self.named(watch, watch.watcher)

    @admin.display(description=_("watcher"))
    def by(self, watch: Watch) -> str:
        """Return the user or key, linked."""
        return self.named_in_full(watch, watch.watcher)

    @admin.display(description=_("stream"))
    def stream(self, watch: Watch) -> str:
        """Return the stream as the lists show it, linked."""
        return self.linked("streamserve_stream", watch.stream_id, watch.stream_id[:8])

    @admin.display(description=_("stream"))
    def stream_in_full(self, watch: Watch) -> str:
        """Return the stream, linked."""
        return self.linked("streamserve_stream", watch.stream_id, watch.stream_id)

    @admin.display(description=_("stream's owner"))
    def watched_owner(self, watch: Watch) -> str:
        """Return whose answer it is."""
        return self.named(watch, watch.stream_owner)

    @admin.display(description=_("stream's owner"))
    def of(self, watch: Watch) -> str:
        """Return whose answer it is, linked."""
        return self.named_in_full(watch, watch.stream_owner)

    @admin.display(description=_("events"))
    def events(self, watch: Watch) -> str:
        """Return which events of the log were sent; the last is noted every 30 s."""
        return f"{watch.after_seq + 1:,}–{watch.last_seq:,}" if watch.last_seq > watch.after_seq else NOTHING
