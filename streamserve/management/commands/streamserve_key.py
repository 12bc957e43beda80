"""`manage.py streamserve_key create|list|revoke`: API keys from the terminal. A key is shown once, when it is made."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from datetime import timedelta
from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError
from django.db import IntegrityError, transaction
from django.utils import timezone

from streamserve.keys import is_well_formed
from streamserve.models import SCOPES, ApiKey
from streamserve.protocol.requests import LATENCY_CLASSES
from streamserve.web.model_names import complaint_about

_MAX_DAYS = 36_500  # a century; a date beyond the year 9999 is none


class Command(BaseCommand):
    """One method for each verb."""

    help = "Create, list and revoke API keys."

    def add_arguments(self, parser: ArgumentParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True, metavar="create|list|revoke")
        create = verbs.add_parser("create", help="make a key and show it, once")
        create.add_argument("--user", help="username of its owner; without an owner the key sees its own streams only")
        create.add_argument("--name", default="", help="what it is for")
        create.add_argument("--scope", action="append", choices=SCOPES, help="may be given twice; default: chat")
        create.add_argument(
            "--models",
            action="append",
            metavar="NAME",
            help="a model or pipeline that it may use; may be given again; default: all that its user may",
        )
        create.add_argument("--class", dest="latency_class", choices=LATENCY_CLASSES, help="of requests that name none")
        create.add_argument("--days", type=int, help="how long it is good for; default: until it is revoked")
        create.add_argument("--key", help="a key of your own: 16 to 128 of A-Z a-z 0-9 _ -")
        listing = verbs.add_parser("list", help="show the keys there are, without their secrets")
        listing.add_argument("--user", help="only this user's")
        revoke = verbs.add_parser("revoke", help="close a key for good")
        revoke.add_argument("named", metavar="key", help="its id or prefix, as `list` shows them, or the whole key")

    def handle(self, *args: Any, verb: str, **options: Any) -> None:
        getattr(self, f"_{verb}")(**options)

    def _create(self, *, user: str | None, name: str, scope: list[str] | None, **options: Any) -> None:
        own_key, days = options["key"], options["days"]
        if own_key is not None and not is_well_formed(own_key):
            raise CommandError("A key has 16 to 128 characters of A-Z a-z 0-9 _ - . Without --key a key is made.")
        if days is not None and not 1 <= days <= _MAX_DAYS:
            raise CommandError(f"--days is 1 to {_MAX_DAYS}. Leave it away for a key that stays.")
        if complaint := complaint_about(options["models"] or ()):
            raise CommandError(complaint)
        fields = {
            "allowed_models": list(dict.fromkeys(options["models"] or ())),
            "name": name,
            "user": _user(user) if user else None,
            "scopes": sorted(set(scope or ["chat"])),
            "latency_class": options["latency_class"],
            "expires_at": timezone.now() + timedelta(days=days) if days else None,
        }
        try:
            with transaction.atomic():
                _row, key = ApiKey.objects.make(own_key, **fields)
        except IntegrityError:
            raise CommandError("There is such a key already (perhaps revoked). Choose another.") from None
        self.stderr.write("Keep it safe: it is shown only once.")
        self.stdout.write(key)

    def _list(self, *, user: str | None, **options: Any) -> None:
        keys = ApiKey.objects.select_related("user")
        rows = [_columns(row) for row in (keys.filter(user=_user(user)) if user else keys)]
        if not rows:
            self.stdout.write("No keys. Make a key: manage.py streamserve_key create --name laptop")
            return
        table = [("id", "prefix", "state", "user", "scopes", "models", "last used", "name"), *rows]
        widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
        for row in table:
            line = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
            self.stdout.write(line.rstrip())

    def _revoke(self, *, named: str, **options: Any) -> None:
        active = ApiKey.objects.filter(revoked_at=None)
        key = ApiKey.objects.find_active(named)
        found = active.filter(pk=key.pk) if key else active.filter(prefix=named.removesuffix("…"))
        if not found and re.fullmatch("[0-9]{1,18}", named):
            found = active.filter(pk=int(named))
        if found.count() > 1:
            raise CommandError("Several keys have this prefix. Give a key's id: manage.py streamserve_key list")
        if not found.revoke():
            raise CommandError("No active key has this id or prefix. See: manage.py streamserve_key list")
        self.stdout.write("Revoked. Answers that run on it end within half a minute.")


def _user(name: str) -> Any:
    manager = get_user_model()._default_manager
    try:
        return manager.get_by_natural_key(name)
    except get_user_model().DoesNotExist:
        raise CommandError(f"There is no user {name!r}. Make the user: manage.py createsuperuser") from None


def _columns(row: ApiKey) -> tuple[str, ...]:
    used = row.last_used_at.strftime("%Y-%m-%d %H:%M") if row.last_used_at else "never"
    owner = row.user.get_username() if row.user else "-"
    models = ",".join(row.allowed_models) or "all"
    return str(row.pk), row.prefix, row.state, owner, ",".join(row.scopes), models, used, row.name
