"""Conversations in the admin: their tree, their share links and attachments. Read only, but for delete and revoke.

Django's view permissions decide: a title takes `view_conversation`, the text of messages `view_message`, also on the
page of a conversation. Who opens a page that shows text is in the site's log.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import DELETION
from django.db.models import Q, QuerySet
from django.db.models.functions import Left
from django.http import HttpRequest, HttpResponse
from django.template.defaultfilters import filesizeformat
from django.template.response import TemplateResponse
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from streamserve.admin.records import NOTHING, RecentValues, RecordAdmin, moment, record_action, short
from streamserve.api.logs import get_logger
from streamserve.models import Attachment, Conversation, Message, Share
from streamserve.rows.conversation_store import drop_conversations
from streamserve.rows.owners import owned_by
from streamserve.web.calls import background
from streamserve.web.site import get_site

log = get_logger(__name__)

VIEW_TEXT = "streamserve.view_message"
MAX_SHOWN = 500  # messages of a conversation's tree; the list of messages has all
EXCERPT_CHARS = 240
_MAX_LINKS, _MAX_DEPTH = 20, 6
_TITLE_CHARS = 48


class OfConversation(RecordAdmin):
    """Rows of a conversation, whose owner they have."""

    def owners_of(self, row: Any) -> list[str]:
        """Return the conversation's owner and tenant."""
        return [row.conversation.owner, row.conversation.tenant]

    @admin.display(description=_("owner"))
    def short_owner(self, row: Any) -> str:
        """Return the owner's name, for a list."""
        return self.named(row, row.conversation.owner)

    @admin.display(description=_("owner"))
    def who(self, row: Any) -> str:
        """Return the owner's name, linked."""
        return self.named_in_full(row, row.conversation.owner)

    @admin.display(description=_("conversation"))
    def of(self, row: Any) -> str:
        """Return the conversation, linked. Its title takes a permission of its own."""
        pk = row.conversation_id
        return self.linked("streamserve_conversation", pk, pk[:8])

    def get_search_results(self, request: HttpRequest, queryset: QuerySet[Any], search_term: str) -> tuple[Any, bool]:
        """Return the rows whose ids begin with the term, and those of the owner of that name."""
        term = search_term.strip()
        if not term:
            return queryset, False
        found = Q(conversation__in=Conversation.objects.filter(owned_by(term)))
        for column in self.search_fields:
            found |= Q(**{f"{column}__startswith": term})
        return queryset.filter(found), False


