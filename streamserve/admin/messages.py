"""Messages in the admin: answers with their questions, ratings with filters, and their export.

The list shows answers; questions are a filter away. Django's `view_message` decides who may see it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import F, QuerySet
from django.db.models.functions import Left
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.html import format_html_join
from django.utils.translation import gettext_lazy as _

from streamserve.admin.conversations import EXCERPT_CHARS, OfConversation
from streamserve.admin.export import FORMS, exported
from streamserve.admin.records import NOTHING, RecentValues, moment, short
from streamserve.api.exports import sources_of
from streamserve.api.logs import get_logger
from streamserve.models import Message
from streamserve.protocol.events import TEXT
from streamserve.rows.conversation_views import message_view, message_views
from streamserve.web.shared_page import safe_link
from streamserve.web.words import in_words

log = get_logger(__name__)

_EXPORT = "streamserve_message_export"
_BAD = "rating=bad&rated=7"
_CELL_CHARS = 90


class RoleFilter(admin.SimpleListFilter):
    """Answers, unless questions are asked for."""

    title, parameter_name = _("role"), "role"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return (("user", _("Questions")), ("all", _("Both")))

    def choices(self, changelist: Any) -> Any:
        first, *others = super().choices(changelist)
        return [{**first, "display": _("Answers")}, *others]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Message]) -> QuerySet[Message]:
        if self.value() == "all":
            return queryset
        return queryset.filter(role="user" if self.value() == "user" else "assistant")


class RatingFilter(admin.SimpleListFilter):
    """What readers thought of an answer."""

    title, parameter_name = _("rating"), "rating"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return (("bad", _("Bad")), ("good", _("Good")), ("any", _("Rated")), ("comment", _("With a comment")))

    def queryset(self, request: HttpRequest, queryset: QuerySet[Message]) -> QuerySet[Message]:
        if self.value() in ("bad", "good"):
            return queryset.filter(rating=-1 if self.value() == "bad" else 1)
        if self.value() in ("any", "comment"):
            queryset = queryset.filter(rating__isnull=False)
        return queryset.exclude(comment="") if self.value() == "comment" else queryset


class RatedFilter(admin.SimpleListFilter):
    """When an answer was rated."""

    title, parameter_name = _("rated"), "rated"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Any:
        return (("1", _("Past 24 hours")), ("7", _("Past 7 days")), ("30", _("Past 30 days")))

    def queryset(self, request: HttpRequest, queryset: QuerySet[Message]) -> QuerySet[Message]:
        if self.value() not in ("1", "7", "30"):
            return queryset
        since = timezone.now() - timedelta(days=int(str(self.value())))
        return queryset.filter(rating__isnull=False, rated_at__gte=since)


@admin.register(Message)
class MessageAdmin(OfConversation):
    """Answers with their questions, newest first; rated answers by when they were rated."""

    list_display = ("created", "asked", "said", "short_owner", "short_model", "result", "rated")
    list_filter = (
        RoleFilter,
        RatingFilter,
        RatedFilter,
        "state",
        ("model", RecentValues),
        ("finish_reason", RecentValues),
        "created_at",
    )
    list_per_page = 25
    search_fields = ("id", "stream_id", "conversation__id")
    search_help_text = _("The name of a user or key, or the beginning of a message's, stream's or conversation's id")
    sortable_by = ("created",)
    ordering = ("-created_at", "-id")
    change_form_template = "streamserve/admin/message.html"
    fieldsets = (
        (_("Belongs to it"), {"fields": ("of", "who", "stream", "before", "after", "beside")}),
        (_("Figures"), {"fields": ("role", "model", "result", "tokens", "took", "created", "finished", "rated_on")}),
    )
    empty_words = _(
        "No answer is kept yet. While CONVERSATIONS is on, each question and answer of a user or API key is written "
        "here; readers rate answers with the thumbs of the chat page."
    )
    rated_on = moment("rated_at", _("rated"))

    def get_queryset(self, request: HttpRequest) -> QuerySet[Message]:
        """Return messages with the beginnings of their texts, whose whole a list does not need."""
        rows = super().get_queryset(request).select_related("conversation").defer("content", "text")
        beginnings = {"excerpt": Left("text", EXCERPT_CHARS), "parent_excerpt": Left("parent__text", EXCERPT_CHARS)}
        found: QuerySet[Message] = rows.annotate(**beginnings, parent_role=F("parent__role"))
        return found

    def get_ordering(self, request: HttpRequest) -> Any:
        """Return the order of the index that the filters use."""
        is_rated = request.GET.get("rating") or request.GET.get("rated")
        return ("-rated_at", "-id") if is_rated else self.ordering

    @admin.display(description=_("question"))
    def asked(self, message: Any) -> str:
        """Return the beginning of the question."""
        if message.role == "user":
            return short(_one_line(message.excerpt), _CELL_CHARS)
        is_continued = message.parent_role == "assistant"
        return str(_("(goes on)")) if is_continued else short(_one_line(message.parent_excerpt), _CELL_CHARS)

    @admin.display(description=_("answer"))
    def said(self, message: Any) -> str:
        """Return the beginning of the answer."""
        return NOTHING if message.role == "user" else short(_one_line(message.excerpt), _CELL_CHARS) or NOTHING

    @admin.display(description=_("model"))
    def short_model(self, message: Message) -> str:
        """Return the model or pipeline, shortened."""
        return short(message.model)

    @admin.display(description=_("result"))
    def result(self, message: Message) -> str:
        """Return how it ended, or that it has not."""
        if message.role == "user":
            return NOTHING
        if message.state == "running":
            return str(_("running"))
        return f"error: {message.error_code}" if message.error_code else message.finish_reason or NOTHING

    @admin.display(description=_("rating"))
    def rated(self, message: Message) -> str:
        """Return the thumb as a word, and what the reader wrote with it."""
        if message.rating is None:
            return NOTHING
        rating = str(message.get_rating_display())
        return short(f"{rating}: {_one_line(message.comment)}" if message.comment else rating, _CELL_CHARS)

    @admin.display(description=_("stream"))
    def stream(self, message: Message) -> str:
        """Return the stream that has made the answer, linked."""
        return self.linked("streamserve_stream", message.stream_id, message.stream_id) if message.stream_id else NOTHING

    @admin.display(description=_("before it"))
    def before(self, message: Message) -> str:
        """Return the message that it follows."""
        return self._links([message.parent_id] if message.parent_id else [])

    @admin.display(description=_("after it"))
    def after(self, message: Message) -> str:
        """Return the messages that follow it."""
        return self._links(_of_parent(message.conversation_id, message.pk))

    @admin.display(description=_("beside it"))
    def beside(self, message: Message) -> str:
        """Return its siblings: other answers to the question, or the question in other words."""
        return self._links([pk for pk in _of_parent(message.conversation_id, message.parent_id) if pk != message.pk])

    def _links(self, pks: list[str]) -> str:
        links = [self.linked("streamserve_message", pk, pk[:8]) for pk in pks]
        return format_html_join(", ", "{}", ((link,) for link in links)) or NOTHING

    @admin.display(description=_("tokens"))
    def tokens(self, message: Message) -> str:
        """Return the answer's tokens, and the prompt's with those that were cached."""
        if message.role == "user" or message.state == "running":
            return NOTHING
        cached = f", {message.cached_tokens:,} cached" if message.cached_tokens else ""
        return f"{message.completion_tokens:,} (prompt {message.prompt_tokens:,}{cached})"

    @admin.display(description=_("took"))
    def took(self, message: Message) -> str:
        """Return the time from the question to the end."""
        if message.finished_at is None:
            return NOTHING
        return in_words((message.finished_at - message.created_at).total_seconds())

    # -- pages

    def get_urls(self) -> list[URLPattern]:
        """Return the model's own pages and the export."""
        export = path("export/<str:form>/", self.admin_site.admin_view(self.export), name=_EXPORT)
        return [export, *super().get_urls()]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the list with its ready links: bad answers of this week, and the export of what is filtered."""
        own, query = self.admin_site.name, request.GET.urlencode()
        here = reverse("admin:streamserve_message_changelist", current_app=own)
        tools = [{"name": _("Bad answers this week"), "url": f"{here}?{_BAD}", "is_on": query == _BAD}]
        for form, name in FORMS.items():
            url = reverse(f"admin:{_EXPORT}", args=[form], current_app=own)
            tools.append({"name": _("Export as %(form)s") % {"form": name}, "url": f"{url}?{query}", "is_on": False})
        return super().changelist_view(request, {"tools": tools, **(extra_context or {})})

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show question and answer first."""
        more: dict[str, Any] = {}
        message = self.get_object(request, object_id)
        if message is not None and self.has_view_permission(request, message):
            log.info("message_read", message_id=object_id, user_id=request.user.pk)
            question = message if message.role == "user" else _question_of(message)
            more["question"] = None if question is None else message_views([question])[0]
            more["answer"] = None if message.role == "user" else shown(message)
            more["stream"] = self.stream(message)
        return super().change_view(request, object_id, form_url, {**(extra_context or {}), **more})

    def export(self, request: HttpRequest, form: str) -> HttpResponseBase:
        """Return what the list's filters leave, all pages, as a file."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        if form not in FORMS:
            raise Http404
        listed = self.get_changelist_instance(request)
        log.info("messages_exported", user_id=request.user.pk, form=form, query=request.GET.urlencode())
        key = self.get_ordering(request)[0].removeprefix("-")
        return exported(request, listed.get_queryset(request), key, form)


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _of_parent(conversation_id: str, parent_id: str | None) -> list[str]:
    found = Message.objects.filter(conversation=conversation_id, parent=parent_id)
    return list(found.values_list("pk", flat=True)[:20])


def _question_of(message: Message) -> Message | None:
    """Return the question of an answer, also of an answer that goes on with another."""
    for _step in range(20):
        parent = Message.objects.filter(pk=message.parent_id, conversation=message.conversation_id).first()
        if parent is None or parent.role == "user":
            return parent
        message = parent
    return None


def shown(message: Message) -> dict[str, Any]:
    """Return an answer for its page: its blocks as texts with a name each, its steps and sources as lines."""
    view = message_view(message)
    steps = [step.get("message") or step.get("status") for step in view.steps]
    return {
        "state": view.state,
        "error_code": view.error_code,
        "blocks": [_block(block) for block in view.blocks],
        "steps": [step for step in steps if step],
        "sources": [{**source, "link": safe_link(source["url"])} for source in sources_of(view)],
        "rating": message.get_rating_display() if message.rating is not None else "",
        "rated_at": message.rated_at,
        "comment": message.comment,
    }


def _block(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return a block's text, and the name of a block that is no text of the answer: such a block is folded."""
    kind, text = str(block.get("kind", TEXT)), str(block.get("text", ""))
    if kind == TEXT:
        return {"text": text, "name": ""}
    return {"text": _pretty(text), "name": " ".join([kind.replace("_", " "), str(block.get("name") or "")]).strip()}


def _pretty(text: str) -> str:
    """Return JSON on several lines, and any other text as it is."""
    try:
        return json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except ValueError:
        return text
