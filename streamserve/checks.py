"""System checks: each mistake has an id and a hint. docs/checks.md lists them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from inspect import iscoroutinefunction
from pathlib import Path
from shutil import which
from typing import Any
from urllib.parse import urlsplit

from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage, Error, Warning, register
from django.core.files.storage import InvalidStorageError, storages
from django.db import DatabaseError
from django.shortcuts import resolve_url
from django.urls import NoReverseMatch, Resolver404, resolve, reverse
from django.utils.module_loading import import_string

from streamserve.clients.pipeline.client import PIPELINES
from streamserve.clients.process.memory import too_large
from streamserve.clients.remote.config import read_key
from streamserve.conf import ECHO_PATH, LOG_SCHEMES, ServedModel, SiteConfig, get_problems, get_settings
from streamserve.engine.capacity import GIB
from streamserve.engine.config import EngineConfig
from streamserve.native.build import find, obstacle
from streamserve.native.levels import best_level
from streamserve.protocol.permissions import PERMISSION_HINT, WORDS, is_path
from streamserve.streams.lease.liveness import host_of, own_host

_GGUF = ".gguf"
_ENGINE_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors")
_WRAP = "application = streamserve.routing.wrap(application)"
_MAX_WRAPPERS = 20  # layers of middleware around an application
# sqlite.org/fileformat.html 1.3: the byte at 18 is 2 for a file in WAL mode.
_SQLITE_WRITE_VERSION, _SQLITE_HEADER_BYTES = 18, 100
_PROBLEM_IDS = {"key": "streamserve.E001", "value": "streamserve.E002", "missing": "streamserve.E003"}


@register()
def check_settings(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """E001 unknown key, E002 wrong value, E003 missing value; then the checks of models, memory, servers and log."""
    problems = get_problems()
    if problems:
        return [Error(one.message, hint=one.hint, id=_PROBLEM_IDS[one.kind]) for one in problems]
    conf = get_settings()
    return [
        *_check_models(conf),
        *_check_adapters(conf),
        *_check_embedders(conf),
        *_check_native(conf),
        *_check_memory(conf),
        *_check_budget(conf),
        *_check_sizes(conf),
        *_check_remote(conf),
        *_check_log(conf),
        *_check_folders(conf),
        *_check_storage(conf),
        *_check_anonymous(conf),
        *_check_conversations(conf),
        *_check_permissions(conf),
        *_check_tenant(conf),
        *_check_moderation(conf),
        *_check_mcp(conf),
        *_check_tracing(conf),
    ]


@register()
def check_site(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """Check the site around streamserve: ASGI application, routes, server, middleware."""
    return [
        *_check_asgi(),
        *_check_urls(),
        *_check_login(),
        *_check_daphne(),
        *_check_flow_server(),
        *_check_uvicorn(),
        *_check_middleware(),
    ]


@register()
def check_databases(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """W006: persistent connections stay with threads that ASGI does not reuse."""
    return [
        Warning(
            f"DATABASES[{alias!r}] keeps connections (CONN_MAX_AGE), which pile up under ASGI.",
            hint="Set CONN_MAX_AGE to 0, or use the database backend's own pool.",
            id="streamserve.W006",
        )
        for alias, options in settings.DATABASES.items()
        if options.get("CONN_MAX_AGE", 0) != 0
    ]


@register(deploy=True)
def check_sqlite(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """W012: a SQLite file without WAL, in which one writer keeps every reader out."""
    return [
        Warning(
            f"DATABASES[{alias!r}] is SQLite without WAL: processes that write at a time fail with "
            '"database is locked".',
            hint='"OPTIONS": {"transaction_mode": "IMMEDIATE",'
            ' "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL"}',
            id="streamserve.W012",
        )
        for alias, options in settings.DATABASES.items()
        if str(options.get("ENGINE")).endswith(".sqlite3") and _lacks_wal(options)
    ]


def _lacks_wal(options: Mapping[str, Any]) -> bool:
    """Return whether the options do not ask for WAL and the file, if it exists, is not in WAL mode."""
    if "wal" in str(options.get("OPTIONS", {}).get("init_command", "")).lower():
        return False
    try:
        with open(options["NAME"], "rb") as file:
            header = file.read(_SQLITE_HEADER_BYTES)
    except OSError:  # in memory, or not made yet
        return "memory" not in str(options["NAME"])
    return header[_SQLITE_WRITE_VERSION : _SQLITE_WRITE_VERSION + 1] != b"\x02"


@register(deploy=True)
def check_redis(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """W009: the Redis of the log loses answers when it is restarted or full, or cannot be reached."""
    if get_problems() or not get_settings().log.startswith(LOG_SCHEMES) or find_spec("redis") is None:
        return []
    return [
        Warning(
            complaint,
            hint="In redis.conf: appendonly yes, appendfsync always, maxmemory-policy noeviction.",
            id="streamserve.W009",
        )
        for complaint in asyncio.run(_complaints(get_settings()))
    ]


@register(deploy=True)
def check_hosts(app_configs: Any, **kwargs: Any) -> list[CheckMessage]:
    """W010: several hosts with a file log, by the workers in the database's rows."""
    if get_problems() or get_settings().log != "file":
        return []
    from streamserve.models import Stream  # models are not loaded when this module is imported
    from streamserve.web.resources import workers_folder

    folder = workers_folder(get_settings())
    try:
        own = own_host(folder) if (folder / "host").exists() else ""  # a check creates no folder
        producers = list(Stream.objects.producers())
    except (DatabaseError, OSError):
        return []
    foreign = {host_of(producer) for producer in producers} - {own, ""}
    if not foreign:
        return []
    return [
        Warning(
            f"Answers run on other hosts ({', '.join(sorted(foreign))}), and the log of each is a file of its own: no "
            "host can show or resume the answers of another.",
            hint='Set "LOG": "redis://..." on all hosts, or one STATE_DIR for all processes of one machine.',
            id="streamserve.W010",
        )
    ]


