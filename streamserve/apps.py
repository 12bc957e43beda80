"""The Django app. `ready()` loads no model: it also runs for migrate, shell and the autoreload parent."""

from __future__ import annotations

from importlib.util import find_spec

from django.apps import AppConfig
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db.models.signals import post_delete

from streamserve.engine.model.openmp import limit_spin


class StreamserveConfig(AppConfig):
    """Put `streamserve` into INSTALLED_APPS; see docs/settings.md for `STREAMSERVE = {...}`."""

    name = "streamserve"
    verbose_name = "Streamserve"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        if find_spec("fcntl") is None:
            raise ImproperlyConfigured(
                "streamserve needs Unix: its processes share file locks and sockets. On Windows, run the site in WSL 2."
            )
        # OpenMP reads this when torch is imported: also by a view of the site, before a model is loaded.
        limit_spin()
        from streamserve import checks  # noqa: F401  (importing registers the checks)
        from streamserve.rows import attachments, responses, threads
        from streamserve.web.calls import view_errors
        from streamserve.web.pipelines import find_pipelines

        view_errors.install()
        for room in (attachments, responses, threads):
            uid = f"{room.__name__}.forget_user"
            post_delete.connect(room.forget_user, sender=settings.AUTH_USER_MODEL, dispatch_uid=uid)
        _install_flow_server()
        find_pipelines()


def _install_flow_server() -> None:
    """Make the `daphne` command and `runserver` serve by FlowServer, unless FLOW_SERVER is off."""
    from streamserve.asgi.flow.install import install
    from streamserve.conf import get_problems, get_settings

    if not get_problems() and get_settings().flow_server:
        install(get_settings().flow)
