"""The Django app. `ready()` loads no model: it also runs for migrate, shell and the autoreload parent."""

from __future__ import annotations

from django.apps import AppConfig


class StreamserveConfig(AppConfig):
    """Put `streamserve` into INSTALLED_APPS; see docs/settings.md for `STREAMSERVE = {...}`."""

    name = "streamserve"
    verbose_name = "Streamserve"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from streamserve import checks  # noqa: F401  (importing registers the checks)
