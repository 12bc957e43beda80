"""`manage.py streamserve_models [MODEL ...]`: which models are loaded, supported, refused, and why; and what their chat
templates show.

It reads config.json and the tokenizer, asks running engines and servers elsewhere for their state, and loads no weights
and downloads nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
import textwrap
from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from django.core.management.base import BaseCommand

from streamserve.clients.process.client import ProcessClient
from streamserve.clients.process.config import EnginePathError, engine_paths, is_locked, prepare_folder
from streamserve.clients.remote.client import RemoteClient
from streamserve.clients.remote.config import RemoteConfig
from streamserve.clients.remote.server import RemoteServer
from streamserve.conf import ECHO_PATH, ServedModel, SiteConfig, get_settings
from streamserve.engine.config import EngineConfig, ModelConfig
from streamserve.protocol.engine import ModelDescription

_STATE_SECONDS = 10.0
_POLL_SECONDS = 0.05
_WIDTH = 100
_REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One model. `support` is "supported" (tests compare its answers), "tried at load", "refused", "embeddings", or
    where it is.

    `template` has what its chat template shows of a conversation; `upstreams` the state of each of its servers, where
    it has several.
    """

    name: str
    path: str
    model_type: str
    support: str
    state: str
    traits: tuple[str, ...] = ()
    reason: str = ""
    template: tuple[str, ...] = ()
    upstreams: tuple[str, ...] = ()


class Command(BaseCommand):
    """Lists models. The exit status is 1 where a model is refused."""

    help = "List the models of MODELS, or those named: which are loaded, supported or refused, and why."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("model", nargs="*", help="an alias of MODELS, a folder, or a hub id that was downloaded")
        parser.add_argument("--types", action="store_true", help="list the model types instead: supported, and refused")
        parser.add_argument("--json", action="store_true", help="for programs")

    def handle(self, *args: Any, model: list[str], types: bool, **options: Any) -> None:
        if types:
            found = _types()
            self.stdout.write(json.dumps(found, indent=2) if options["json"] else "\n".join(_type_lines(found)))
            return
        settings = get_settings()
        rows = asyncio.run(_rows(settings, model or [*settings.models, *settings.embedding_models]))
        listed = json.dumps([asdict(row) for row in rows], indent=2)
        self.stdout.write(listed if options["json"] else "\n".join(_lines(rows)))
        if any(row.support == _REFUSED for row in rows):
            sys.exit(1)


async def _rows(settings: SiteConfig, names: list[str]) -> list[Row]:
    return list(await asyncio.gather(*(_row(settings, name) for name in names)))


async def _row(settings: SiteConfig, name: str) -> Row:
    embedder = settings.embedding_models.get(name)
    if embedder is not None:
        return _embedding(name, embedder.model.path, state=await _state(settings, name))
    served = settings.models.get(name)
    if served is None:
        return _local(name, name, state="not in MODELS")
    if served.remote is not None:
        model, upstreams = await _elsewhere(served.remote)
        return Row(
            name=name,
            path="" if upstreams else served.remote.url,
            model_type=model.dtype,
            support="elsewhere",
            state=model.state,
            traits=(f"context of {model.max_model_len:,}",) if model.max_model_len else (),
            reason="" if upstreams else model.message,
            upstreams=upstreams,
        )
    if served.adapter_of:
        state, support = await _state(settings, served.adapter_of), f"adapter of {served.adapter_of}"
        return Row(name=name, path=served.model.path, model_type="", support=support, state=state)
    state = await _state(settings, name)
    if served.model.path == ECHO_PATH:
        return Row(name=name, path=ECHO_PATH, model_type="", support="without weights", state=state)
    return _local(name, served.model.path, state=state, served=served)


def _embedding(name: str, path: str, *, state: str) -> Row:
    """Return the row of an embedding model; whether it is supported is found when it is loaded."""
    support = "without weights" if path == ECHO_PATH else "embeddings"
    return Row(name=name, path=path, model_type="", support=support, state=state)


def _local(name: str, path: str, *, state: str, served: ServedModel | None = None) -> Row:
    """Return the row of a model that an engine of ours runs, or would run."""
    try:
        from streamserve.engine.model.load.loader import support_of
        from streamserve.engine.model.load.size import oversize
        from streamserve.engine.model.load.source import ModelLoadError, find, memory_for
        from streamserve.engine.text.hf_tokenizer import template_notes
    except ImportError as error:
        reason = f'{error.name} is not installed: pip install "streamserve[engine]"'
        return Row(name=name, path=path, model_type="", support=_REFUSED, state=state, reason=reason)
    served = served or ServedModel(model=ModelConfig(alias=name, path=path), engine=EngineConfig())
    found, folder, draft = support_of(path), find(path), served.model.draft
    is_here = folder is not None and found.verdict != _REFUSED
    if folder is not None and is_here:
        try:
            reason = oversize(served.model, served.engine, folder, memory_for(served.model.device))
        except ModelLoadError as error:
            reason = str(error)
        found = replace(found, verdict=_REFUSED, reason=reason) if reason else found
    return Row(
        name=name,
        path=path,
        model_type=found.model_type,
        support=found.verdict,
        state=state,
        traits=(*found.traits, *_draft_traits(path, draft)) if is_here and draft else found.traits,
        reason=found.reason,
        template=template_notes(str(folder), served.model.chat_template) if is_here else (),
    )


