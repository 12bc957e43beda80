"""Settings of the tests: a small site with the echo engine, and a database in a file for other processes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

BASE_DIR = Path(tempfile.gettempdir()) / f"streamserve-tests-{os.getpid()}"  # made by who needs it
_DATABASE = BASE_DIR.with_suffix(".sqlite3")

SECRET_KEY = "tests only"
DEBUG = False
ALLOWED_HOSTS = ["127.0.0.1", "localhost", "testserver"]
INSTALLED_APPS = [
    "daphne",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "channels",
    "streamserve",
    "project.help",
    "project.lab",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
ROOT_URLCONF = "tests.site.urls"
ASGI_APPLICATION = "streamserve.routing.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": _DATABASE,
        "TEST": {"NAME": _DATABASE},
        "OPTIONS": {
            "timeout": 20,
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
        },
    },
}
if os.environ.get("STREAMSERVE_TEST_POSTGRES"):  # the port of tests/support/servers/postgres_server.py
    DATABASES["default"] = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "streamserve",
        "USER": "postgres",
        "HOST": "127.0.0.1",
        "PORT": os.environ["STREAMSERVE_TEST_POSTGRES"],
    }
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]  # fast; passwords are not what is tested
STATIC_URL = "/static/"
USE_TZ = True

STREAMSERVE = {"TESTING": True, "PROMPT_IN_URL": True}
