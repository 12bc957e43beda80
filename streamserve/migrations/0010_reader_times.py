"""What a stream's reader measured, and the latency class whose budgets that is compared with."""

from __future__ import annotations

from django.db import migrations, models


class Migration(migrations.Migration):
    """Two columns that may be null: no row is written, and an earlier release may still insert."""

    dependencies = (("streamserve", "0009_conversation_metadata"),)

    operations = (
        migrations.AddField(
            "stream",
            "latency_class",
            models.CharField(editable=False, max_length=16, null=True, verbose_name="latency class"),
        ),
        migrations.AddField(
            "stream",
            "reader",
            models.JSONField(
                editable=False, help_text="What its reader measured, in seconds from its own sending.", null=True
            ),
        ),
    )
