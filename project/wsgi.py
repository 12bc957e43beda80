"""WSGI serves the admin and ordinary pages; the streaming routes answer 503 `asgi_required`."""

import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
application = get_wsgi_application()
