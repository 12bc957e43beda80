"""`manage.py streamserve_doctor URL [INNER ...]`: what stands between this site and its readers, and what to mend.

Run it in the site's own project: it signs a probe, makes a key for ten minutes, and reads in the database what became
of its answers. The checks are in streamserve/doctor/, their meaning in docs/doctor.md.
"""

from __future__ import annotations

import json
import sys
import textwrap
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone

from streamserve.conf import SiteConfig, get_settings
from streamserve.doctor.examination import CHECKS, Examination, Order, examine, locate
from streamserve.doctor.lines import LINES, line_for
from streamserve.doctor.verdicts import FOUND, LIMIT, UNKNOWN, Verdict
from streamserve.models import ApiKey
from streamserve.protocol.identity import Identity
from streamserve.web.caller_rules import denied_by, permissions_of
from streamserve.web.websocket import path_of, socket_path

_KEY_LIFE = timedelta(minutes=10)
_SILENCE = 1.25  # of the time between keepalives
_MAX_SILENCE = 500.0  # a key and a probe are good for ten minutes
_FOUND_STATUS, _UNKNOWN_STATUS = 1, 2
_WIDTH, _MARGIN = 110, " " * 29


class Command(BaseCommand):
    """The exit status is 1 where something is found, 2 where only something could not be told."""

    help = (
        "Examine the way to this site through its proxies: buffering, compression, HTTP version, silence, keepalives, "
        "headers, WebSocket, disconnect and resume. Names the line of configuration to change."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("url", help="the address that readers use, such as https://example.org")
        parser.add_argument(
            "inner", nargs="*", help="addresses of hops within, the outermost first: they tell which hop has a fault"
        )
        parser.add_argument("--only", action="append", choices=CHECKS, metavar="CHECK", help=", ".join(CHECKS))
        parser.add_argument(
            "--model", help="alias in MODELS of the model that gives three answers; default: DEFAULT_MODEL"
        )
        parser.add_argument("--no-answers", action="store_true", help="ask no model: without disconnect and resume")
        parser.add_argument(
            "--silence", type=float, metavar="SECONDS", help="how long a connection is silent; default: 1.25 keepalives"
        )
        parser.add_argument("--json", action="store_true", help="for programs")

    def handle(self, *args: Any, url: str, inner: list[str], **options: Any) -> None:
        for address in (url, *inner):
            _check(address)
        with _key() as (key, owner):
            order = _order(get_settings(), key, owner, options)
            if not options["json"]:
                self.stderr.write(f"Examining. It takes about {order.silence_seconds + 10:.0f} s for each address.")
            found = [examine(url, order), *(examine(one, order, outermost=url) for one in inner)]
        located = locate(found)
        out = json.dumps(_as_json(located, found), indent=2) if options["json"] else "\n".join(_lines(located))
        self.stdout.write(out)
        states = {verdict.state for verdict in located.verdicts}
        if states & {FOUND, UNKNOWN}:
            sys.exit(_FOUND_STATUS if FOUND in states else _UNKNOWN_STATUS)


def _check(address: str) -> None:
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
        raise CommandError(f"{address!r} is no address of a site. Give it as https://example.org")


@contextmanager
def _key() -> Iterator[tuple[str, str]]:
    """Make an API key for this run, and delete it. Yields the key, and the owner of its answers."""
    row, key = ApiKey.objects.make(name="streamserve_doctor", expires_at=timezone.now() + _KEY_LIFE)
    try:
        yield key, f"key:{row.pk}"
    finally:
        row.delete()


def _model(settings: SiteConfig, named: str | None) -> str:
    """Return the model to ask: the named, the default, or the first that a key without a user may use."""
    hidden = denied_by(permissions_of(settings), None, Identity.of("key:0", "key:0"))
    usable = [alias for alias in (settings.default_model, *settings.models) if alias not in hidden]
    model = named or (*usable, settings.default_model)[0]
    if model not in settings.models:
        raise CommandError(f"There is no model {model!r}. MODELS has: {', '.join(settings.models)}.")
    if model in hidden:
        raise CommandError(
            f"PERMISSION of the model {model!r} does not let the doctor's key in, which belongs to no user. Name "
            "another with --model, or leave the answers out with --no-answers."
        )
    return model


def _order(settings: SiteConfig, key: str, owner: str, options: dict[str, Any]) -> Order:
    model = "" if options["no_answers"] else _model(settings, options["model"])
    keepalive = settings.streams.keepalive_seconds
    silence = options["silence"] if options["silence"] is not None else keepalive * _SILENCE
    if not 0 < silence <= _MAX_SILENCE:
        raise CommandError(f"--silence is more than 0 and at most {_MAX_SILENCE:.0f} seconds.")
    return Order(
        paths={
            "probe": path_of("doctor"),
            "streams": path_of("streams"),
            "whole": path_of("chat_completions"),
            "websocket": socket_path(),
        },
        key=key,
        owner=owner,
        model=model,
        silence_seconds=silence,
        keepalive_seconds=keepalive,
        only=tuple(options["only"] or CHECKS),
    )


def _as_json(located: Examination, found: list[Examination]) -> dict[str, Any]:
    """Return the outcome: `addresses` as asked, `verdicts` of the outermost with the lines that mend each fault."""
    return {
        "url": located.url,
        "addresses": [{"url": one.url, "hops": one.hops, "web_server": one.web_server} for one in found],
        "verdicts": [
            {**asdict(verdict), "lines": {hop: line_for(verdict.fault, hop) for hop in verdict.hops}}
            for verdict in located.verdicts
        ],
    }


def _lines(located: Examination) -> Iterator[str]:
    way = [*located.hops, located.web_server or "a web server"]
    yield f"{located.url}: {' → '.join(way)}"
    yield ""
    for verdict in located.verdicts:
        yield from _verdict_lines(verdict)
    num_found = sum(verdict.state == FOUND for verdict in located.verdicts)
    num_unknown = sum(verdict.state == UNKNOWN for verdict in located.verdicts)
    yield ""
    yield f"{num_found} found, {num_unknown} could not be told. docs/doctor.md explains each check."


def _verdict_lines(verdict: Verdict) -> Iterator[str]:
    head = f"{verdict.state:<14} {verdict.check:<13} "
    yield from textwrap.wrap(head + verdict.said, _WIDTH, subsequent_indent=_MARGIN)
    if verdict.state not in (FOUND, LIMIT):
        return
    mends = [(hop, line_for(verdict.fault, hop)) for hop in verdict.hops]
    for hop, line in mends:
        if line:
            yield from textwrap.wrap(f"{hop}: {line}", _WIDTH, initial_indent=_MARGIN, subsequent_indent=_MARGIN)
    if verdict.fault in LINES and not any(line for _, line in mends):
        yield f"{_MARGIN}docs/troubleshooting.md has the line for each proxy, under {verdict.fault}."
