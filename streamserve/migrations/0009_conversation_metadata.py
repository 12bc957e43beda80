"""The metadata of `/v1/conversations`."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    """A column with a default of the database: no row is written."""

    dependencies = (("streamserve", "0008_rates"),)

    operations = (
        migrations.AddField(
            "conversation",
            "metadata",
            models.TextField(
                blank=True, db_default="", default="", editable=False, help_text="JSON: its caller's own notes."
            ),
        ),
    )
