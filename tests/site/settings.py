"""A site that makes life hard: every request in a transaction, a login everywhere, compression, sync middleware."""

from __future__ import annotations

from tests.settings import *  # noqa: F403  (the same site, made stricter)
from tests.settings import DATABASES, MIDDLEWARE, STREAMSERVE

DATABASES = {"default": {**DATABASES["default"], "ATOMIC_REQUESTS": True}}
MIDDLEWARE = [
    "django.middleware.gzip.GZipMiddleware",
    "django.middleware.http.ConditionalGetMiddleware",
    "tests.site.middleware.SyncMiddleware",
    *MIDDLEWARE,
    "django.contrib.auth.middleware.LoginRequiredMiddleware",
]
STREAMSERVE = {**STREAMSERVE, "CONVERSATIONS": True, "SHARE_LINKS": True, "TITLES": "words"}
