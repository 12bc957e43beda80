"""`RecordAdmin`: rows that the program alone writes, with what their lists and pages share.

names       owners by their names, asked for once a page
times       to the second; how long something took has a unit
links       to the row that another row names
lists       say what will be in them; narrow enough for 1280 px beside their filters
a million   rows are neither counted nor sorted: counts end at `MAX_COUNTED`, what can be sorted has an index, and
            a filter's choices are those of the newest rows
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from django.contrib import admin
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.options import IncorrectLookupParameters
from django.contrib.admin.utils import flatten_fieldsets
from django.contrib.admin.views.main import ChangeList
from django.contrib.auth import get_user_model
from django.contrib.contenttypes.models import ContentType
from django.core.paginator import Paginator
from django.db import DataError
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import NoReverseMatch, reverse
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.translation import gettext_lazy as _

from streamserve.rows.owners import Owner, names_of, owned_by

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
    TabularInline = admin.TabularInline[Any, Any]
    AnyPaginator = Paginator[Any]
else:  # generic in their stubs only
    ModelAdmin, TabularInline, AnyPaginator = admin.ModelAdmin, admin.TabularInline, Paginator

MAX_COUNTED = 10_000
NUM_NEWEST = 1_000  # rows whose values a filter offers
NOTHING = "–"
_NAME_CHARS, _ID_CHARS, _HEX_CHARS = 20, 16, 8
_HEX = re.compile("[0-9a-f]{32}")
_NAMES = "_streamserve_names"  # of a row: the owners that it names


class ReadOnly:
    """No row is added, changed or deleted here."""

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


def shortened(text: str, num_chars: int) -> str:
    """Return `text`, or its beginning and "…" where it is longer than `num_chars`."""
    return text if len(text) <= num_chars else f"{text[: num_chars - 1]}…"


def short(text: str, num_chars: int = _NAME_CHARS) -> str:
    """Return `text` for a column of a list: shortened, with the whole as its title."""
    return (
        text if len(text) <= num_chars else format_html('<span title="{}">{}</span>', text, shortened(text, num_chars))
    )


def in_short(when: datetime | None) -> str:
    """Return day and time to the second, of another year with the year; "–" for none."""
    if when is None:
        return NOTHING
    local = timezone.localtime(when)
    is_recent = local.year == timezone.localtime().year
    text = date_format(local, "j M, H:i:s" if is_recent else "j M Y, H:i:s")
    return format_html('<time datetime="{}">{}</time>', local.isoformat(timespec="seconds"), text)


def moment(column: str, description: Any) -> Callable[[Any, Any], str]:
    """Return a column that shows a time to the second, where Django's own stops at the minute."""

    @admin.display(description=description, ordering=column)
    def shown(self: Any, row: Any) -> str:
        return in_short(getattr(row, column))

    return shown


def record_action(request: HttpRequest, model: Any, pk: str, words: str, flag: int = CHANGE) -> None:
    """Write what staff did to the admin's log, where Django keeps its own entries: who, when, what."""
    LogEntry.objects.create(
        user_id=cast(int, request.user.pk),  # of any type that the user model has
        content_type=ContentType.objects.get_for_model(model, for_concrete_model=False),
        object_id=pk,
        object_repr=words[:200],
        action_flag=flag,
        change_message=words,
    )


class BoundedPaginator(AnyPaginator):
    """Counts no further than `MAX_COUNTED`: the rows beyond are reached by filters and by the search."""

    @cached_property
    def _num_found(self) -> int:
        rows: Any = self.object_list
        return len(rows) if isinstance(rows, list) else rows.order_by()[: MAX_COUNTED + 1].count()

    @cached_property
    def count(self) -> int:
        """The number of rows, or `MAX_COUNTED`."""
        return min(self._num_found, MAX_COUNTED)

    @property
    def is_bounded(self) -> bool:
        """Whether there are more."""
        return self._num_found > MAX_COUNTED


class RecentValues(admin.AllValuesFieldListFilter):
    """A filter by the values that a column has in the newest rows. Django's own reads the whole table for them."""

    def __init__(
        self, field: Any, request: HttpRequest, params: Any, model: Any, model_admin: Any, field_path: str
    ) -> None:
        super().__init__(field, request, params, model, model_admin, field_path)
        newest = model_admin.get_queryset(request).order_by(*model_admin.get_ordering(request) or model._meta.ordering)
        values = set(newest.values_list(field_path, flat=True)[:NUM_NEWEST])
        self.lookup_choices: Any = sorted({*values, *(self.lookup_val or ())} - {"", None})

    def has_output(self) -> bool:
        """Return whether there is a choice."""
        return bool(self.lookup_choices)


