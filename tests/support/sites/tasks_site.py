"""Settings: the demo site with Django's task framework, whose tasks are rows of the database."""

from __future__ import annotations

from project.settings import *  # noqa: F403
from project.settings import INSTALLED_APPS as DEMO_APPS

INSTALLED_APPS = [*DEMO_APPS, "django_tasks", "django_tasks_db", "tests.support.sites.tasks_app"]
TASKS = {"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}}