async def _complaints(conf: SiteConfig) -> list[str]:
    from streamserve.web.resources import check_log, log_for  # imports the models

    event_log = log_for(conf)
    try:
        return await check_log(event_log)
    finally:
        await event_log.aclose()


def _check_storage(conf: SiteConfig) -> Iterator[CheckMessage]:
    """E011: the storage of private files is no alias. W013: it is in the folder that sites serve at MEDIA_URL."""
    of = {
        "BATCHES": ("files of batches", conf.batches.storage),
        "ATTACHMENTS": ("attachments", conf.attachments.storage),
    }
    for key, (files, alias) in of.items():
        if not alias:
            continue
        try:
            location = getattr(storages[alias], "location", None)
        except (InvalidStorageError, ImportError) as error:
            hint = f"It takes an alias of STORAGES: {', '.join(settings.STORAGES)}."
            yield Error(f'STREAMSERVE["{key}"]["STORAGE"] is {alias!r}: {error}', hint=hint, id="streamserve.E011")
            continue
        media = settings.MEDIA_ROOT and Path(settings.MEDIA_ROOT).resolve()
        if media and location and Path(location).resolve().is_relative_to(media):
            yield Warning(
                f"The {files} are in MEDIA_ROOT, by STORAGES[{alias!r}]: they are private, and sites serve it.",
                hint=f'Give them a storage of their own, or leave {key}["STORAGE"] out.',
                id="streamserve.W013",
            )


def _check_models(conf: SiteConfig) -> Iterator[CheckMessage]:
    """E004: packages that a local model needs are missing. E005: its folder or file is, or cannot be read."""
    own = {alias: entry.model for alias, entry in conf.models.items() if is_local(entry)}
    local = {f"model {alias!r}": model.path for alias, model in own.items()}
    embedders = conf.embedding_models.items()
    local |= {f"model {alias!r}": one.model.path for alias, one in embedders if one.model.path != ECHO_PATH}
    drafts = {f"draft model of {alias!r}": model.draft for alias, model in own.items() if model.draft}
    absent = [name for name in _ENGINE_PACKAGES if find_spec(name) is None]
    if local and absent:
        yield Error(
            f"The {next(iter(local))} needs packages that are not installed: {', '.join(absent)}.",
            hint='pip install "streamserve[engine]", or set its PATH to "echo" for an engine without weights.',
            id="streamserve.E004",
        )
    for what, path in {**local, **drafts}.items():
        if not is_folder_like(path) or (Path(path).expanduser() / "config.json").is_file():
            continue
        if Path(path).expanduser().is_file() and path.endswith(_GGUF):
            yield from _check_gguf(what, Path(path).expanduser())
            continue
        if Path(path).expanduser().is_dir():
            message = f"The folder {path} of the {what} has no config.json."
        else:
            message = f"The {what} has no folder at {path}."
        yield Error(
            message,
            hint="Give the folder with config.json and *.safetensors, a .gguf file, or a hub id such as org/name.",
            id="streamserve.E005",
        )


