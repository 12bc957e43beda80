"""The page "Usage": what was used in some days, by user, key, model, team or kind; a chart by day; CSV.

It stands in place of the list of its rows. Sums are made by the database; the page takes four queries.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import F, Sum
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils import timezone
from django.utils.formats import date_format, number_format
from django.utils.translation import gettext_lazy as _

from streamserve.admin.chart import FILLED, HEIGHT, WIDTH, bar
from streamserve.admin.export import in_cell
from streamserve.admin.records import RecordAdmin
from streamserve.models import UsageDay
from streamserve.rows.owners import names_of
from streamserve.web.words import in_words

DAYS = (7, 30, 90, 366)  # the first but one is shown without being asked for
MAX_GROUPS = 200  # that the page shows; the file has all
# What a row of the page stands for: its words, and its column.
GROUPS: Mapping[str, tuple[Any, str]] = {
    "user": (_("user"), "tenant"),
    "key": (_("key"), "owner"),
    "model": (_("model"), "model"),
    "team": (_("team"), "team"),
    "kind": (_("kind"), "kind"),
    "day": (_("day"), "day"),
}
SUMS = (
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "reasoning_tokens",
    "accepted_tokens",
    "errors",
    "refused",
    "engine_seconds",
    "cost",
)


@admin.register(UsageDay)
class UsageAdmin(RecordAdmin):
    """The page, and its file."""

    fieldsets = (
        (None, {"fields": ("day", "who", "whose", "team", "model", "kind")}),
        (_("Sums"), {"fields": SUMS}),
    )

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the sums of some days, by user unless asked otherwise."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        days = next((num for num in DAYS if request.GET.get("days") == str(num)), DAYS[1])
        group = request.GET.get("by", "user")
        group = group if group in GROUPS else "user"
        today = timezone.localdate()
        shown = [today - timedelta(days=ago) for ago in reversed(range(days))]
        rows = UsageDay.objects.filter(day__gte=shown[0])
        if request.GET.get("format") == "csv":
            return _as_file(list(_grouped(rows, group)), group)
        sums = rows.aggregate(**{name: Sum(name) for name in SUMS})
        found = list(_grouped(rows, group)[: MAX_GROUPS + 1])
        context = {
            **self.admin_site.each_context(request),
            "title": _("Usage"),
            "opts": self.opts,
            "days": [(num, num == days) for num in DAYS],
            "num_days": days,
            "groups": [(name, words, name == group) for name, (words, _column) in GROUPS.items()],
            "group": group,
            "group_words": GROUPS[group][0],
            "sums": _shown(sums),
            "has_cost": bool(sums["cost"]),
            "rows": [{"name": name, **_shown(row)} for name, row in _named(found[:MAX_GROUPS], group)],
            "is_cut": len(found) > MAX_GROUPS,
            "max_groups": MAX_GROUPS,
            **_chart(_by_day(rows, shown)),
            **(extra_context or {}),
        }
        return TemplateResponse(request, "streamserve/admin/usage.html", context)


def _grouped(rows: Any, group: str) -> Any:
    """Return the sums of each group, the largest first; days in their order."""
    column = GROUPS[group][1]
    found = rows.order_by().values(column).annotate(**{f"sum_{name}": Sum(name) for name in SUMS})
    return found.order_by(f"-{column}" if group == "day" else F("sum_completion_tokens").desc(), column)


def _named(found: Sequence[Mapping[str, Any]], group: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the sums of each group."""
    column = GROUPS[group][1]
    owners = names_of(row[column] for row in found) if group in ("user", "key") else {}
    kinds = dict(UsageDay.KINDS)
    for row in found:
        value = row[column]
        if group in ("user", "key"):
            name = owners[value].name
        elif group == "day":
            name = date_format(value, "j M Y")
        else:
            name = str(kinds.get(value, value) if group == "kind" else value or _("no team"))
        yield name or "–", {sum_: row[f"sum_{sum_}"] for sum_ in SUMS}


def _shown(sums: Mapping[str, Any]) -> dict[str, str]:
    """Return sums in words: numbers with separators, durations, a cost with four decimals."""
    out = {name: number_format(sums[name] or 0, force_grouping=True) for name in SUMS[:-2]}
    cost = number_format(round(sums["cost"] or Decimal(0), 4), decimal_pos=4, force_grouping=True)
    return {**out, "engine_seconds": in_words(sums["engine_seconds"] or 0.0), "cost": cost}


def _by_day(rows: Any, days: Sequence[date]) -> Mapping[date, int]:
    """Return the tokens of prompts and answers of each of these days."""
    found = rows.order_by().values("day").annotate(num=Sum(F("prompt_tokens") + F("completion_tokens")))
    known: dict[date, int] = {row["day"]: row["num"] for row in found}
    return {day: known.get(day, 0) for day in days}


def _chart(by_day: Mapping[date, int]) -> dict[str, Any]:
    """Return what the chart shows: a bar for each day, its scale and its dates."""
    most, step = max(by_day.values()), WIDTH / len(by_day)
    bars = []
    for number, (day, num) in enumerate(by_day.items()):
        height = HEIGHT * num / (most or 1)
        title = f"{date_format(day, 'j M')}: {number_format(num, force_grouping=True)}"
        bars.append(bar("tokens", number * step, HEIGHT - height, step * FILLED, height, title))
    days = list(by_day)
    return {
        "bars": bars,
        "top": number_format(most, force_grouping=True),
        "half": number_format(most // 2, force_grouping=True),
        "ticks": [date_format(day, "j M") for day in (days[0], days[len(days) // 2], days[-1])],
    }


def _as_file(found: Sequence[Mapping[str, Any]], group: str) -> HttpResponse:
    """Return all groups as CSV, in plain numbers."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([group, "name", *SUMS])
    column = GROUPS[group][1]
    for row, (name, sums) in zip(found, _named(found, group), strict=True):
        writer.writerow([in_cell(str(row[column])), in_cell(name), *sums.values()])
    response = HttpResponse(out.getvalue(), content_type="text/csv; charset=utf-8")
    response["Content-Disposition"] = f'attachment; filename="usage-by-{group}.csv"'
    response["Cache-Control"] = "no-store"
    return response
