"""What responses (`/v1/responses`) keep beside their events. An empty table: no lock holds anything up."""

from __future__ import annotations

import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):
    """A new table."""

    dependencies = (("streamserve", "0005_threads"),)

    operations = (
        migrations.CreateModel(
            name="StoredResponse",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("tenant", models.CharField(editable=False, max_length=64, verbose_name="tenant")),
                ("head", models.TextField(blank=True, editable=False, help_text="JSON: what it repeats of its request.")),
                ("items", models.TextField(blank=True, editable=False, help_text="JSON: the items of its request.")),
                ("whole", models.TextField(blank=True, editable=False, help_text="JSON: the whole response.")),
                ("deleted_at", models.DateTimeField(editable=False, null=True, verbose_name="deleted")),
                (
                    "stream",
                    models.OneToOneField(
                        editable=False,
                        on_delete=django.db.models.deletion.CASCADE,
                        related_name="stored_response",
                        to="streamserve.stream",
                    ),
                ),
            ],
            options={"default_permissions": ()},
        ),
    )
