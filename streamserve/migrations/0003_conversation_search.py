"""The index of the search in conversations: on PostgreSQL only, and made while the table is read and written."""

from __future__ import annotations

from typing import Any

from django.db import migrations

_NAME = "streamserve_messages_search"


def _make(apps: Any, schema_editor: Any) -> None:
    """Make the index; an invalid index of an attempt that was cut off goes first."""
    if schema_editor.connection.vendor == "postgresql":
        _drop(apps, schema_editor)
        schema_editor.execute(
            f"CREATE INDEX CONCURRENTLY {_NAME} ON streamserve_message "
            "USING gin (to_tsvector('simple'::regconfig, left(text, 100000)))"
        )


def _drop(apps: Any, schema_editor: Any) -> None:
    if schema_editor.connection.vendor == "postgresql":
        schema_editor.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {_NAME}")


class Migration(migrations.Migration):
    """See rows/conversation_lists.py."""

    atomic = False  # an index is not made concurrently inside a transaction

    dependencies = (("streamserve", "0002_conversations"),)

    operations = (migrations.RunPython(_make, _drop),)
