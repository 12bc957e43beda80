"""Lists of conversations, and the search in them. Each is one query, beside the row that a page begins after. Blocks.

PostgreSQL searches texts by its full-text search (its manual, 12), whole words and the beginning of the last word, with
the index of migration 0003. Other databases look for each word anywhere in the text (LIKE). Titles are searched so
everywhere: a tenant's are few.
"""

from __future__ import annotations

import re
from typing import Any

from django.db import connections
from django.db.models import BooleanField, Exists, F, Func, OuterRef, Q, Value

from streamserve.api.conversations import ConversationView, Listed, no_conversation
from streamserve.rows.conversation_views import conversation_view
from streamserve.rows.conversations import Conversation, ConversationQuerySet, Message, MessageQuerySet

# A word that is only indexed up to here: an entry of PostgreSQL's index is refused above 1 MB (its manual, 12.11).
SEARCHED_CHARS = 100_000
_MAX_WORDS = 16


def page_of(tenant: str, listed: Listed) -> tuple[list[ConversationView], bool]:
    """Return a part of a tenant's conversations, and whether there are more. Raises NotFound for `listed.after`."""
    rows = Conversation.objects.of(tenant)
    if listed.source:
        rows = rows.filter(source=listed.source)
    if listed.search:
        rows = rows.filter(_found(tenant, listed.search))
    if listed.after:
        rows = rows.filter(_after(tenant, listed.after))
    running = Message.objects.running().filter(conversation=OuterRef("pk"))
    ordered = rows.annotate(has_running=Exists(running)).order_by("-is_pinned", "-updated_at", "-id")
    found: list[Any] = list(ordered[: listed.limit + 1])
    views = [conversation_view(row, is_running=row.has_running) for row in found[: listed.limit]]
    return views, len(found) > listed.limit


def _after(tenant: str, conversation_id: str) -> Q:
    """Return what is later in the list than a conversation, which may be deleted by now."""
    last = Conversation.objects.filter(tenant=tenant, pk=conversation_id).first()
    if last is None:
        raise no_conversation()
    later = Q(updated_at__lt=last.updated_at) | Q(updated_at=last.updated_at, pk__lt=last.pk)
    return Q(is_pinned=False) | Q(later, is_pinned=True) if last.is_pinned else Q(later, is_pinned=False)


def _found(tenant: str, search: str) -> Q:
    """Return what has every word of `search` in its title, or in one of its messages."""
    words = search.replace("\0", "\N{REPLACEMENT CHARACTER}").split()[:_MAX_WORDS]
    in_title = Q()
    for word in words:
        in_title &= Q(title__icontains=word)
    return in_title | Q(pk__in=_with_words(tenant, words).values("conversation")) if words else Q()


def _with_words(tenant: str, words: list[str]) -> MessageQuerySet:
    """Return the tenant's messages that have every word."""
    messages = Message.objects.filter(conversation__in=_ids(tenant))
    if connections[messages.db].vendor != "postgresql":
        for word in words:
            messages = messages.filter(text__icontains=word)
        return messages
    asked = tsquery(" ".join(words))
    return messages.filter(_Matches(F("text"), Value(asked))) if asked else messages.none()


def _ids(tenant: str) -> ConversationQuerySet:
    return Conversation.objects.of(tenant).values("pk")  # type: ignore[return-value]


class _Matches(Func):
    """Whether a text matches a query of PostgreSQL's, by the expression that is indexed."""

    template = "to_tsvector('simple'::regconfig, left(%(expressions)s)"
    arg_joiner = f", {SEARCHED_CHARS})) @@ to_tsquery('simple'::regconfig, "
    output_field = BooleanField()


def tsquery(search: str) -> str:
    """Return a search as PostgreSQL's query: all words, and the last as a beginning; "" for no word."""
    words = re.findall(r"\w+", search)
    return " & ".join(f"'{word}'" for word in words) + ":*" if words else ""
