"""`daphne project.asgi:application`: the whole site, static files included while DEBUG is on.

In production a web server in front serves STATIC_ROOT (docs/deploy.md).
"""

from __future__ import annotations

import os

from django.core.asgi import get_asgi_application

from streamserve import routing

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
application = routing.wrap(get_asgi_application())
