"""docs/reference/settings.md: every key of `STREAMSERVE`, from the config classes of the code."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from docs.generate.meanings import annotations_of, meanings_of
from docs.generate.text import head, linked, table
from streamserve.asgi.flow.transport import FlowConfig
from streamserve.clients.mcp.config import McpConfig
from streamserve.clients.process.config import ProcessConfig
from streamserve.clients.remote.config import RemoteConfig, Upstream
from streamserve.conf import ServedEmbedder, ServedModel, SiteConfig, Webhook
from streamserve.engine.config import CLASSES, EmbedderConfig, EngineConfig, LatencyClass, ModelConfig
from streamserve.protocol.limits import Limits
from streamserve.protocol.requests import PREFILL_ONLY
from streamserve.streams.config import AttachmentConfig, BatchConfig, JobConfig, StreamConfig

_INTRO = """
Every key of the dict `STREAMSERVE`, with its default. [Settings](../settings.md) shows how to set them, and which of
them a site needs. Sizes are in bytes, times in seconds, unless the key's name has another unit. A number that is not
finite, or below 0, is refused.
"""
# Heading, class, what stands above the table.
_SECTIONS: tuple[tuple[str, type, str], ...] = (
    ("STREAMSERVE", SiteConfig, "The keys of the dict itself. Those that hold a dict of their own follow below."),
    ("MODELS", ModelConfig, "An entry whose model our engine runs. [Engines](../engines.md) has how engines are run."),
    (
        "MODELS elsewhere",
        RemoteConfig,
        "An entry with a `URL` in the place of `PATH`: [models elsewhere](../remote.md).",
    ),
    (
        "UPSTREAMS",
        Upstream,
        "An entry of `UPSTREAMS`: [several servers](../remote.md#several-servers). A key that it leaves out is "
        "as for the model.",
    ),
    (
        "EMBEDDING_MODELS",
        EmbedderConfig,
        "An entry: alias → an [embedding model](../embeddings.md).",
    ),
    ("ENGINE", EngineConfig, "For all models; a model's own `ENGINE` goes before it. [Engines](../engines.md)."),
    ("ENGINE_PROCESS", ProcessConfig, "What all engine processes of a site share."),
    ("CLASSES", LatencyClass, "Of each latency class: [latency classes](../classes.md) has what they do."),
    ("STREAMS", StreamConfig, "Times of streams and readers."),
    (
        "LIMITS",
        Limits,
        "Upper bounds, inclusive. The limits of a request's fields answer 400, a body over its limit 413.",
    ),
    ("JOBS", JobConfig, "How [jobs](../jobs.md) are run. Batches are run by the same workers."),
    ("WEBHOOKS", Webhook, "An entry, by the name that jobs use: [webhooks](../jobs.md#webhooks)."),
    ("MCP_SERVERS", McpConfig, "An entry, by the name that `run.mcp` takes: [MCP](../mcp.md#tools-from-mcp-servers)."),
    ("BATCHES", BatchConfig, "How [batches](../batches.md) are run."),
    ("ATTACHMENTS", AttachmentConfig, "Where [attachments](../conversations.md#attachments) are."),
    ("FLOW", FlowConfig, "What [FlowServer](../deploy.md#the-web-server) allows a connection."),
)
# Fields that are no keys: the name of an entry, and what is made of other keys or of constants.
_NO_KEYS = {
    ModelConfig: {"alias"},
    RemoteConfig: {"alias"},
    EmbedderConfig: {"alias"},
    EngineConfig: {"classes", "policy"},
    Webhook: {"name"},
    McpConfig: {"name"},
}
# The keys of an entry of MODELS that the site keeps beside the model's own.
_OF_ENTRIES = {
    "title": "TITLE",
    "system": "SYSTEM",
    "default_class": "LATENCY_CLASS",
    "permission": "PERMISSION",
    "filters": "FILTERS",
    "engine": "ENGINE",
}
_OF_EMBEDDERS = {"title": "TITLE", "permission": "PERMISSION"}
_ENTRIES: Mapping[type, tuple[type, Mapping[str, str]]] = {
    ModelConfig: (ServedModel, _OF_ENTRIES),
    EmbedderConfig: (ServedEmbedder, _OF_EMBEDDERS),
}
# Defaults that the code computes, and those of a first value.
_DEFAULTS = {
    (SiteConfig, "models"): "none, needed",
    (SiteConfig, "default_model"): "the first of `MODELS`",
    (SiteConfig, "engine_autostart"): "`None`",
    (SiteConfig, "chat_page"): '`"debug"`',
    (SiteConfig, "state_dir"): '`BASE_DIR / "state"`',
    (StreamConfig, "engine_wait_seconds"): '`60.0`, or `ENGINE_PROCESS["DRAIN_SECONDS"]` + 10 if that is longer',
    (ModelConfig, "answers"): "`{}`",
}
_TYPES = {
    "bool": "boolean",
    "int": "integer",
    "float": "number",
    "str": "text",
    "bytes": "text",
    "Permission": "text or function",
}


def page() -> str:
    """Return the page."""
    parts = [head("Reference: settings", _INTRO, "the config classes")]
    for heading, cls, text in _SECTIONS:
        rows = _class_table() if cls is LatencyClass else _table(cls)
        parts.append(f"\n## {heading}\n\n{text}\n\n{rows}")
    return "".join(parts)


def keys_without_meaning() -> list[str]:
    """Return the keys that have no string below them in the source."""
    return [
        f"{cls.__name__}.{name}"
        for _, cls, _ in _SECTIONS
        for name in _key_names(cls)
        if not meanings_of(cls).get(name)
    ]


def entry_keys_left_out() -> set[str]:
    """Return the fields of an entry of MODELS that are neither the model's own keys nor in its table."""
    ours = {"model", "remote", "adapter_of"}  # no keys
    return {field.name for field in dataclasses.fields(ServedModel)} - _OF_ENTRIES.keys() - ours


