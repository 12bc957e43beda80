"""`manage.py streamserve_export USER`: what streamserve keeps about a user, as one JSON object, to a file or stdout.

Row by row, so that it takes no more memory for a user with much. No secrets: of a key its name and prefix.
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, TextIO

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError
from django.core.serializers.json import DjangoJSONEncoder
from django.db.models import Model, QuerySet
from django.utils import timezone

from streamserve.models import (
    ApiKey,
    Attachment,
    Batch,
    Conversation,
    Job,
    Message,
    Share,
    StoredCompletion,
    StoredFile,
    StoredResponse,
    Stream,
    Watch,
)

_ROWS_AT_ONCE = 200
# Secrets, and how processes share the work.
_LEFT_OUT = frozenset(
    ("digest", "request_key", "request_digest", "marks", "fence", "producer", "log_id", "stored_as", "speaking")
)
_JSON = ("content", "messages", "metadata", "completion", "progress", "result")  # columns of JSON as text


class Command(BaseCommand):
    """Writes the export."""

    help = (
        "Write what streamserve keeps about a user as JSON: conversations with their messages, attachments, streams, "
        "stored completions, jobs, batches and their files by name, watches, and API keys without their secrets."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("user", metavar="USER", help="the user's name")
        parser.add_argument("--output", metavar="FILE", help="a new file; default: standard output")

    def handle(self, *args: Any, user: str, output: str | None, **options: Any) -> None:
        model = get_user_model()
        found = model._default_manager.filter(**{model.USERNAME_FIELD: user}).first()
        if found is None:
            raise CommandError(f"No user has the name {user!r}.")
        if output is None:
            write(self.stdout, found)  # type: ignore[arg-type]  # its wrapper writes text
            return
        try:
            with open(output, "x", encoding="utf-8") as file:
                write(file, found)
        except FileExistsError:
            raise CommandError(f"{output} exists. Name a new file.") from None
        except OSError as error:
            raise CommandError(f"{output} cannot be written: {error.strerror}.") from None
        sys.stderr.write(f"Wrote {output}.\n")


def write(out: TextIO, user: Any) -> None:
    """Write the export of a user, a row at a time."""
    about = {"user": user.get_username(), "id": user.pk, "exported_at": timezone.now()}
    out.write("{" + _text(about)[1:-1])
    for name, rows in tables_of(user):
        out.write(f",\n{json.dumps(name)}: [")
        for index, row in enumerate(rows):
            out.write(("," if index else "") + "\n" + _text(row))
        out.write("]")
    out.write("}\n")


def tables_of(user: Any) -> Iterator[tuple[str, Iterator[Mapping[str, Any]]]]:
    """Yield the name and the rows of each table."""
    tenant, pk = f"user:{user.pk}", user.pk
    yield "conversations", _conversations(tenant)
    tables: dict[str, QuerySet[Any]] = {
        "attachments": Attachment.objects.filter(tenant=tenant),
        "streams": Stream.objects.filter(tenant=tenant),
        "stored_completions": StoredCompletion.objects.filter(tenant=tenant),
        "stored_responses": StoredResponse.objects.filter(tenant=tenant),
        "jobs": Job.objects.filter(tenant=tenant),
        "batches": Batch.objects.filter(tenant=tenant),
        "files": StoredFile.objects.filter(tenant=tenant),
        "watches": Watch.objects.filter(watcher=tenant),
        "keys": ApiKey.objects.filter(user=pk),
    }
    for name, rows in tables.items():
        yield name, _rows(rows)


def _conversations(tenant: str) -> Iterator[Mapping[str, Any]]:
    """Yield conversations, deleted but not dropped yet included, each with its messages and share links."""
    for row in _rows(Conversation.objects.filter(tenant=tenant)):
        files: dict[str, list[str]] = {}
        through = Message.attachments.through.objects.filter(message__conversation=row["id"])
        for message_id, attachment_id in through.values_list("message_id", "attachment_id"):
            files.setdefault(message_id, []).append(attachment_id)
        messages = _rows(Message.objects.filter(conversation=row["id"]))
        shares = _rows(Share.objects.filter(conversation=row["id"]))
        with_files = [{**one, "attachments": files.get(one["id"], [])} for one in messages]
        yield {**row, "messages": with_files, "shares": list(shares)}


def _rows(rows: QuerySet[Any]) -> Iterator[Mapping[str, Any]]:
    """Yield rows as JSON values, the oldest first."""
    model: type[Model] = rows.model
    names = [field.attname for field in model._meta.concrete_fields if field.attname not in _LEFT_OUT]
    for row in rows.order_by("pk").values(*names).iterator(_ROWS_AT_ONCE):
        yield {name: _value(name, value) for name, value in row.items()}


def _value(name: str, value: Any) -> Any:
    if name in _JSON and isinstance(value, str) and value:
        with suppress(ValueError):
            return json.loads(value)
    return value


def _text(value: Any) -> str:
    return json.dumps(value, cls=DjangoJSONEncoder, ensure_ascii=False)