def _check_adapters(conf: SiteConfig) -> Iterator[CheckMessage]:
    """E020: an adapter's folder is missing, or has no adapter that can be computed."""
    from streamserve.engine.model.load.adapter_config import read_adapter_config
    from streamserve.engine.model.load.errors import ModelLoadError

    for alias, entry in conf.models.items():
        for name, path in entry.model.adapters.items() if is_local(entry) else ():
            try:
                read_adapter_config(Path(path).expanduser())
            except ModelLoadError as error:
                yield Error(
                    f"The adapter {name!r} of the model {alias!r} cannot be loaded.",
                    hint=str(error),
                    id="streamserve.E020",
                )


def _check_embedders(conf: SiteConfig) -> Iterator[CheckMessage]:
    """E016: the package sentence-transformers, which an embedding model needs, is missing."""
    for alias, entry in conf.embedding_models.items():
        is_theirs = (Path(entry.model.path).expanduser() / "modules.json").is_file()
        if is_theirs and find_spec("sentence_transformers") is None:
            yield Error(
                f"The embedding model {alias!r} needs sentence-transformers, which is not installed.",
                hint='pip install "streamserve[embeddings]"',
                id="streamserve.E016",
            )


def _check_native(conf: SiteConfig) -> Iterator[CheckMessage]:
    """W015: a model is to run on a CPU without the native kernels."""
    on_cpu = [alias for alias, entry in conf.models.items() if is_local(entry) and _wants_kernels(entry)]
    why = obstacle(best_level()) if on_cpu else None
    if on_cpu and why is None and conf.client != "process" and find(best_level()) is None:
        why = "they are not compiled yet, and a web process does not compile them"
    if why is not None:
        yield Warning(
            f"The native kernels are off for the model {on_cpu[0]!r}: {why}.",
            hint="On a CPU an answer takes several times as long without them. Install g++ and run python -m "
            'streamserve.native.build, or say "NATIVE": False in MODELS to do without.',
            id="streamserve.W015",
        )


def _wants_kernels(entry: ServedModel) -> bool:
    has_gpu = Path("/dev/nvidiactl").exists()
    return entry.model.native and (entry.model.device == "cpu" or (entry.model.device == "auto" and not has_gpu))


def _check_gguf(what: str, path: Path) -> Iterator[CheckMessage]:
    from streamserve.engine.model.load.errors import ModelLoadError
    from streamserve.engine.model.load.gguf.config import config_of
    from streamserve.engine.model.load.gguf.file import GGUFFile

    try:
        config_of(GGUFFile(path))
    except ModelLoadError as error:
        yield Error(f"The {what} cannot be loaded.", hint=str(error), id="streamserve.E005")


def _check_remote(conf: SiteConfig) -> Iterator[CheckMessage]:
    """E009: httpx, which models with a URL need, is missing. E010: the variable of a server's key is not set."""
    remotes = [entry.remote for entry in conf.models.values() if entry.remote is not None]
    if remotes and find_spec("httpx") is None:
        yield Error(
            f"The model {remotes[0].alias!r} runs on a server elsewhere, and the package httpx is not installed.",
            hint='pip install "streamserve[remote]"',
            id="streamserve.E009",
        )
    servers = [config for remote in remotes for _, config in remote.servers]
    keys = {(config.alias, config.api_key_env): read_key(config) for config in servers if config.api_key_env}
    for (alias, variable), key in keys.items():
        if not key:
            yield Error(
                f"The environment has no {variable}, which the model {alias!r} takes its key from.",
                hint=f"Set {variable} for the web processes, or take API_KEY_ENV out.",
                id="streamserve.E010",
            )


def is_local(entry: ServedModel) -> bool:
    """Return whether an engine of ours has to load the model's weights."""
    return entry.remote is None and entry.model.path != ECHO_PATH and not entry.adapter_of


