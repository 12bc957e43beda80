"""The trace of the request that has made a job or a batch."""

from __future__ import annotations

from django.db import migrations, models

_COLUMN = {
    "blank": True,
    "db_default": "",
    "default": "",
    "editable": False,
    "help_text": "The header traceparent of the request that has made it.",
    "max_length": 55,
}


class Migration(migrations.Migration):
    """Columns with a default of the database: no row is written."""

    dependencies = (("streamserve", "0011_windows_by_their_end"),)

    operations = (
        migrations.AddField("batch", "traceparent", models.CharField(**_COLUMN)),
        migrations.AddField("job", "traceparent", models.CharField(**_COLUMN)),
    )
