"""`manage.py streamserve_load`: an open-loop load on this site, and whether the class budgets hold under it.

Each reader has an API key of its own, as so many users would, so that no quota of one caller is what is measured. The
keys are made in the site's database, and deleted at the end; a site that does not take them is another site.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from django.conf import settings as django_settings
from django.core.management.base import BaseCommand, CommandError
from django.db import transaction
from django.http.request import validate_host
from django.urls import NoReverseMatch, reverse
from django.utils import timezone

from streamserve.conf import SiteConfig, get_settings
from streamserve.loadtest.chart import chart
from streamserve.loadtest.report import Report, report_of
from streamserve.loadtest.run import Run
from streamserve.loadtest.site_http import Address, BadAddress, Broken, Refused, SiteHTTP
from streamserve.loadtest.visits import MIX, Visit, draw_number
from streamserve.models import ApiKey

_EVERY_SECONDS = 1.0  # a line of progress on a terminal
_LOG_EVERY = 10  # so many seconds apart, in a file
_KEY_LIFE = timedelta(days=1)  # of a command that is killed


def positive(text: str) -> float:
    """Parse a number above 0. Raises ArgumentTypeError."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise ArgumentTypeError(f"{text!r} is no number above 0")
    return number


def share(text: str) -> float:
    """Parse a share: 0.95, 95 or 95%. Raises ArgumentTypeError."""
    number = positive(text.removesuffix("%"))
    number = number / 100 if number > 1 else number
    if number > 1:
        raise ArgumentTypeError(f"{text!r} is no share, as 95%")
    return number


class Command(BaseCommand):
    """Draws readers, lets them come, judges."""

    help = (
        "Let readers come at a rate, whether or not the site keeps up, each reading at its own pace; print TTFT, ITL "
        "and goodput, and whether the budgets of CLASSES hold. Run it against a site that may be slow meanwhile."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="default: http://127.0.0.1:8000")
        parser.add_argument("--rate", type=positive, default=1.0, help="requests a second (1)")
        parser.add_argument("--seconds", type=positive, default=30.0, help="for how long readers come (30)")
        parser.add_argument("--model", help="alias of a model; default: DEFAULT_MODEL")
        parser.add_argument(
            "--class",
            dest="latency_class",
            choices=sorted(MIX),
            help="readers of this class only; default: 60 %% chat, 20 %% document, 20 %% completion",
        )
        parser.add_argument("--goal", type=share, default=0.95, help="share of readers for whom a budget holds (95%%)")
        parser.add_argument(
            "--gaps",
            type=positive,
            nargs="?",
            const=True,
            metavar="SECONDS",
            help="judge the tail of the gaps, too: 95%% of a reader's within GAP_P95_SECONDS of its class, or SECONDS",
        )
        parser.add_argument("--seed", type=int, default=1, help="the same seed draws the same readers (1)")
        parser.add_argument(
            "--grace", type=positive, default=60.0, help="seconds for answers after the last reader (60)"
        )
        parser.add_argument("--max-requests", type=int, default=500, help="refuse to begin with more (500)")
        parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the run")
        parser.add_argument("--json", action="store_true", help="for programs, on stdout")
        parser.add_argument("--fail", action="store_true", help="exit with 1 unless the budgets hold")
        parser.add_argument(
            "--other-site",
            action="store_true",
            help="allow an address that is not this site's, whose owner has agreed; needs --key",
        )
        parser.add_argument("--key", help="API key for --other-site; default: the variable STREAMSERVE_KEY")

    def handle(self, *args: Any, **options: Any) -> None:
        settings = get_settings()
        visits = self._visits(options, settings)
        if options["svg"] is not None and not options["svg"].absolute().parent.is_dir():
            raise CommandError(f"There is no folder {options['svg'].absolute().parent} for --svg.")
        site = SiteHTTP(_address_of(options["url"], is_other=options["other_site"]))
        with self._keys(len(visits), options) as keys:
            run = Run(site, lambda number: keys[number % len(keys)], {})
            try:
                report = asyncio.run(self._run(run, visits, keys[0], settings, options))
            except KeyboardInterrupt:
                raise CommandError("Interrupted. The keys of the run are deleted.") from None
        if options["svg"] is not None:
            options["svg"].write_text(chart(report, run.outcomes))
        self.stdout.write(json.dumps(report.as_json(), indent=2) if options["json"] else "\n".join(report.lines()))
        if options["fail"] and not report.holds:
            raise CommandError("The budgets do not hold.")

    def _visits(self, options: dict[str, Any], settings: SiteConfig) -> list[Visit]:
        """Return the readers. Raises CommandError before anything is asked or made."""
        number, most = round(options["rate"] * options["seconds"]), options["max_requests"]
        if number > most:
            raise CommandError(
                f"That is {number:,} requests, and --max-requests allows {most:,}. Lower --rate or --seconds, or raise "
                "--max-requests if the site may have so many."
            )
        chosen = options["latency_class"]
        mix = {chosen: MIX[chosen]} if chosen else MIX
        return draw_number(options["seed"], max(1, number), options["seconds"], mix=mix, classes=settings.classes)

    @contextlib.contextmanager
    def _keys(self, num_readers: int, options: dict[str, Any]) -> Iterator[list[str]]:
        """Have a key for each reader while the block runs; for another site the given key."""
        if options["other_site"]:
            key = options["key"] or os.environ.get("STREAMSERVE_KEY")
            if not key:
                raise CommandError("Another site needs a key that its owner has made: --key, or STREAMSERVE_KEY.")
            yield [key]
            return
        if options["key"]:
            raise CommandError("--key goes with --other-site. On this site each reader gets a key of its own.")
        ends = timezone.now() + _KEY_LIFE
        with transaction.atomic():
            made = [ApiKey.objects.make(name="streamserve_load", expires_at=ends) for _ in range(num_readers)]
        try:
            yield [key for _, key in made]
        finally:
            ApiKey.objects.filter(pk__in=[row.pk for row, _ in made]).delete()

    async def _run(
        self, run: Run, visits: list[Visit], key: str, settings: SiteConfig, options: dict[str, Any]
    ) -> Report:
        model = await _model_of(run.site, key, options["model"], is_other=options["other_site"])
        run.fields["model"] = model
        self._say("Waiting for the model")
        try:
            await run.warm_up(key)
        except (Refused, Broken) as error:
            raise CommandError(f"{run.site.address} does not answer: {error}") from None
        progress = asyncio.create_task(self._show_progress(run, len(visits)))
        try:
            await run.read_all(visits, options["grace"])
        finally:
            progress.cancel()
            await asyncio.gather(progress, return_exceptions=True)
            self._say("")
        classes, gaps = settings.classes, options["gaps"]
        if gaps is not None and gaps is not True:
            classes = {name: replace(one, gap_p95_seconds=gaps) for name, one in classes.items()}
        return report_of(
            run.outcomes,
            classes,
            site=str(run.site.address),
            model=model,
            per_second=options["rate"],
            seconds=options["seconds"],
            goal=options["goal"],
            judges_gaps=gaps is not None,
        )

    async def _show_progress(self, run: Run, num_readers: int) -> None:
        is_terminal = sys.stderr.isatty()
        while True:
            await asyncio.sleep(_EVERY_SECONDS)
            if is_terminal or int(run.now) % _LOG_EVERY == 0:
                self._say(_progress(run, num_readers))

    def _say(self, words: str) -> None:
        """Write a line to stderr, over the line before it on a terminal."""
        if sys.stderr.isatty():
            self.stderr.write(f"\r\x1b[K{words}", self.style.SUCCESS, ending="")
            self.stderr.flush()
        elif words:
            self.stderr.write(words, self.style.SUCCESS)