def _check_memory(conf: SiteConfig) -> Iterator[CheckMessage]:
    """W007: the engines together take more memory than the machine has. Each sizes itself alone."""
    local = [entry for entry in conf.models.values() if is_local(entry)]
    shares = [entry.engine.memory_share for entry in local if entry.engine.memory_share is not None]
    num_greedy = sum(entry.model.device == "cuda" and _has_no_bound(entry.engine) for entry in local)
    has_budget = conf.client == "process" and conf.engine_process.memory_bytes is not None
    if len(local) > 1 and not has_budget and (sum(shares) > 1 or num_greedy > 1):
        yield Warning(
            f"{len(local)} models share the memory of this machine, and want more than there is.",
            hint='Give each its part, for example "ENGINE": {"MEMORY_SHARE": 0.4}.',
            id="streamserve.W007",
        )


def _check_budget(conf: SiteConfig) -> Iterator[CheckMessage]:
    """E019: a model takes more memory than all engines have. W018: engines in web processes have no budget. W020: it is
    more than there is.
    """
    budget = conf.engine_process.memory_bytes
    if not conf.engine_process.is_lazy or conf.testing:
        return
    if conf.client != "process":
        yield Warning(
            'MEMORY_BYTES and SLEEP_AFTER_SECONDS are for engine processes, and CLIENT is "thread".',
            hint='Take them out of ENGINE_PROCESS, or set "CLIENT": "process".',
            id="streamserve.W018",
        )
        return
    if budget is None:
        return
    from streamserve.engine.model.load.source import total_memory

    limit = total_memory()
    if budget > limit:
        yield Warning(
            f"MEMORY_BYTES is {budget / GIB:,.2f} GiB, and this machine, or its container, has {limit / GIB:,.2f} GiB.",
            hint="Engines on a CPU that web processes start share what there is. Lower MEMORY_BYTES.",
            id="streamserve.W020",
        )
    for alias, num_bytes in _needs(conf, budget):
        if num_bytes > budget:
            yield Error(
                f"The model {alias!r} can never be loaded.",
                hint=too_large(alias, num_bytes, budget, sys.maxsize),
                id="streamserve.E019",
            )


def _check_sizes(conf: SiteConfig) -> Iterator[CheckMessage]:
    """W021: without MEMORY_BYTES, a model's weights are more than this machine has."""
    if conf.testing or (conf.client == "process" and conf.engine_process.memory_bytes is not None):
        return
    from streamserve.engine.model.load.errors import ModelLoadError
    from streamserve.engine.model.load.size import oversize
    from streamserve.engine.model.load.source import memory_for

    for alias, entry in conf.models.items():
        folder = Path(entry.model.path).expanduser()
        if is_local(entry) and folder.exists():
            with suppress(ModelLoadError, OSError):
                if reason := oversize(entry.model, entry.engine, folder, memory_for(entry.model.device)):
                    yield Warning(
                        f"The model {alias!r} cannot be loaded on this machine.", hint=reason, id="streamserve.W021"
                    )


def _needs(conf: SiteConfig, budget: int) -> Iterator[tuple[str, int]]:
    """Yield what the engine of each model takes whose files are here and can be read."""
    from streamserve.engine.model.load.errors import ModelLoadError
    from streamserve.engine.model.load.size import embedder_bytes, sized

    for alias, entry in conf.models.items():
        folder = Path(entry.model.path).expanduser()
        if is_local(entry) and folder.exists():
            with suppress(ModelLoadError, OSError):
                yield alias, sized(entry.model, entry.engine, folder, budget)[0]
    for alias, embedder in conf.embedding_models.items():
        folder = Path(embedder.model.path).expanduser()
        if embedder.model.path != ECHO_PATH and folder.is_dir():
            with suppress(ModelLoadError, OSError):
                yield alias, embedder_bytes(embedder.model, folder)


def _has_no_bound(engine: EngineConfig) -> bool:
    return engine.memory_share is None and engine.kv_cache_bytes is None and engine.num_blocks is None


