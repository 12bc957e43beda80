"""The Django app of the help pages."""

from __future__ import annotations

from django.apps import AppConfig


class HelpConfig(AppConfig):
    """Passages, their pages, their search, and the assistant that answers from them."""

    name = "project.help"
    label = "help"
    verbose_name = "Help pages"
    default_auto_field = "django.db.models.BigAutoField"
