"""The page "From GPU to glass": where the time of answers went, by hop and over time, with charts of plain SVG.

It belongs to the list of streams, whose rows it reads: the newest `MAX_ROWS` of its span.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from django.http import HttpRequest
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.http import urlencode
from django.utils.translation import gettext_lazy as _

from streamserve.admin.chart import FILLED, HEIGHT, WIDTH, Bar, bar
from streamserve.admin.records import NUM_NEWEST
from streamserve.models import Stream
from streamserve.protocol import glass_times
from streamserve.protocol.glass import parting
from streamserve.protocol.glass_times import (
    FIRST,
    GLASS,
    HOPS,
    NETWORK,
    PERCENTS,
    RENDER,
    REPORTED,
    SERVER,
    WHOLE,
    Answered,
    Column,
)
from streamserve.web.words import in_words

MAX_ROWS = 10_000
# Spans that can be chosen: hours, their words, and how many columns they have.
SPANS: Mapping[int, tuple[Any, int]] = {1: (_("1 hour"), 12), 24: (_("24 hours"), 24), 168: (_("7 days"), 28)}
_USUAL_HOURS, _USUAL_PERCENT = 24, 95
WORDS: Mapping[str, tuple[Any, Any]] = {
    "intake": (_("intake"), _("from the request's arrival until the engine accepts it")),
    "queue": (_("queue"), _("until its first step")),
    "prefill": (_("prefill"), _("its prompt, until the first token")),
    "decode": (_("decode"), _("from the first token to the last")),
    "other": (_("other"), _("parked, steps of a pipeline, messages between processes")),
    "network": (_("network"), _("the way to the page and back, proxies too")),
    "render": (_("render"), _("in the page, until it is painted")),
    SERVER: (_("server"), _("arrival until the first token")),
    REPORTED: (_("server"), _("arrival until the first token, of the answers with a report")),
    GLASS: (_("glass"), _("sent until the first token is painted, by the reader's own clock")),
}


def context_of(request: HttpRequest) -> dict[str, Any]:
    """Return what the page shows, as its query asks."""
    hours = _chosen(request, "hours", SPANS, _USUAL_HOURS)
    percent = _chosen(request, "percent", PERCENTS, _USUAL_PERCENT)
    until = WHOLE if request.GET.get("until") == WHOLE else FIRST
    model = request.GET.get("model", "")
    query = {"hours": hours, "until": until, "percent": percent, **({"model": model} if model else {})}
    num = SPANS[hours][1]
    seconds = hours * 3600 / num
    begin = (timezone.now().timestamp() // seconds + 1 - num) * seconds
    rows = list(Stream.objects.times_since(datetime.fromtimestamp(begin, UTC), model)[: MAX_ROWS + 1])
    answers = [Answered(at.timestamp(), *rest) for at, *rest in rows[:MAX_ROWS]]
    found = glass_times.columns(answers, until, begin=begin, seconds=seconds, num=num)
    whole = glass_times.together(found)
    names = [name for name in HOPS if name in whole.values]
    stacked = max((sum(_lengths(one, percent, names)) for one in found), default=0.0)
    server = REPORTED if REPORTED in whole.values else SERVER
    sides = [name for name in (server, GLASS) if name in whole.values]
    widest = max((length for one in found for length in _lengths(one, percent, sides)), default=0.0)
    return {
        "spans": [(words, _link(query, hours=one), one == hours) for one, (words, _num) in SPANS.items()],
        "untils": [
            (words, _link(query, until=one), one == until)
            for one, words in ((FIRST, _("first token")), (WHOLE, _("whole answer")))
        ],
        "percents": [(f"p{one}", _link(query, percent=one), one == percent) for one in PERCENTS],
        "models": [(one or _("all models"), _link(query, model=one), one == model) for one in _models(model)],
        "percent": percent,
        "until_words": _("whole answer") if until == WHOLE else _("first token"),
        "num_answers": whole.num_answers,
        "num_reports": whole.num_reports,
        "is_cut": len(rows) > MAX_ROWS,
        "max_rows": MAX_ROWS,
        "longest": _longest(whole, percent),
        "parting": parting(*(whole.at_percent(percent, name) for name in (server, NETWORK, RENDER))),
        "legend": [(name, *WORDS[name]) for name in names],
        "stack": list(_stacked(found, percent, names, stacked)),
        "stack_top": in_words(stacked),
        "stack_half": in_words(stacked / 2),
        "sides": list(_beside(found, percent, sides, widest)),
        "sides_legend": [(name, *WORDS[name]) for name in sides],
        "sides_top": in_words(widest),
        "sides_half": in_words(widest / 2),
        "ticks": [_moment(found[index].at, hours) for index in (0, num // 2, num - 1)],
        "percentiles": [f"p{one}" for one in PERCENTS],
        "sums": [
            (name, *WORDS[name], [in_words(whole.at_percent(one, name)) for one in PERCENTS])
            for name in (*names, *sides)
        ],
        "columns": [WORDS[name][0] for name in (*names, *sides)],
        "rows": [
            (
                _moment(one.at, hours),
                one.num_answers,
                [in_words(one.at_percent(percent, name)) for name in (*names, *sides)],
            )
            for one in reversed(found)
            if one.num_answers
        ],
    }


def _chosen(request: HttpRequest, name: str, among: Any, usual: int) -> int:
    return next((one for one in among if request.GET.get(name) == str(one)), usual)


def _link(query: Mapping[str, Any], **changed: Any) -> str:
    return "?" + urlencode({name: value for name, value in {**query, **changed}.items() if value != ""})


def _models(chosen: str) -> Sequence[str]:
    """Return the models of the newest answers, after "" for all; none where there is one."""
    newest = Stream.objects.order_by("-created_at").values_list("model", flat=True)[:NUM_NEWEST]
    found = sorted({*newest, *([chosen] if chosen else [])})
    return ["", *found] if len(found) > 1 or chosen else []


def _longest(whole: Column, percent: int) -> str:
    found = glass_times.longest(whole, percent)
    return (
        ""
        if found is None
        else str(_("The longest hop is {}: p{} {}.")).format(WORDS[found[0]][0], percent, in_words(found[1]))
    )


def _lengths(column: Column, percent: int, names: Sequence[str]) -> list[float]:
    return [column.at_percent(percent, name) or 0.0 for name in names]


def _stacked(found: Sequence[Column], percent: int, names: Sequence[str], most: float) -> Iterator[Bar]:
    """Yield the hops of each column, the first at the bottom."""
    step = WIDTH / len(found)
    for index, column in enumerate(found):
        bottom = float(HEIGHT)
        for name, seconds in zip(names, _lengths(column, percent, names), strict=True):
            height = HEIGHT * seconds / most if most else 0.0
            bottom -= height
            if height:
                yield _bar(name, index * step, bottom, step * FILLED, height, seconds, percent)


def _beside(found: Sequence[Column], percent: int, names: Sequence[str], most: float) -> Iterator[Bar]:
    """Yield what server and reader saw of each column, beside each other."""
    step = WIDTH / len(found)
    width = step * FILLED / max(1, len(names))
    for index, column in enumerate(found):
        for place, (name, seconds) in enumerate(zip(names, _lengths(column, percent, names), strict=True)):
            height = HEIGHT * seconds / most if most else 0.0
            if height:
                yield _bar(name, index * step + place * width, HEIGHT - height, width, height, seconds, percent)


def _bar(name: str, x: float, y: float, width: float, height: float, seconds: float, percent: int) -> Bar:
    return bar(name, x, y, width, height, f"{WORDS[name][0]}, p{percent}: {in_words(seconds)}")


def _moment(at: float, hours: int) -> str:
    local = timezone.localtime(datetime.fromtimestamp(at, UTC))
    return date_format(local, "j M, H:i" if hours > 24 else "H:i")