def _check_log(conf: SiteConfig) -> Iterator[CheckMessage]:
    """E008: the package that a log in Redis needs is missing."""
    if conf.log.startswith(LOG_SCHEMES) and find_spec("redis") is None:
        yield Error(
            'STREAMSERVE["LOG"] is a Redis, and the package redis is not installed.',
            hint='pip install redis, or set "LOG": "file".',
            id="streamserve.E008",
        )


def _check_folders(conf: SiteConfig) -> Iterator[CheckMessage]:
    """W019: a folder that answers or engines are written to cannot be written to by this user."""
    folders = {}
    if conf.log == "file" or conf.client == "process":
        folders['STREAMSERVE["STATE_DIR"]'] = conf.state_dir
    if conf.client == "process":
        folders['STREAMSERVE["ENGINE_PROCESS"]["RUNTIME_DIR"]'] = conf.engine_process.runtime_dir
    for name, folder in folders.items():
        why = _why_unwritable(Path(folder)) or _another_users(conf, Path(folder)) if folder else ""
        if why:
            yield Warning(
                f"{name} is {folder}: {why}.",
                hint="Answers are refused until the user of the web processes and engines can write there.",
                id="streamserve.W019",
            )


def _why_unwritable(folder: Path) -> str:
    """Return why this user can neither write to the folder nor make it, or ""."""
    try:
        found = next(path for path in (folder, *folder.parents) if path.exists())
        if not found.is_dir():
            return f"{found} is a file"
        if not os.access(found, os.W_OK | os.X_OK):
            return f"this user may not write to {found}"
        return "" if os.statvfs(found).f_bavail else f"the disk of {found} is full"
    except OSError as error:
        return f"{error.strerror} ({error.filename})"


def _another_users(conf: SiteConfig, folder: Path) -> str:
    """Return which of our files in STATE_DIR this user may not write to, as another user has made them; or ""."""
    if str(folder) != conf.state_dir or not folder.is_dir():
        return ""
    found = (entry for entry in sorted(folder.iterdir()) if not entry.name.startswith("."))
    return next((f"this user may not write to {entry}" for entry in found if not os.access(entry, os.W_OK)), "")


def is_folder_like(path: str) -> bool:
    """Return whether `path` is a folder rather than a hub id (one slash, neither `.` nor `/` in front)."""
    return path.startswith(("/", ".", "~")) or path.count("/") > 1 or "\\" in path or path.endswith(_GGUF)


def _check_anonymous(conf: SiteConfig) -> Iterator[CheckMessage]:
    if conf.anonymous and not settings.DEBUG:
        yield Warning(
            'STREAMSERVE["ANONYMOUS"] is on and DEBUG is off: visitors without a login may use the model.',
            hint="Turn it off and let people sign in, or put a rate limit in front.",
            id="streamserve.W005",
        )


def _check_permissions(conf: SiteConfig) -> Iterator[CheckMessage]:
    """E012: a PERMISSION names a function that is none, or a permission of an app that is not installed."""
    given = {f"PERMISSION of the model {alias!r}": entry.permission for alias, entry in conf.models.items()}
    given |= {f"PERMISSION of the model {alias!r}": one.permission for alias, one in conf.embedding_models.items()}
    given |= {f"permission of the pipeline {name!r}": one.permission for name, one in PIPELINES.items()}
    for what, permission in given.items():
        if not isinstance(permission, str) or permission in WORDS:
            continue
        label = permission.partition(".")[0]
        if is_path(permission):
            reason = _not_a_function(permission)
        else:
            reason = "" if label in apps.app_configs else f"no app {label!r} is installed"
        if reason:
            yield Error(f"The {what} is {permission!r}: {reason}.", hint=PERMISSION_HINT, id="streamserve.E012")


def _check_tenant(conf: SiteConfig) -> Iterator[CheckMessage]:
    """E013: TENANT names no function."""
    reason = _not_a_function(conf.tenant) if conf.tenant else ""
    if reason:
        yield Error(
            f'STREAMSERVE["TENANT"] is {conf.tenant!r}: {reason}.',
            hint="It takes the dotted path of a function of user and key that returns a team's name (docs/access.md).",
            id="streamserve.E013",
        )


