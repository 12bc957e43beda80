"""Load the passages that say what Quillbox is and costs, where an older demo has loaded its knowledge without them."""

from __future__ import annotations

from typing import Any

from django.db import migrations

from project.help.knowledge_files import KNOWLEDGE, read_passages, save_passages


def load(apps: Any, schema_editor: Any) -> None:
    """Add those that are not there."""
    topic, passage = apps.get_model("help", "Topic"), apps.get_model("help", "Passage")
    there = set(passage.objects.values_list("slug", flat=True))
    entries = [entry for entry in read_passages([KNOWLEDGE / "welcome.toml"]) if entry["slug"] not in there]
    save_passages(entries, topic, passage)


class Migration(migrations.Migration):
    """Data only. Backwards it keeps them."""

    dependencies = [("help", "0002_load_knowledge")]  # noqa: RUF012  (Django's own declaration)
    operations = [migrations.RunPython(load, migrations.RunPython.noop)]  # noqa: RUF012