@admin.register(Conversation)
class ConversationAdmin(RecordAdmin):
    """Every conversation, the one with the newest message first; its page has the tree of its messages."""

    list_display = ("short_title", "short_owner", "short_model", "source", "is_pinned", "updated")
    list_filter = (
        ("model", RecentValues),
        ("source", RecentValues),
        "is_pinned",
        ("deleted_at", admin.EmptyFieldListFilter),
        "updated_at",
    )
    search_fields = ("id",)
    search_help_text = _("The name of a user or key, the beginning of an id, or words of a title")
    sortable_by = ("updated",)
    actions = ("delete_conversations",)
    change_form_template = "streamserve/admin/conversation.html"
    fieldsets = (
        (None, {"fields": ("title", "who", "model", "source", "is_pinned", "shares")}),
        (_("Times"), {"fields": ("created", "updated", "deleted")}),
        (_("Where it is"), {"fields": ("id", "whose", "titled_by", "leaf"), "classes": ("collapse",)}),
    )
    empty_words = _(
        "No conversation yet. While CONVERSATIONS is on, those of users and API keys are kept: of the chat page, and "
        "of requests with a conversation."
    )
    updated, deleted = moment("updated_at", _("last message")), moment("deleted_at", _("deleted"))

    @admin.display(description=_("title"))
    def short_title(self, conversation: Conversation) -> str:
        """Return the title, or the id of a conversation without a title."""
        return short(conversation.title, _TITLE_CHARS) if conversation.title else conversation.pk[:8]

    @admin.display(description=_("model"))
    def short_model(self, conversation: Conversation) -> str:
        """Return the model or pipeline, shortened."""
        return short(conversation.model)

    @admin.display(description=_("share links"))
    def shares(self, conversation: Conversation) -> str:
        """Return a link to its share links."""
        if num := conversation.shares.count():
            return self.listed("streamserve_share", num, conversation__id__exact=conversation.pk)
        return NOTHING

    def get_search_results(self, request: HttpRequest, queryset: QuerySet[Any], search_term: str) -> tuple[Any, bool]:
        """Return the rows that an owner's name or an id finds, which have indexes; else those with the words."""
        found, _may_repeat = super().get_search_results(request, queryset, search_term)
        if not search_term.strip() or found.exists():
            return found, False
        return queryset.filter(title__icontains=search_term.strip()), False

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the tree of the messages; their text to those who may see messages."""
        may_read = request.user.has_perm(VIEW_TEXT)
        nodes, has_more = branches(object_id)
        if nodes and may_read and self.has_view_permission(request):
            log.info("conversation_read", conversation_id=object_id, user_id=request.user.pk)
        for node in nodes:
            node["link"] = self.linked("streamserve_message", node["id"], node["id"][:8])
        more = {"nodes": nodes, "may_read": may_read}
        if has_more:
            filters = {"role": "all", "conversation__id__exact": object_id}
            more["rest"] = self.listed("streamserve_message", _("all messages"), **filters)
        return super().change_view(request, object_id, form_url, {**(extra_context or {}), **more})

    @admin.action(description=_("Delete the selected conversations"), permissions=["delete_rows"])
    def delete_conversations(self, request: HttpRequest, conversations: QuerySet[Conversation]) -> HttpResponse | None:
        """Ask once more; then stop their running answers and delete them with all messages."""
        pks = list(conversations.values_list("pk", flat=True))
        if "post" not in request.POST:
            context = {
                **self.admin_site.each_context(request),
                "title": _("Are you sure?"),
                "opts": self.opts,
                "pks": pks,
                "num_messages": Message.objects.filter(conversation__in=pks).count(),
                "checkbox": ACTION_CHECKBOX_NAME,
            }
            return TemplateResponse(request, "streamserve/admin/delete_conversations.html", context)
        running = Message.objects.running().filter(conversation__in=pks).values_list("stream_id", flat=True)
        if stream_ids := [str(stream_id) for stream_id in running]:
            background.run(partial(_stop, stream_ids), "the API")
        num = drop_conversations(Conversation.objects.filter(pk__in=pks))
        for pk in pks:
            record_action(request, Conversation, "", f"Deleted conversation {pk}", DELETION)
        text = ngettext("%(num)d conversation was deleted.", "%(num)d conversations were deleted.", num) % {"num": num}
        self.message_user(request, text)
        return None

    def has_delete_rows_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may delete anybody's conversation."""
        return request.user.has_perm("streamserve.delete_conversation")


async def _stop(stream_ids: list[str]) -> None:
    for stream_id in stream_ids:
        stream = await get_site().streams.reach(stream_id)
        if stream is not None:
            await stream.stop(None)


def branches(conversation_id: str) -> tuple[list[dict[str, Any]], bool]:
    """Return a conversation's messages as an indented list, and whether there are more than `MAX_SHOWN`.

    A message follows its parent at the same `depth`; where a message has several answers, or an answer several
    questions after it, each is a branch and one deeper. `is_shown`: on the branch that its owner sees.
    """
    columns = ("id", "parent_id", "role", "state", "finish_reason", "error_code", "rating", "stream_id", "created_at")
    rows = Message.objects.filter(conversation=conversation_id).annotate(excerpt=Left("text", EXCERPT_CHARS))
    found = list(rows.order_by("created_at", "id").values(*columns, "excerpt")[: MAX_SHOWN + 1])
    has_more, found = len(found) > MAX_SHOWN, found[:MAX_SHOWN]
    by_id = {row["id"]: row for row in found}
    children: dict[str | None, list[dict[str, Any]]] = {}
    for row in found:
        children.setdefault(row["parent_id"] if row["parent_id"] in by_id else None, []).append(row)
    leaf = Conversation.objects.filter(pk=conversation_id).values_list("leaf", flat=True).first()
    while leaf in by_id:
        by_id[leaf]["is_shown"] = True
        leaf = by_id[leaf]["parent_id"]
    nodes, waiting = [], _branch(children.get(None, []), 0)
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        waiting += _branch(children.get(node["id"], []), node["depth"])
    return nodes, has_more