def _check_moderation(conf: SiteConfig) -> Iterator[CheckMessage]:
    """E017: MODERATION names nothing that can be called."""
    if not conf.moderation:
        return
    try:
        is_callable = callable(import_string(conf.moderation))
    except ImportError:
        is_callable = False
    if not is_callable:
        yield Error(
            f'STREAMSERVE["MODERATION"] is {conf.moderation!r}, and there is no such function.',
            hint="It takes the dotted path of a function of a list of texts (docs/moderations.md).",
            id="streamserve.E017",
        )


def _check_mcp(conf: SiteConfig) -> Iterator[CheckMessage]:
    """E014: the package mcp, which MCP_SERVERS needs, is missing. E015: a server's program is not there."""
    if conf.mcp_servers and find_spec("mcp") is None:
        yield Error(
            "MCP_SERVERS needs the package mcp, which is not installed.",
            hint='pip install "streamserve[mcp]"',
            id="streamserve.E014",
        )
    for server in conf.mcp_servers.values():
        if server.command and which(server.command) is None:
            yield Error(
                f"MCP_SERVERS[{server.name!r}] starts {server.command!r}, which is no program on this PATH.",
                hint="Give its whole path, or install it for the user that runs the web processes.",
                id="streamserve.E015",
            )


def _check_tracing(conf: SiteConfig) -> Iterator[CheckMessage]:
    """E018: the package opentelemetry-api, which TRACING needs, is missing."""
    if conf.tracing and find_spec("opentelemetry") is None:
        yield Error(
            "TRACING needs the package opentelemetry-api, which is not installed.",
            hint='pip install "streamserve[otel]"',
            id="streamserve.E018",
        )


def _not_a_function(path: str) -> str:
    """Return why the path names no plain function; "" if it does."""
    try:
        found = import_string(path)
    except ImportError as error:
        return f"it cannot be imported ({error})"
    if not callable(found):
        return "it is no function"
    return "it is an async function, and a plain function is called on a thread" if iscoroutinefunction(found) else ""


def _check_conversations(conf: SiteConfig) -> Iterator[CheckMessage]:
    """W017: questions and answers are kept in the site's database."""
    if conf.conversations:
        days = conf.keep_conversations_days
        kept = f"for {days:g} days after the last message" if days else "until they are deleted"
        yield Warning(
            f'STREAMSERVE["CONVERSATIONS"] is on: what users ask and are answered is kept in the database, {kept}.',
            hint="Tell your users, choose KEEP_CONVERSATIONS_DAYS, and silence this by "
            'SILENCED_SYSTEM_CHECKS = ["streamserve.W017"].',
            id="streamserve.W017",
        )


def _check_asgi() -> Iterator[CheckMessage]:
    """E006: no ASGI application. W001: it, or the asgi.py that a server would be given, is not wrapped."""
    path = getattr(settings, "ASGI_APPLICATION", None)
    if not path:
        yield Error(
            "ASGI_APPLICATION is not set; under WSGI nothing can stream.",
            hint=f'ASGI_APPLICATION = "<project>.asgi.application", and at the end of asgi.py: {_WRAP}',
            id="streamserve.E006",
        )
        return
    try:
        import_string(path)
    except ImportError as error:
        yield Error(f"ASGI_APPLICATION cannot be imported: {error}.", hint="Correct its path.", id="streamserve.E006")
        return
    for served in sorted({path, *_asgi_files()}):
        try:
            is_bare = not _is_wrapped(import_string(served))
        except Exception:  # a module of the site that is not in use; its server reports more
            continue
        if is_bare:
            yield Warning(
                f"{served} is not wrapped: served by it, there are no WebSockets, and each stream keeps Django's "
                "response open until it ends.",
                hint=f"At the end of {served.rpartition('.')[0].replace('.', '/')}.py: {_WRAP}",
                id="streamserve.W001",
            )


def _check_urls() -> Iterator[CheckMessage]:
    """W014: the routes are not included, so that the site answers no request and a chat element has no address."""
    try:
        reverse("streamserve:streams")
    except NoReverseMatch:
        yield Warning(
            "The site's urls do not include streamserve's: it serves no answers, and the chat element has no address.",
            hint='In urls.py: urlpatterns += [path("", include("streamserve.urls"))]. A site that only calls '
            "streamserve from Python can silence this.",
            id="streamserve.W014",
        )
    except Exception:  # a urls.py that cannot be imported: Django's own checks name it
        return


