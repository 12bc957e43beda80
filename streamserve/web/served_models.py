"""`ServedModels`: the clients of a site: models with their filters, pipelines, and embedding models, by alias.

A value; `open_models` opens the clients by the settings, and has them closed with the site.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

from streamserve.clients.adapter import AdapterClient
from streamserve.clients.base import EmbeddingClient, EngineClient
from streamserve.clients.mcp.servers import McpServers
from streamserve.clients.pipeline.interrupts import Interrupts
from streamserve.clients.pipeline.journal import Memo
from streamserve.conf import SiteConfig
from streamserve.web import resources
from streamserve.web.pipelines import filtered, pipeline_clients


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModels:
    """`clients` are models and pipelines, as requests name them; `engines` those with an engine of their own.

    The engines of the models in `shared` are in processes of their own, and report the same to each process of this
    host.
    """

    clients: Mapping[str, EngineClient]
    engines: Mapping[str, EngineClient]
    embedding: Mapping[str, EmbeddingClient]
    shared: frozenset[str]


def open_models(
    settings: SiteConfig,
    closing: AsyncExitStack,
    memo_of: Callable[[str], Memo | None],
    interrupts: Interrupts,
) -> ServedModels:
    """Make the clients that the settings name, and the connections to MCP servers that pipelines use."""
    mcp = McpServers(settings.mcp_servers)
    closing.push_async_callback(mcp.aclose)
    engines = {alias: resources.client_for(settings, alias) for alias in settings.engines}
    models = {
        alias: filtered(entry, AdapterClient(alias, engines[entry.adapter_of]) if entry.adapter_of else engines[alias])
        for alias, entry in settings.models.items()
    }
    clients = {**models, **pipeline_clients(settings, models, memo_of, mcp, interrupts)}
    embedding = {alias: resources.embedder_for(settings, alias) for alias in settings.embedding_models}
    for client in clients.values():
        closing.push_async_callback(client.aclose)
    for embedder in embedding.values():
        closing.push_async_callback(embedder.aclose)
    own = {*engines, *embedding}
    elsewhere = {alias for alias, entry in settings.models.items() if entry.remote is not None}
    apart = own if settings.client == "process" else set()
    return ServedModels(
        clients=clients,
        engines={alias: models[alias] for alias in engines},
        embedding=embedding,
        shared=frozenset({*clients, *embedding} - (own - apart) - elsewhere),
    )