def _key_names(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls) if field.name not in _NO_KEYS.get(cls, set())]


def _table(cls: type) -> str:
    meanings, rows = meanings_of(cls), []
    for name in _key_names(cls):
        rows.append([f"`{name.upper()}`", _type(cls, name), _default(cls, name), linked(meanings[name])])
    if cls in _ENTRIES:
        entry, keys = _ENTRIES[cls]
        of_entry = meanings_of(entry)
        for name, key in keys.items():
            rows.append([f"`{key}`", _type(entry, name), _default(entry, name), linked(of_entry[name])])
    return table(["key", "type", "default", "meaning"], rows)


def _class_table() -> str:
    names = [name for name in CLASSES if name != PREFILL_ONLY]
    meanings, rows = meanings_of(LatencyClass), []
    for name in _key_names(LatencyClass):
        values = [f"`{getattr(CLASSES[of_class], name)}`" for of_class in names]
        rows.append([f"`{name.upper()}`", *values, linked(meanings[name])])
    return table(["key", *(f"`{name}`" for name in names), "meaning"], rows)


def _type(cls: type, name: str) -> str:
    words = [_TYPES.get(part.strip(), "") for part in annotations_of(cls)[name].split("|")]
    if known := [word for word in words if word]:
        return known[0]
    return "list" if annotations_of(cls)[name].startswith("tuple") else "dict"


def _default(cls: Any, name: str) -> str:
    if (cls, name) in _DEFAULTS:
        return _DEFAULTS[cls, name]
    [field] = [field for field in dataclasses.fields(cls) if field.name == name]
    value: Any = field.default
    if value is dataclasses.MISSING:
        return "`{}`" if field.default_factory is not dataclasses.MISSING or name == "engine" else "needed"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple):
        return "`[]`"
    return "`{}`" if isinstance(value, Mapping) else f"`{value}`"