def _check_login() -> Iterator[CheckMessage]:
    """W016: the ready chat page sends visitors to a login that the site does not have."""
    if get_problems() or get_settings().chat_page not in ("staff", "authenticated"):
        return
    url = urlsplit(resolve_url(settings.LOGIN_URL))
    try:
        if not url.netloc:
            resolve(url.path)
    except Resolver404:
        yield Warning(
            f'STREAMSERVE["CHAT_PAGE"] is {get_settings().chat_page!r}, and no page answers at LOGIN_URL ({url.path}), '
            "to which its visitors are sent.",
            hint='Set LOGIN_URL to the site\'s login, for example "admin:login".',
            id="streamserve.W016",
        )
    except Exception:  # a urls.py that cannot be imported: Django's own checks name it
        return


def _asgi_files() -> Iterator[str]:
    """Yield the `application` of every asgi.py beside the site's settings, urls.py and wsgi.py."""
    modules = [getattr(settings, name, None) or "" for name in ("SETTINGS_MODULE", "ROOT_URLCONF", "WSGI_APPLICATION")]
    for module in modules:
        parts = module.split(".")
        for end in range(1, len(parts)):  # mysite.settings.local: mysite.asgi, mysite.settings.asgi
            name = f"{'.'.join(parts[:end])}.asgi"
            with suppress(ImportError):  # a module that is no package
                if find_spec(name) is not None:
                    yield f"{name}.application"


def _is_wrapped(application: Any) -> bool:
    """Return whether StreamMiddleware is in `application`: itself, or inside other middleware or a router."""
    from streamserve.asgi.middleware import StreamMiddleware

    for _ in range(_MAX_WRAPPERS):
        if isinstance(application, StreamMiddleware):
            return True
        inner = [getattr(application, name, None) for name in ("app", "application", "inner", "_app")]
        inner.append(getattr(application, "application_mapping", {}).get("http"))
        application = next((one for one in inner if callable(one)), None)
    return False


def _check_uvicorn() -> Iterator[CheckMessage]:
    """W011: uvicorn has no library for WebSockets."""
    if find_spec("uvicorn") is not None and find_spec("websockets") is None and find_spec("wsproto") is None:
        yield Warning(
            "uvicorn is installed without a WebSocket library: it answers every WebSocket with 404.",
            hint='pip install websockets, or "streamserve[uvicorn]".',
            id="streamserve.W011",
        )


def _check_flow_server() -> Iterator[CheckMessage]:
    """W008: stock daphne would serve; it has no back-pressure."""
    from streamserve.asgi.flow.install import missing, serves_stock

    if get_problems() or not serves_stock():  # with wrong settings FLOW_SERVER is not known yet
        return
    lacks = missing()
    yield Warning(
        "Stock daphne would serve: a reader who does not read costs memory without bound.",
        hint=f"This daphne lacks {', '.join(lacks)}. Install daphne 4.2."
        if lacks
        else 'Take "FLOW_SERVER": False out of STREAMSERVE, or serve with uvicorn.',
        id="streamserve.W008",
    )


def _check_daphne() -> Iterator[CheckMessage]:
    """W002, E007: plain `runserver` is WSGI and cannot stream."""
    installed = [config.name for config in apps.get_app_configs()]
    if "daphne" not in installed:
        yield Warning(
            "daphne is not in INSTALLED_APPS: runserver will not stream.",
            hint='Put "daphne" first in INSTALLED_APPS, or serve with another ASGI server.',
            id="streamserve.W002",
        )
    elif "django.contrib.staticfiles" in installed[: installed.index("daphne")]:
        yield Error(
            "daphne stands after django.contrib.staticfiles in INSTALLED_APPS: runserver stays WSGI.",
            hint='Put "daphne" first in INSTALLED_APPS.',
            id="streamserve.E007",
        )


def _check_middleware() -> Iterator[CheckMessage]:
    """W004: WhiteNoise reads a streaming response to its end under ASGI (whitenoise#531)."""
    if any("whitenoise" in path.lower() for path in settings.MIDDLEWARE):
        yield Warning(
            "WhiteNoise's middleware is synchronous and holds streams back under ASGI.",
            hint="Serve static files by the web server in front, or with ServeStatic.",
            id="streamserve.W004",
        )
