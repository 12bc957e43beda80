"""`RecordAdmin`: rows that the program alone writes, with the columns that their lists share.

These are short, so that a list shows how a row ended beside the page's filters: a visitor's id alone has 37 characters.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.translation import gettext_lazy as _

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
    TabularInline = admin.TabularInline[Any, Any]
else:  # generic in their stubs only
    ModelAdmin, TabularInline = admin.ModelAdmin, admin.TabularInline

_MAX_OWNER_CHARS = _ID_CHARS = 14


class ReadOnly:
    """No row is added, changed or deleted here."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class RecordAdmin(ReadOnly, ModelAdmin):
    """Rows to look at."""

    @admin.display(description=_("id"), ordering="id")
    def short_id(self, row: Any) -> str:
        """Return the beginning of the id."""
        return shortened(str(row.pk), _ID_CHARS)

    @admin.display(description=_("created"), ordering="created_at")
    def created(self, row: Any) -> str:
        """Return when, without the year."""
        return in_short(row.created_at)

    @admin.display(description=_("owner"), ordering="owner")
    def short_owner(self, row: Any) -> str:
        """Return the owner, a visitor's id shortened; the row's own page has it whole."""
        return shortened(row.owner, _MAX_OWNER_CHARS)


def shortened(text: str, num_chars: int) -> str:
    """Return `text`, or its beginning and "…" where it is longer than `num_chars`."""
    return text if len(text) <= num_chars else f"{text[: num_chars - 1]}…"


def in_short(moment: datetime | None) -> str:
    """Return day and time without the year; "–" for none."""
    return "–" if moment is None else date_format(timezone.localtime(moment), "j M, H:i:s")