class RecordAdmin(ReadOnly, ModelAdmin):
    """Rows to look at. `empty_words`: what will be in the list, and how it comes about.

    `search_fields` are columns of ids, whose beginning is searched for; owners are found by their names.
    """

    paginator = BoundedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    list_per_page = 50
    list_max_show_all = 500
    change_list_template = "streamserve/admin/change_list.html"
    owner_columns: Sequence[str] = ("owner", "tenant")
    empty_words: Any = ""

    class Media:
        css = {"all": ("streamserve/admin.css",)}  # noqa: RUF012  (Django's own declaration)

    created = moment("created_at", _("created"))
    finished = moment("finished_at", _("finished"))
    started = moment("started_at", _("started"))
    expires = moment("expires_at", _("expires"))
    due = moment("due_at", _("due"))
    released = moment("released_at", _("released"))

    @admin.display(description=_("id"), ordering="id")
    def short_id(self, row: Any) -> str:
        """Return the beginning of the id: of one in hex as the live page shows it."""
        return row.pk[:_HEX_CHARS] if _HEX.fullmatch(row.pk) else shortened(row.pk, _ID_CHARS)

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return all that the page shows, columns and methods: nothing is changed there."""
        return () if obj is None else flatten_fieldsets(self.get_fieldsets(request, obj))

    # -- names

    @admin.display(description=_("owner"))
    def short_owner(self, row: Any) -> str:
        """Return the owner's name, for a list."""
        return self.named(row, row.owner)

    @admin.display(description=_("owner"))
    def who(self, row: Any) -> str:
        """Return the owner's name with a link and the text that rows have, for the row's own page."""
        return self.named_in_full(row, row.owner)

    @admin.display(description=_("tenant"))
    def whose(self, row: Any) -> str:
        """Return the tenant the same way."""
        return self.named_in_full(row, row.tenant)

    def named(self, row: Any, owner: str) -> str:
        """Return the name of an owner, shortened; its text is the title."""
        name = self._owner(row, owner).name
        return format_html('<span title="{}">{}</span>', f"{name} ({owner})", shortened(name, _NAME_CHARS))

    def named_in_full(self, row: Any, owner: str) -> str:
        """Return the name of an owner, linked to its user or key, and its text."""
        if not owner:
            return NOTHING
        named = self._owner(row, owner)
        shown = self._link_to_owner(named) if named.is_there else named.name
        return shown if named.name == owner else format_html("{} <code>{}</code>", shown, owner)

    def _link_to_owner(self, owner: Owner) -> str:
        opts = get_user_model()._meta if owner.kind == "user" else None
        page = f"{opts.app_label}_{opts.model_name}" if opts else "streamserve_apikey"
        return self.linked(page, owner.pk, owner.name)

    def _owner(self, row: Any, owner: str) -> Owner:
        if owner not in getattr(row, _NAMES, {}):
            self.name_owners([row])
        found: Owner = getattr(row, _NAMES)[owner]
        return found

    def owners_of(self, row: Any) -> list[str]:
        """Return the owners that a row names."""
        return [getattr(row, column) for column in self.owner_columns]

    def name_owners(self, rows: Iterable[Any]) -> None:
        """Give rows the names of their owners: one query for all users, and one for all keys."""
        if not self.owner_columns:
            return
        of_rows = [(row, self.owners_of(row)) for row in rows]
        names = names_of(owner for _, owners in of_rows for owner in owners)
        for row, _owners in of_rows:
            setattr(row, _NAMES, names)

    def get_changelist_instance(self, request: HttpRequest) -> ChangeList:
        """Return the list, its owners named. A number beyond the database's is a wrong filter."""
        try:
            page = super().get_changelist_instance(request)
        except (OverflowError, DataError) as error:
            raise IncorrectLookupParameters(error) from error
        for spec in page.filter_specs:
            spec.template = "streamserve/admin/filter.html"
        self.name_owners(page.result_list)
        return page

    # -- links

    def linked(self, page: str, pk: Any, text: Any) -> str:
        """Return a link to a row's page ("streamserve_job"), or the text where this admin site has no such page."""
        try:
            url = reverse(f"admin:{page}_change", args=[pk], current_app=self.admin_site.name)
        except NoReverseMatch:
            return str(text)
        return format_html('<a href="{}">{}</a>', url, text)

    def listed(self, page: str, text: Any, **filters: Any) -> str:
        """Return a link to the rows of a list that match."""
        try:
            url = reverse(f"admin:{page}_changelist", current_app=self.admin_site.name)
        except NoReverseMatch:
            return str(text)
        return format_html('<a href="{}?{}">{}</a>', url, urlencode(filters), text)

    # -- lists

    def get_search_results(self, request: HttpRequest, queryset: QuerySet[Any], search_term: str) -> tuple[Any, bool]:
        """Return the rows whose ids begin with the term, and those of the owner of that name."""
        term = search_term.strip()
        if not term:
            return queryset, False
        found = Q()
        for column in self.search_fields:
            found |= Q(**{f"{column}__startswith": term})
        if "tenant" in self.owner_columns:
            found |= owned_by(term)
        return queryset.filter(found), False

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the list, or what will be in it."""
        more = {"empty_words": self.empty_words, "max_counted": MAX_COUNTED}
        return super().changelist_view(request, {**more, **(extra_context or {})})