def _progress(run: Run, num_readers: int) -> str:
    counts = run.counts
    unserved = counts.total() - counts["reading"] - counts["whole"]
    words = f"{max(0.0, run.now):.0f} s: {counts.total()} of {num_readers} readers have come, {counts['reading']} read"
    return f"{words}, {counts['whole']} answers are whole" + (f", {unserved} not served" if unserved else "")


def _address_of(url: str, *, is_other: bool) -> Address:
    """Return the address. Raises CommandError for a host that is not this site's, unless told."""
    try:
        address = Address.parse(url if "://" in url else f"http://{url}")
    except BadAddress as error:
        raise CommandError(str(error)) from None
    if is_other:
        return address
    if not _is_own_host(address.host):
        raise CommandError(
            f"{address.host} is not in ALLOWED_HOSTS: is it this site? A load on a site of others is an attack. Where "
            "its owner has agreed: --other-site, with --key."
        )
    if not address.prefix:  # where this site has its routes
        with contextlib.suppress(NoReverseMatch):
            prefix = reverse("streamserve:streams").removesuffix("/streams")
            return Address(address.is_https, address.host, address.port, prefix)
    return address


def _is_own_host(host: str) -> bool:
    """Return whether it is this machine, or named in ALLOWED_HOSTS; "*" there names no host."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        if ip_address(host).is_loopback:
            return True
    return validate_host(host, [name for name in django_settings.ALLOWED_HOSTS if name != "*"])


async def _model_of(site: SiteHTTP, key: str, asked: str | None, *, is_other: bool) -> str:
    """Return the model to ask, once the site has shown that it is this site. Raises CommandError."""
    try:
        found = [str(one["id"]) for one in (await site.get("/v1/models", key))["data"]]
    except Broken as error:
        raise CommandError(f"No site at {site.address}: {error}. Is it running?") from None
    except Refused as error:
        if error.status == 401 and not is_other:
            raise CommandError(
                f"The site at {site.address} does not take a key of this site's database, so it is another site, or "
                "uses another database. Run the command with that site's settings. Where the owner of another site "
                "has agreed: --other-site, with --key."
            ) from None
        raise CommandError(f"{site.address} answers {error.status} at /v1/models: {error}") from None
    except (ValueError, KeyError, TypeError):
        raise CommandError(f"{site.address} has no list of models at /v1/models. Is it a streamserve site?") from None
    default = found[0] if is_other else get_settings().default_model
    model = asked or default
    if model not in found:
        raise CommandError(f"The site has no model {model!r}. It has: {', '.join(found)}.")
    return model
