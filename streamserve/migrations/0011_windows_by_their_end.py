"""Windows of limits over time by their ends; what an answer holds of them in its own row."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    """Windows begin anew, so answers that run meanwhile have nothing to give back."""

    dependencies = (("streamserve", "0010_reader_times"),)

    operations = (
        migrations.DeleteModel("RateHold"),
        migrations.RemoveField("ratewindow", "started_at"),
        migrations.AddField(
            "ratewindow",
            "ends_at_ms",
            models.BigIntegerField(db_index=True, default=0, editable=False),
            preserve_default=False,
        ),
        migrations.AddField(
            "stream",
            "held",
            models.TextField(
                editable=False, help_text="The tokens that it held of limits over time while it ran.", null=True
            ),
        ),
    )
