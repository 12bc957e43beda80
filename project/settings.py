"""The demo site's settings: everything works after a fresh clone, nothing secret is in the repository.

README has the settings for a site of your own, docs/deploy.md those for production.
Environment: STREAMSERVE_MODEL or MODEL (smollm2, a folder or a hub id), STREAMSERVE_DTYPE or DTYPE,
STREAMSERVE_STATE_DIR, ALLOWED_HOSTS, DEBUG=0; LAB=1 (the lab reads its text out beside any model) and
ECHO_STEP_SECONDS (how fast); STREAMSERVE_EMBEDDING or EMBEDDING (a folder or a hub id).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from project.packaged import path_of
from project.secret import read_or_make

BASE_DIR = Path(__file__).resolve().parent.parent
STATE_DIR = Path(os.environ.get("STREAMSERVE_STATE_DIR") or BASE_DIR / "state")
STATE_DIR.mkdir(mode=0o700, parents=True, exist_ok=True)

SECRET_KEY = read_or_make(STATE_DIR / "secret_key")
DEBUG = os.environ.get("DEBUG", "1") != "0"
ALLOWED_HOSTS = [host for host in os.environ.get("ALLOWED_HOSTS", "").split(",") if host]

INSTALLED_APPS = [
    "daphne",  # before staticfiles: its runserver streams
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "channels",
    "streamserve",
    "project",
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
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
ROOT_URLCONF = "project.urls"
ASGI_APPLICATION = "project.asgi.application"
WSGI_APPLICATION = "project.wsgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "project.context.assistant",
            ],
        },
    },
]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": STATE_DIR / "site.sqlite3",
        "OPTIONS": {
            "timeout": 20,
            "transaction_mode": "IMMEDIATE",
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL",
        },
    },
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
LOGIN_URL = "admin:login"
LANGUAGE_CODE = "en"
TIME_ZONE = "UTC"
USE_TZ = True
STATIC_URL = "/static/"
STATIC_ROOT = STATE_DIR / "static"

HELPDESK = BASE_DIR / "project" / "demo_model" / "helpdesk"


# The lab interrupts a long answer. The shipped help desk answers too briefly, and too fast to watch: the lab has an
# engine of its own beside it, which reads a text out. It computes no weights; scheduler, KV memory, log and readers are
# those of every model. A model of the environment answers in the lab itself, unless LAB is set.
LAB_ANSWERS = {"interrupt": (BASE_DIR / "project" / "lab" / "text.txt").read_text()}
LAB_QUESTION = "What happens when I interrupt you?"


def _models() -> dict[str, dict[str, Any]]:
    """Return MODELS: the model of the environment, else the help desk in the repository, else the echo engine."""
    asked = os.environ.get("STREAMSERVE_MODEL") or os.environ.get("MODEL")
    shipped = str(HELPDESK) if (HELPDESK / "config.json").exists() else "echo"
    path = asked or shipped
    alias = path.rstrip("/").rpartition("/")[2] or "model"
    dtype = os.environ.get("STREAMSERVE_DTYPE") or os.environ.get("DTYPE") or "auto"
    words: dict[str, Any] = {"ANSWERS": None} if path == "echo" else {}  # long answers, to watch and to test
    small = {"NUM_BLOCKS": 80, "LEAD_TOKENS": 96}  # so that one sees them
    reads_out: dict[str, Any] = {"PATH": "echo", "ANSWERS": LAB_ANSWERS, "ENGINE": small}
    lab = {"lab": reads_out} if os.environ.get("LAB") or (not asked and shipped != "echo") else {}
    return {alias: {"PATH": path_of(path), "DTYPE": dtype, **words}, **lab}


MODELS = _models()
LAB_MODEL = "lab" if "lab" in MODELS else next(iter(MODELS))
# How the assistant answers (project/help/assistant.py). "slots": the model gives the passages' own sentences, whose
# values are filled in; small models cannot copy them. "quotes": the model reads the passages and quotes from them.
_SMALL = {"helpdesk", "echo", "smollm2"}
HELP_ANSWERS = "slots" if _SMALL & set(MODELS) else "quotes"
# Whether the model answers what no page answers, marked so. The shipped model knows nothing else.
HELP_BESIDE_PAGES = not {"helpdesk", "echo"} & set(MODELS)
# An embedding model (docs/embeddings.md), by which the help pages are searched too: a folder or a hub id.
EMBEDDING = os.environ.get("STREAMSERVE_EMBEDDING") or os.environ.get("EMBEDDING") or ""
HELP_EMBEDDING = "search" if EMBEDDING else ""

STREAMSERVE = {
    "MODELS": MODELS,
    "EMBEDDING_MODELS": {HELP_EMBEDDING: {"PATH": EMBEDDING}} if EMBEDDING else {},
    "ECHO_STEP_SECONDS": float(os.environ.get("ECHO_STEP_SECONDS", "0.03" if LAB_MODEL == "lab" else "0")),
    "STATE_DIR": STATE_DIR,
    "ANONYMOUS": True,
    "CONVERSATIONS": True,
    "SHARE_LINKS": True,
    "TITLES": "words" if _SMALL & set(MODELS) else "model",  # the shipped model knows nothing but its help pages
    "FLOW": {"DRAIN_SECONDS": 2},  # Ctrl-C ends the demo soon
    "JOBS": {"EMBEDDED": True},  # without a second command
}

# The demo's conversations stay in its state folder.
SILENCED_SYSTEM_CHECKS = ["streamserve.W017"]

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {
        name: {"handlers": ["console"], "level": "INFO", "propagate": False} for name in ("django", "streamserve")
    },
}
