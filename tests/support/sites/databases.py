"""The `DATABASES` of sites that tests serve on PostgreSQL."""

from __future__ import annotations

from typing import Any


def postgres_at(port: str, name: str = "postgres") -> dict[str, dict[str, Any]]:
    """Return the settings of a database of a `PostgresServer`."""
    engine = "django.db.backends.postgresql"
    return {"default": {"ENGINE": engine, "NAME": name, "USER": "postgres", "HOST": "127.0.0.1", "PORT": port}}