def _draft_traits(path: str, draft: str) -> tuple[str, ...]:
    """Return whether a draft model is supported, and what it adds to each block of the model's KV memory."""
    from streamserve.engine.capacity import UnknownShape, numbers_per_token
    from streamserve.engine.model.load.loader import IS_PROVEN, IS_TRIED, support_of
    from streamserve.engine.model.load.source import find, read_config

    found = support_of(draft)
    if found.verdict not in (IS_PROVEN, IS_TRIED):
        return (f"draft model {draft}: {found.verdict} ({found.reason})",)
    folders = [folder for folder in map(find, (path, draft)) if folder is not None]
    try:
        own, other = (numbers_per_token(read_config(folder)) for folder in folders)
    except UnknownShape:
        return (f"draft model {draft}: {found.verdict}",)
    return (f"draft model {draft}: {found.verdict}, {other / own:.0%} more KV memory in the model's dtype",)


async def _state(settings: SiteConfig, alias: str) -> str:
    """Return the state of the model's engine process; none is started."""
    if settings.client != "process":
        return "in each web process"
    config = settings.engine_spec(alias)
    try:
        prepare_folder(engine_paths(config))
        if not is_locked(engine_paths(config)):
            return "asleep" if config.is_lazy and config.autostart else "not running"
    except EnginePathError as error:
        return str(error)
    client = ProcessClient.visiting(config)
    client.start()
    try:
        async with asyncio.timeout(_STATE_SECONDS):
            while not client.is_connected:  # noqa: ASYNC110  (it has no event)
                await asyncio.sleep(_POLL_SECONDS)
        return _state_of(client.describe())
    except TimeoutError:
        return "does not answer"
    finally:
        await client.aclose()


def _state_of(model: ModelDescription) -> str:
    if model.state == "loading":
        return f"loading, {model.stage} {model.fraction:.0%}"
    state = f"{model.state} ({model.message})" if model.message else model.state
    return f"{state}, {model.dtype}, linear layers by {model.linears}" if model.linears else state


async def _elsewhere(config: RemoteConfig) -> tuple[ModelDescription, tuple[str, ...]]:
    """Return what servers elsewhere tell of their model, and the state of each, where it has several."""
    client = RemoteClient(config)
    client.start()
    try:
        async with asyncio.timeout(3 * config.connect_seconds):
            await asyncio.gather(*(server.is_known.wait() for server in client.servers))
    except TimeoutError:
        pass
    finally:
        found = client.describe()
        upstreams = tuple(map(_upstream, client.servers)) if len(client.servers) > 1 else ()
        await client.aclose()
    return found, upstreams


def _upstream(server: RemoteServer) -> str:
    model = server.description
    state = f"{model.state} ({model.message})" if model.message else model.state
    what = (model.dtype, f"weight {server.weight}", state)
    return f"{server.name} at {server.config.url}: {', '.join(filter(None, what))}"


def _lines(rows: list[Row]) -> Iterator[str]:
    table = [
        ("model", "type", "support", "state"),
        *((row.name, row.model_type, row.support, row.state) for row in rows),
    ]
    widths = [max(len(line[column]) for line in table) for column in range(3)]
    for line, row in zip(table, (None, *rows), strict=True):
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        yield "  ".join([*cells, line[3]]).rstrip()
        if row is not None:
            yield from (f"    {text}" for text in _notes(row))


def _notes(row: Row) -> Iterator[str]:
    if row.path not in ("", row.name):
        yield row.path
    for upstream in row.upstreams:
        yield from textwrap.wrap(upstream, _WIDTH, subsequent_indent="  ")
    if row.traits:
        yield ", ".join(row.traits)
    if row.template:
        yield from textwrap.wrap(f"chat template: {'; '.join(row.template)}", _WIDTH, subsequent_indent="  ")
    yield from textwrap.wrap(row.reason, _WIDTH)


def _types() -> dict[str, Any]:
    from streamserve.engine.model.load.support import PROVEN, REFUSED, WINDOWED

    return {
        "supported": sorted(PROVEN),
        "layers": sorted(WINDOWED),
        "refused": {reason: sorted(name for name in REFUSED if REFUSED[name] == reason) for reason in REFUSED.values()},
    }


def _type_lines(found: dict[str, Any]) -> Iterator[str]:
    yield "Supported: their answers are compared with transformers' own, token by token."
    yield from textwrap.wrap(", ".join(found["supported"]), _WIDTH, initial_indent="    ", subsequent_indent="    ")
    yield "Refused, as their answers would be wrong:"
    for reason, names in found["refused"].items():
        yield from textwrap.wrap(
            f"{', '.join(names)}: {reason}.", _WIDTH, initial_indent="    ", subsequent_indent="      "
        )
    layers = " and ".join(name.replace("_attention", "") for name in found["layers"])
    yield f"Refused too: layers other than {layers} attention, encoder-decoders, quantised checkpoints, and weights in"
    yield "any format but safetensors. Any other type of transformers is compared with plain attention at each load."