def _branch(siblings: list[dict[str, Any]], depth: int) -> list[dict[str, Any]]:
    """Return the messages after a message, the last first, with their depth and which branch each is."""
    num = len(siblings)
    for number, row in enumerate(siblings, 1):
        row["depth"] = depth if num == 1 else min(depth + 1, _MAX_DEPTH)
        row["place"] = f"{number}/{num}" if num > 1 else ""
    return siblings[::-1]


@admin.register(Share)
class ShareAdmin(OfConversation):
    """Share links, newest first. The links themselves are not stored."""

    list_display = ("short_id", "of", "short_owner", "state", "created", "expires", "revoked")
    list_filter = (("revoked_at", admin.EmptyFieldListFilter), "created_at")
    list_select_related = ("conversation",)
    search_fields = ("id", "conversation__id")
    search_help_text = _("The beginning of a link's or conversation's id, or the name of a user or key")
    sortable_by = ("created",)
    actions = ("revoke",)
    fields = ("id", "of", "who", "state", "leaf", "created", "expires", "revoked")
    empty_words = _(
        "No share link. While SHARE_LINKS is on, an owner makes one of a branch of a conversation; here it is revoked."
    )
    revoked = moment("revoked_at", _("revoked"))

    @admin.action(description=_("Revoke the selected share links"), permissions=["revoke"])
    def revoke(self, request: HttpRequest, shares: QuerySet[Share]) -> None:
        """End the links for good."""
        num = Share.objects.filter(pk__in=shares.values("pk")).revoke()
        text = ngettext("%(num)d share link was revoked.", "%(num)d share links were revoked.", num) % {"num": num}
        record_action(request, Share, "", text)
        self.message_user(request, text)

    def has_revoke_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may revoke anybody's share link."""
        return request.user.has_perm("streamserve.revoke_share")


@admin.register(Attachment)
class AttachmentAdmin(RecordAdmin):
    """Attachments, newest first. What was read from a file is shown to those who may see messages."""

    list_display = ("short_name", "created", "short_owner", "content_type", "size", "is_sent")
    list_filter = (("content_type", RecentValues), "is_sent", "created_at")
    search_fields = ("id", "name")
    search_help_text = _("The beginning of a file's name or id, or the name of a user or key")
    sortable_by = ("created",)
    empty_words = _(
        "No attachment yet. Users add files of text to a question; while CONVERSATIONS is on they are kept."
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Attachment]:
        """Return the rows without their texts."""
        return super().get_queryset(request).defer("text")

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return the text's place only for those who may see messages."""
        columns = ("name", "content_type", "size", "num_chars", "who", "whose", "is_ready", "is_sent", "of", "created")
        text = (_("What was read from it"), {"fields": ("read",), "classes": ("collapse",)})
        return [(None, {"fields": columns}), *([text] if request.user.has_perm(VIEW_TEXT) else [])]

    @admin.display(description=_("name"))
    def short_name(self, file: Attachment) -> str:
        """Return the name, shortened."""
        return short(file.name, _TITLE_CHARS)

    @admin.display(description=_("size"))
    def size(self, file: Attachment) -> str:
        """Return the size with its unit."""
        return filesizeformat(file.num_bytes)

    @admin.display(description=_("text"))
    def read(self, file: Attachment) -> str:
        """Return the text, as text."""
        return format_html('<pre class="ss-said">{}</pre>', file.text) if file.text else NOTHING

    @admin.display(description=_("messages"))
    def of(self, file: Attachment) -> str:
        """Return links to the messages that have it."""
        links = [
            self.linked("streamserve_message", pk, pk[:8]) for pk in file.messages.values_list("pk", flat=True)[:20]
        ]
        return format_html_join(", ", "{}", ((link,) for link in links)) or NOTHING
