"""Load the demo's passages into the empty tables, once: what is edited or removed later stays so."""

from __future__ import annotations

from typing import Any

from django.db import migrations

from project.help.knowledge_files import KNOWLEDGE, read_passages, save_passages, toml_files


def load(apps: Any, schema_editor: Any) -> None:
    save_passages(
        read_passages(toml_files([KNOWLEDGE])), apps.get_model("help", "Topic"), apps.get_model("help", "Passage")
    )


class Migration(migrations.Migration):
    dependencies = [("help", "0001_initial")]

    operations = [migrations.RunPython(load, migrations.RunPython.noop)]
