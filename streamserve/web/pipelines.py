"""The site's pipelines: found in `<app>/pipelines.py` of each installed app, and served beside its models.

And the output filters of its models, by the dotted paths of FILTERS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from channels.db import database_sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import autodiscover_modules, import_string

from streamserve.clients.base import EngineClient
from streamserve.clients.filtered import FilteredClient
from streamserve.clients.mcp.servers import McpServers
from streamserve.clients.pipeline.client import PIPELINES, PipelineClient
from streamserve.clients.pipeline.interrupts import Interrupts
from streamserve.clients.pipeline.journal import Memo
from streamserve.conf import ServedModel, SiteConfig
from streamserve.rows import orm
from streamserve.web.caller_rules import active_user


def find_pipelines() -> None:
    """Import the module `pipelines` of each installed app, which registers what it has."""
    autodiscover_modules("pipelines")


def pipeline_clients(
    settings: SiteConfig,
    models: Mapping[str, EngineClient],
    memo_of: Callable[[str], Memo | None],
    mcp: McpServers | None = None,
    interrupts: Interrupts | None = None,
) -> dict[str, EngineClient]:
    """Return a client for each registered pipeline. Raises ImproperlyConfigured if no request could reach it."""
    clients: dict[str, EngineClient] = {}
    for name, pipeline in PIPELINES.items():
        if name in models:
            raise ImproperlyConfigured(f"The pipeline {name!r} has the name of a model. Give it another name.")
        if pipeline.model and pipeline.model not in models:
            known = ", ".join(models)
            raise ImproperlyConfigured(f"The pipeline {name!r} uses the model {pipeline.model!r}; there are {known}.")
        clients[name] = PipelineClient(
            pipeline,
            models,
            default_model=settings.default_model,
            limits=settings.limits,
            call=_call_elsewhere,
            memo_of=memo_of,
            user_of=partial(orm.read, active_user),
            window_seconds=settings.streams.resume_window_seconds,
            mcp=mcp,
            interrupts=interrupts,
        )
    return clients


def filtered(model: ServedModel, client: EngineClient) -> EngineClient:
    """Return the client with the model's output filters. Raises ImproperlyConfigured for a path without a filter."""
    if not model.filters:
        return client
    try:
        makers = [import_string(path) for path in model.filters]
        for make in makers:
            make().flush()
    except Exception as error:
        message = f"FILTERS of the model {model.model.alias!r} cannot be made: {error}"
        raise ImproperlyConfigured(message) from error
    return FilteredClient(client, makers)


async def _call_elsewhere(function: Callable[..., object], *args: object, **options: object) -> object:
    """Run a synchronous function on a thread of its own, with Django's connections closed after it.

    Also inside `async_to_sync`, whose thread a function that asks the model would wait for.
    """
    return await database_sync_to_async(function, thread_sensitive=False, executor=orm.site_threads())(*args, **options)
