"""`manage.py streamserve_openapi`: the site's OpenAPI document, without a server; no engine is started for it."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError
from django.urls import NoReverseMatch, reverse

from streamserve.api.openapi.document import document, text_of
from streamserve.api.routes import CONVERTERS, ROUTES
from streamserve.clients.pipeline.client import PIPELINES
from streamserve.conf import get_settings
from streamserve.web.services import served_by

_MOST_SPACES = 8


class Command(BaseCommand):
    """Writes the document."""

    help = (
        "Write the site's OpenAPI document, as GET /openapi.json has it: the addresses that the site serves, with the "
        "fields of bodies and replies, and all its pipelines, also those that need a permission. Starts no engine."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--output", metavar="FILE", help="a file, written anew; default: standard output")
        parser.add_argument(
            "--indent",
            type=int,
            choices=range(_MOST_SPACES + 1),
            default=0,
            metavar="SPACES",
            help=f"spaces of an indent, 0 to {_MOST_SPACES}; default: 0, one line as the address has it",
        )

    def handle(self, *args: Any, output: str | None, indent: int, **options: Any) -> None:
        try:
            root = reverse("streamserve:openapi").removesuffix("openapi.json")
        except NoReverseMatch:
            raise CommandError('The site serves no route: add path("", include("streamserve.urls")).') from None
        settings = get_settings()
        shown = document(
            ROUTES,
            converters=CONVERTERS,
            served=served_by(settings),
            limits=settings.limits,
            root=root,
            pipelines=PIPELINES,
        )
        text = text_of(shown, indent or None)
        if output is None:
            self.stdout.write(text)
            return
        try:
            Path(output).write_text(f"{text}\n", encoding="utf-8")
        except OSError as error:
            raise CommandError(f"{output} cannot be written: {error.strerror}.") from None
        self.stderr.write(f"Wrote {output}.")
