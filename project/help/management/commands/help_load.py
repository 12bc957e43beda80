"""`manage.py help_load [FILE ...]`: load passages from data files into the help pages."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.exceptions import ValidationError
from django.core.management.base import BaseCommand, CommandError
from django.db import transaction

from project.help.knowledge_files import KNOWLEDGE, WrongFile, read_passages, save_passages, toml_files
from project.help.models import Passage, Topic


class Command(BaseCommand):
    """All or nothing: a file with a mistake changes nothing."""

    help = "Create or replace passages of the help pages from TOML files; without files, the demo's passages."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("paths", nargs="*", type=Path, help="TOML files, or folders of them")
        parser.add_argument("--only", action="store_true", help="remove every passage that the files do not have")

    def handle(self, *args: Any, paths: list[Path], only: bool, **options: Any) -> None:
        try:
            entries = list(read_passages(toml_files(paths or [KNOWLEDGE])))
            with transaction.atomic():
                number = save_passages(entries, Topic, Passage)
                if only:
                    Passage.objects.exclude(slug__in=[entry["slug"] for entry in entries]).delete()
                    Topic.objects.filter(passages=None).delete()
        except WrongFile as wrong:
            raise CommandError(str(wrong)) from None
        except ValidationError as invalid:
            raise CommandError("; ".join(invalid.messages)) from None
        self.stdout.write(f"{number} passages loaded; there are {Passage.objects.count()}.")
