"""The order of the admin's lists of streams and jobs: without it each look at a million rows sorts them all.

On PostgreSQL the indexes are made while the tables are read and written.
"""

from __future__ import annotations

from typing import Any

from django.db import migrations, models


class AddIndexWithoutLock(migrations.AddIndex):
    """AddIndex, concurrently where the database can; an invalid index of an attempt that was cut off goes first."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Make the index."""
        model = to_state.apps.get_model(app_label, self.model_name)
        if schema_editor.connection.vendor != "postgresql" or not self.allow_migrate_model(
            schema_editor.connection.alias, model
        ):
            super().database_forwards(app_label, schema_editor, from_state, to_state)
            return
        schema_editor.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {schema_editor.quote_name(self.index.name)}")
        schema_editor.add_index(model, self.index, concurrently=True)


class Migration(migrations.Migration):
    """A second for a million streams."""

    atomic = False  # an index is not made concurrently inside a transaction

    dependencies = (("streamserve", "0003_conversation_search"),)

    operations = (
        AddIndexWithoutLock("stream", models.Index(fields=["created_at"], name="streamserve_streams_by_time")),
        AddIndexWithoutLock("job", models.Index(fields=["created_at"], name="streamserve_jobs_by_time")),
    )
