"""`manage.py demo`, which `make run` calls: see project/serve.py."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from project import serve


class Command(BaseCommand):
    """Calls project/serve.py, which checks the site itself and prints one sentence for a problem."""

    help = "Prepare the demo site and serve it by daphne, with a login and an API key."
    requires_system_checks: list[str] = []  # noqa: RUF012  (Django's own declaration)

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--port", help="default: the variable PORT, else 8000")
        parser.add_argument("--host", help="default: the variable HOST, else 127.0.0.1")

    def handle(self, *args: Any, port: str | None, host: str | None, **options: Any) -> None:
        sys.exit(serve.main(host=host, port=port))
