"""Typed settings from `STREAMSERVE = {...}`: read lazily, checked whole, read again when a test changes them.

The only reader of `STREAMSERVE` and of BASE_DIR and DEBUG, which give defaults. `read()` is pure and collects every
problem, for checks.py; `get_settings()` raises on the first use of wrong settings.
Pattern: whitenoise and django-htmx (lazy typed conf), stamina (every mistake named).
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import urlsplit

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from streamserve.asgi.flow.transport import FlowConfig
from streamserve.clients.mcp.config import McpConfig
from streamserve.clients.process.config import LaunchConfig, ProcessConfig
from streamserve.clients.remote.config import AUTO, SERVERS, RemoteConfig, Upstream
from streamserve.conf_reader import (
    Problem,
    SettingsReader,
    field_names,
    is_base_url,
    kind_of,
    nearest,
    without_login,
)
from streamserve.dialects.openai.chat import REASONING_FIELDS
from streamserve.engine import config as engine_config
from streamserve.engine.config import (
    CLASSES,
    KV_DTYPES,
    SPECULATION,
    EmbedderConfig,
    EngineConfig,
    LatencyClass,
    ModelConfig,
)
from streamserve.engine.text.formats.markup import NAMES as FORMAT_NAMES
from streamserve.protocol.alerts import Alerts
from streamserve.protocol.limits import Limits
from streamserve.protocol.permissions import ANYONE, PERMISSION_HINT, STAFF, Permission, problem_of
from streamserve.protocol.prices import Price
from streamserve.protocol.rates import SCOPES, Rate
from streamserve.protocol.requests import LATENCY_CLASSES, OTHER_PARTS, ROUTES_WITH_CLASSES
from streamserve.streams.config import AttachmentConfig, BatchConfig, JobConfig, StreamConfig
from streamserve.streams.log.base import UNFINISHED_SECONDS

T = TypeVar("T")

ECHO_PATH = "echo"
DTYPES = ("auto", "float32", "bfloat16")
QUANTIZE = ("", "int8", "int4")
DEVICES = ("auto", "cpu", "cuda")
CLIENTS = ("process", "thread")  # the first is the default
TITLES = ("model", "words")
# Who may open the ready chat page; "debug": visitors from this machine while DEBUG is on. The first is the default.
CHAT_PAGES = ("debug", "off", "staff", "authenticated", "anyone")
LOGS = ("file", "memory")  # the first is the default; or the address of a Redis:
# A reader's position is reported every few tokens, and a stop string may hold 64 characters back from it: with less
# the engine would wait for a reader that has read all it was sent.
MIN_LEAD_TOKENS = 96
# The least of each number of ENGINE with which an engine computes an answer. The first block is never allocated.
_LEAST = {
    "BLOCK_SIZE": 1,
    "NUM_BLOCKS": 2,
    "KV_CACHE_BYTES": 1,
    "MAX_MODEL_LEN": 2,
    "MAX_NUM_SEQS": 1,
    "MAX_ADMITTED": 1,
    "MAX_NUM_BATCHED_TOKENS": 1,
    "PREFILL_CHUNK": 1,
    "DEFAULT_MAX_TOKENS": 1,
}
MAX_COUNT = 2**31 - 1  # the engine counts tokens and blocks in 32 bits
LOG_SCHEMES = ("redis://", "rediss://", "unix://")
# A new request waits while an engine drains, and so much longer for the next engine.
_ENGINE_START_SECONDS = 10.0
_NO_URL = "http://localhost"  # stands for an address that is wrong, and reported
_SECRET_PREFIX, _MIN_SECRET_BYTES = "whsec_", 24  # Standard Webhooks: 24 to 64 random bytes
_MAX_WEBHOOK_NAME_CHARS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One entry of MODELS: the model, its engine's config, and what the site does with its requests and answers.

    `remote`: the server elsewhere that runs the model; then `model.path` is its address, and there is no engine of
    ours. `adapter_of`: of an adapter, the model that it changes, whose engine serves it.
    """

    model: ModelConfig
    engine: EngineConfig
    """Engine shape for this model, on top of the shared `ENGINE`."""
    title: str = ""
    """Its name for people, as in the chat's model picker; `""`: the alias."""
    system: str = ""
    """The system prompt of every chat whose caller sends none. It is computed once for all callers: it holds no text of
    theirs, so its whole blocks of `BLOCK_SIZE` tokens are shared between tenants, and nothing after them. A release
    without this setting cannot continue such an answer.
    """
    default_class: str = ""
    """Class of requests to this model that name none; `""`: `chat`."""
    permission: Permission = ANYONE
    """Who may use the model: `"anyone"` who may ask at all, `"authenticated"` (users and API keys), `"staff"`, a Django
    permission as `"shop.view_invoice"`, or a function (or its dotted path) that takes the user, or `None`, and the
    caller. For anyone else the model does not exist (docs/access.md#who-may-use-a-model).
    """
    remote: RemoteConfig | None = None
    adapter_of: str = ""
    filters: tuple[str, ...] = ()
    """Dotted paths of functions (or classes) without arguments, each of which makes an output filter
    (docs/pipelines.md#output-filters) that every answer of this model goes through before a reader sees it.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEmbedder:
    """One entry of EMBEDDING_MODELS: the model, and who may use it."""

    model: EmbedderConfig
    title: str = ""
    """Its name for people; `""`: the alias."""
    permission: Permission = ANYONE
    """Who may use the model, as of MODELS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """One entry of WEBHOOKS: where messages about jobs are posted, and the secret that signs them.

    A caller names it and never gives an address: a server that posts to addresses of callers reaches what they cannot.
    """

    name: str
    url: str
    """Where messages are posted, as `https://billing.example.org/hook`."""
    secret: bytes = field(repr=False)
    """`whsec_` and at least 24 random bytes in base64: what messages are signed with (docs/jobs.md#webhooks)."""
    timeout_seconds: float = 10.0
    """How long the target may take for its response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteConfig:
    """`STREAMSERVE`, checked. Fields are the keys in lower case; docs/reference/settings.md is made of them."""

    models: Mapping[str, ServedModel] = field(default_factory=dict)
    """Alias → model. The alias is what callers name in `model`."""
    default_model: str = ""
    """The model that answers when none is named."""
    embedding_models: Mapping[str, ServedEmbedder] = field(default_factory=dict)
    """Alias → embedding model (docs/embeddings.md), each in a process of its own as `CLIENT` says. A request that names
    none is for the first.
    """
    client: str = CLIENTS[0]
    """Where engines run. `"process"`: one process for each model, which all web processes share, and which outlives
    each of them; `"thread"`: in the web process itself (docs/engines.md).
    """
    log: str = LOGS[0]
    """Where streams' events are kept. `"file"`: `streams.sqlite3` in `STATE_DIR`, which all processes of a machine
    share, so it outlives any of them. `"redis://…"` (also `rediss://`, `unix://`): in Redis, which must write to disk
    (`appendonly yes`), for web processes on several machines. `"memory"`: in each web process.
    """
    engine_autostart: bool = False
    """Whether a web process starts the engine it needs; `None`: while `DEBUG` is on. Otherwise `manage.py
    streamserve_engine` must run.
    """
    engine_process: ProcessConfig = field(default_factory=ProcessConfig)
    """What holds for every engine process (docs/engines.md)."""
    state_dir: str = ""
    """Folder on a disk of this machine. It holds the streams' events, a lock for each web process (`workers/`), and the
    engines' output (`engine-<alias>.log`). All processes of a site name the same folder; each site has its own.
    """
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Engine shape for all models."""
    classes: Mapping[str, LatencyClass] = field(default_factory=lambda: CLASSES)
    """What requests of each latency class are planned with."""
    route_classes: Mapping[str, str] = field(default_factory=dict)
    """Route → the class of its requests that name none."""
    limits: Limits = field(default_factory=Limits)
    """Upper bounds of what callers can send."""
    streams: StreamConfig = field(default_factory=StreamConfig)
    """Times of streams and readers."""
    jobs: JobConfig = field(default_factory=JobConfig)
    """How jobs (docs/jobs.md) are run."""
    webhooks: Mapping[str, Webhook] = field(default_factory=dict)
    """The targets that jobs may name: name → `URL`, `SECRET`, `TIMEOUT_SECONDS` (docs/jobs.md#webhooks)."""
    mcp_servers: Mapping[str, McpConfig] = field(default_factory=dict)
    """MCP servers whose tools pipelines may offer to models: name → entry (docs/mcp.md)."""
    mcp_endpoint: bool = False
    """Offer callers with an API key their pipelines as MCP tools at `/mcp` (docs/mcp.md). Off, the address is a 404."""
    anonymous: bool = False
    """Serve visitors without a login. Each browser is a tenant of its own, known by the signed cookie
    `streamserve_visitor`, which takes no row in the database. A visitor has `MAX_STREAMS_PER_VISITOR` places, all
    requests without a cookie from one client address together no more, all visitors of an address
    `MAX_STREAMS_PER_ADDRESS`, and all visitors `MAX_STREAMS_ANONYMOUS` (docs/access.md#who-is-counted-as-one).
    """
    tenant: str = ""
    """Dotted path of a function that takes the user or `None`, and the API key's row or `None`, and returns the name of
    a team, or `""`. Callers of a team share one prefix cache, one share of the engine and one caller's limits; what
    they make stays their own (docs/access.md#teams).
    """
    moderation: str = ""
    """Dotted path of a function, async or not, that takes a list of texts and returns a dict for each: category → score
    of 0 to 1. `POST /v1/moderations` answers by it (docs/moderations.md); `""`: it is a 404.
    """
    chat_page: str = "off"
    """Who may open the ready page at `chat/`. `"debug"`: visitors from this machine, through no proxy, while `DEBUG` is
    on; they may ask there without a login. `"staff"`, `"authenticated"`: these users; others are sent to `LOGIN_URL`.
    `"anyone"`: all visitors, who may ask where `ANONYMOUS` is on. `"off"`, and `"debug"` without `DEBUG`: the address
    is no route. For other rules, turn it off and give `chat_page` a route of your own (docs/widget.md).
    """
    store: bool = False
    """Keep the text of finished answers in the stream's row, cut where the user stopped reading; and whole chat
    completions with `store` (docs/openai.md#stored-completions), with what was asked.
    """
    conversations: bool = False
    """Keep the conversations of users and API keys, with what was asked and answered (docs/conversations.md). Off,
    because that is text of theirs in the site's database.
    """
    titles: str = TITLES[0]
    """What a conversation is called until its owner renames it: `"model"`: a title that its model makes of the first
    question and answer, in the class `batch`; before it, and where it does not come, the first words of the question.
    `"words"`: these always.
    """
    attachments: AttachmentConfig = field(default_factory=AttachmentConfig)
    """Files that questions bring (docs/conversations.md#attachments)."""
    share_links: bool = False
    """Let owners make links by which anyone reads a branch of a conversation (docs/conversations.md#share-links)."""
    tracing: bool | None = None
    """Whether answers are recorded as spans of OpenTelemetry (docs/tracing.md). `None`: where the site has set a tracer
    provider. `True`: the same, and a system check names the package where it is missing. `False`: none.
    """
    usage: bool = True
    """Keep what each owner uses of each model a day (docs/usage.md): one more row a day, and no text."""
    rates: Mapping[str, Rate] = field(default_factory=dict)
    """Limits over time by scope (docs/limits.md): `owner`, `key`, `tenant`, `address`, `site`, `work`. Without them no
    request is counted.
    """
    alerts: Alerts = field(default_factory=Alerts)
    """Thresholds of the live page, and of the rules that `streamserve_alerts` prints for Prometheus
    (docs/monitoring.md#alerts)."""
    reserve_tokens: int = 1000
    """Of an answer's tokens so many are reserved at most while it runs, where tokens are limited."""
    prices: Mapping[str, Price] = field(default_factory=dict)
    """Model or pipeline → what a million of its tokens cost, for the usage: `PROMPT`, `CACHED` and `COMPLETION`. Rows
    of batches cost half.
    """
    reader_timings: bool = True
    """Take what readers measure of their answers (`POST /streams/{id}/timings`), and have the chat page send it: times
    only, no text (docs/monitoring.md#from-gpu-to-glass).
    """
    prompt_in_url: bool = False
    """Let `GET /streams/new?prompt=…` and `GET /v1/completions/stream?prompt=…` start answers. Off, because servers and
    proxies write addresses, and so the prompts, into their access logs; resuming there by `Last-Event-ID` works in any
    case.
    """
    reasoning_field: str = REASONING_FIELDS[0]
    """Where `/v1/chat/completions` shows thinking: `"reasoning_content"`, `"reasoning"` (vLLM's newer name) or
    `"both"`.
    """
    cors_origins: tuple[str, ...] = ()
    """Origins (`"https://app.example.org"`) whose pages may call the routes from a browser with an API key. Cookies do
    not count from there.
    """
    batches: BatchConfig = field(default_factory=BatchConfig)
    """Files and rows of batches (docs/batches.md)."""
    keep_streams_days: float = 0.0
    """How many days the rows of finished streams are kept; then every web process drops them, and so does
    `streamserve_purge`. 0: for ever.
    """
    keep_conversations_days: float = 0.0
    """How many days a conversation is kept after its last message, unless it is pinned. 0: for ever."""
    keep_watches_days: float = 0.0
    """How many days the rows of watches are kept, in the same way. 0: for ever."""
    keep_jobs_days: float = 0.0
    """How many days the rows of jobs that have ended are kept, with their results. 0: for ever."""
    testing: bool = False
    """For your tests: every model answers by the echo engine, in the process itself, and logs are in memory."""
    echo_step_seconds: float = 0.0
    """How long the echo engine takes for a step: to watch a page stream without weights."""
    harden_event_streams: bool = False
    """Harden your own views' `text/event-stream` responses too (docs/other-frameworks.md#other-peoples-event-streams).
    Read when the server starts.
    """
    flow_server: bool = True
    """Have the `daphne` command and `runserver` serve by FlowServer (docs/deploy.md#the-web-server); `False`: by
    daphne's own server class.
    """
    flow: FlowConfig = field(default_factory=FlowConfig)
    """What FlowServer allows a connection."""

    @property
    def engines(self) -> Mapping[str, ServedModel]:
        """The entries of MODELS without their adapters."""
        return {alias: entry for alias, entry in self.models.items() if not entry.adapter_of}

    def engine_spec(self, alias: str) -> LaunchConfig:
        """Return the config of a model's engine process. The state folder identifies the site."""
        embedder = self.embedding_models[alias].model if alias in self.embedding_models else None
        served = None if embedder is not None else self.models[alias]
        return LaunchConfig(
            model=served.model if served is not None else ModelConfig(alias=alias, path=""),
            engine=served.engine if served is not None else EngineConfig(),
            embedder=embedder,
            site=self.state_dir,
            state_dir=self.state_dir,
            autostart=self.engine_autostart,
            echo_step_seconds=self.echo_step_seconds,
            **dataclasses.asdict(self.engine_process),
        )


@lru_cache(maxsize=1)  # each request asks
def get_settings() -> SiteConfig:
    """Return the checked settings. Raises ImproperlyConfigured with every problem and its remedy."""
    settings, problems = _current()
    if problems:
        raise ImproperlyConfigured(" ".join(f"{problem.message} {problem.hint}" for problem in problems))
    return settings


def get_problems() -> tuple[Problem, ...]:
    """Return the problems of `STREAMSERVE`, for the system checks."""
    return _current()[1]


@lru_cache(maxsize=1)
def _current() -> tuple[SiteConfig, tuple[Problem, ...]]:
    raw = getattr(django_settings, "STREAMSERVE", {})
    return read(raw, base_dir=getattr(django_settings, "BASE_DIR", None), debug=django_settings.DEBUG)


def _forget(*, setting: str, **kwargs: Any) -> None:
    if setting in ("STREAMSERVE", "BASE_DIR", "DEBUG"):
        _current.cache_clear()
        get_settings.cache_clear()


setting_changed.connect(_forget, dispatch_uid="streamserve.conf")


def read(
    raw: object, *, base_dir: str | Path | None = None, debug: bool = False
) -> tuple[SiteConfig, tuple[Problem, ...]]:
    """Return the settings in `raw` and all of its problems.

    `base_dir` and `debug` give the defaults of STATE_DIR and ENGINE_AUTOSTART.
    """
    reader = _SiteReader(base_dir, debug)
    return reader.settings(raw), tuple(reader.problems)


class _SiteReader(SettingsReader):
    """Reads the keys of `STREAMSERVE`."""

    def __init__(self, base_dir: str | Path | None, debug: bool) -> None:
        super().__init__()
        self._base_dir, self._debug = base_dir, debug

    def settings(self, raw: object) -> SiteConfig:
        """Return the settings. In tests a server that ends does not wait for answers."""
        given = self.mapping(raw, "STREAMSERVE")
        self.refuse_unknown(given, [name.upper() for name in field_names(SiteConfig)], "STREAMSERVE")
        testing = self.boolean(given, "TESTING")
        client = self._one_of(given, "CLIENT", CLIENTS, in_tests="thread", testing=testing)
        log = self._log(given, testing=testing)
        classes = self._classes(given.get("CLASSES", {}))
        engine, shared = self._engine(given.get("ENGINE", {}), 'STREAMSERVE["ENGINE"]', classes)
        models = self._models(given.get("MODELS", {}), classes, shared, testing=testing)
        process = self._options(ProcessConfig, given, "ENGINE_PROCESS")
        return SiteConfig(
            models=models,
            default_model=self._default_model(given.get("DEFAULT_MODEL"), models),
            embedding_models=self._embedders(given.get("EMBEDDING_MODELS", {}), models, testing=testing),
            client=client,
            log=log,
            engine_autostart=self._autostart(given),
            engine_process=process,
            state_dir=self._state_dir(given.get("STATE_DIR"), is_needed=client == "process" or log != "memory"),
            engine=engine,
            classes=classes,
            route_classes=self._route_classes(given.get("ROUTE_CLASSES", {})),
            limits=self.dataclass(Limits, given.get("LIMITS", {}), 'STREAMSERVE["LIMITS"]'),
            streams=self._streams(given.get("STREAMS", {}), process),
            jobs=self._options(JobConfig, given, "JOBS"),
            webhooks=self._webhooks(given.get("WEBHOOKS", {})),
            mcp_servers=self._mcp_servers(given.get("MCP_SERVERS", {})),
            mcp_endpoint=self.boolean(given, "MCP_ENDPOINT"),
            anonymous=self.boolean(given, "ANONYMOUS"),
            tenant=self._dotted_path(given.get("TENANT", ""), "TENANT"),
            moderation=self._dotted_path(given.get("MODERATION", ""), "MODERATION"),
            chat_page=self._chat_page(given, testing=testing),
            store=self.boolean(given, "STORE"),
            conversations=self.boolean(given, "CONVERSATIONS"),
            titles=self._one_of(given, "TITLES", TITLES, in_tests=None, testing=testing),
            attachments=self._options(AttachmentConfig, given, "ATTACHMENTS"),
            share_links=self.boolean(given, "SHARE_LINKS"),
            usage=self._usage(given),
            tracing=None if given.get("TRACING") is None else self.boolean(given, "TRACING"),
            rates=self._rates(given.get("RATES", {})),
            alerts=self._options(Alerts, given, "ALERTS"),
            reserve_tokens=self._reserve_tokens(given),
            prices=self._prices(given.get("PRICES", {})),
            reader_timings=self.boolean({"READER_TIMINGS": True, **given}, "READER_TIMINGS"),
            prompt_in_url=self.boolean(given, "PROMPT_IN_URL"),
            reasoning_field=self._one_of(given, "REASONING_FIELD", REASONING_FIELDS, in_tests=None, testing=testing),
            cors_origins=self._origins(given.get("CORS_ORIGINS", ())),
            batches=self._options(BatchConfig, given, "BATCHES"),
            keep_streams_days=self.days(given, "KEEP_STREAMS_DAYS"),
            keep_conversations_days=self.days(given, "KEEP_CONVERSATIONS_DAYS"),
            keep_watches_days=self.days(given, "KEEP_WATCHES_DAYS"),
            keep_jobs_days=self.days(given, "KEEP_JOBS_DAYS"),
            testing=testing,
            echo_step_seconds=self.number(given, "ECHO_STEP_SECONDS"),
            harden_event_streams=self.boolean(given, "HARDEN_EVENT_STREAMS"),
            flow_server=self.boolean({"FLOW_SERVER": True, **given}, "FLOW_SERVER"),
            flow=self._options(FlowConfig, given, "FLOW", {"DRAIN_SECONDS": 0.0} if testing else {}),
        )

    def _streams(self, raw: object, process: ProcessConfig) -> StreamConfig:
        wait_seconds = max(StreamConfig().engine_wait_seconds, process.drain_seconds + _ENGINE_START_SECONDS)
        defaults = {"ENGINE_WAIT_SECONDS": wait_seconds}
        read = self.dataclass(StreamConfig, raw, 'STREAMSERVE["STREAMS"]', defaults=defaults)
        if not 0 <= read.approval_seconds <= UNFINISHED_SECONDS:  # the purge of the log would be earlier
            self.wrong('STREAMSERVE["STREAMS"]["APPROVAL_SECONDS"] is not 0 to 86400.', "A day is the most: 86400.")
        return read

    def _origins(self, raw: object) -> tuple[str, ...]:
        """Return the origins of CORS_ORIGINS, as browsers send them."""
        if not isinstance(raw, (list, tuple)) or not all(isinstance(origin, str) for origin in raw):
            self.wrong('STREAMSERVE["CORS_ORIGINS"] is no list of texts.', 'Try ["https://app.example.org"].')
            return ()
        for origin in raw:
            parts = urlsplit(origin)
            if origin != f"{parts.scheme}://{parts.netloc}" or not (parts.scheme and parts.netloc):
                self.wrong(
                    f'STREAMSERVE["CORS_ORIGINS"] has {origin!r}, which is no origin.',
                    "An origin is a scheme, a host and perhaps a port, as https://app.example.org.",
                )
        return tuple(raw)

    def _models(
        self, raw: object, classes: Mapping[str, LatencyClass], shared: Mapping[str, Any], *, testing: bool
    ) -> dict[str, ServedModel]:
        given = self.mapping(raw, 'STREAMSERVE["MODELS"]')
        if testing and not given:
            given = {ECHO_PATH: {"PATH": ECHO_PATH, "ANSWERS": None}}
        elif not given:
            hint = 'Try {"MODELS": {"echo": {"PATH": "echo"}}}.'
            self.problem("missing", 'STREAMSERVE["MODELS"] names no model.', hint)
        out = {}
        for alias, options in given.items():
            entry = self._model(alias, options, classes, shared)
            if entry is not None:
                entry = _as_echo(entry) if testing else entry
                adapters = self._adapters(entry, options, given)
                paths = {name: one.model.path for name, one in adapters.items()}
                out[alias] = dataclasses.replace(entry, model=dataclasses.replace(entry.model, adapters=paths))
                out |= adapters
        return out

    def _adapters(self, entry: ServedModel, raw: Any, models: Mapping[str, Any]) -> dict[str, ServedModel]:
        """Return the adapters of a model by name, each as an entry that is like the model's own."""
        base = entry.model.alias
        given = raw.get("ADAPTERS", {}) if isinstance(raw, Mapping) and entry.remote is None else {}
        out: dict[str, ServedModel] = {}
        for name, options in self.mapping(given, f'STREAMSERVE["MODELS"]["{base}"]["ADAPTERS"]').items():
            where = f'STREAMSERVE["MODELS"]["{base}"]["ADAPTERS"]["{name}"]'
            options = {"PATH": options} if isinstance(options, str) else dict(self.mapping(options, where))
            path = options.pop("PATH", "")
            if not isinstance(name, str) or not name or not isinstance(path, str) or not path:
                self.wrong(f"{where} needs a PATH.", "Give the folder that PEFT has written.")
                continue
            if name in models or sum(name in _names_in(other) for other in models.values()) > 1:
                self.wrong(
                    f"{where} has the name of another model.", "Callers choose by it: give it a name of its own."
                )
                continue
            title, system = options.pop("TITLE", ""), options.pop("SYSTEM", entry.system)
            for key, text in (("TITLE", title), ("SYSTEM", system)):
                if not isinstance(text, str):
                    self.wrong(f'{where}["{key}"] is {kind_of(text)}.', "It takes a text.")
            permission = self._permission(options.pop("PERMISSION", entry.permission), f'{where}["PERMISSION"]')
            self.refuse_unknown(options, ["PATH", "TITLE", "SYSTEM", "PERMISSION"], where)
            out[name] = dataclasses.replace(
                entry,
                model=ModelConfig(alias=name, path=path),
                title=str(title),
                system=str(system),
                permission=permission,
                adapter_of=base,
            )
        return out

    def _model(
        self, alias: object, raw: object, classes: Mapping[str, LatencyClass], shared: Mapping[str, Any]
    ) -> ServedModel | None:
        where = f'STREAMSERVE["MODELS"]["{alias}"]'
        options = dict(self.mapping(raw, where))
        own_engine, system = options.pop("ENGINE", {}), options.pop("SYSTEM", "")
        if not isinstance(system, str):
            self.wrong(f'{where}["SYSTEM"] is {kind_of(system)}.', "It takes the text of a system prompt.")
            system = ""
        title = options.pop("TITLE", "")
        if not isinstance(title, str):
            self.wrong(f'{where}["TITLE"] is {kind_of(title)}.', "It takes a text.")
            title = ""
        filters = self.dotted_paths(options.pop("FILTERS", ()), f'{where}["FILTERS"]')
        permission = self._permission(options.pop("PERMISSION", ANYONE), f'{where}["PERMISSION"]')
        default_class = options.pop("LATENCY_CLASS", "")
        self.one_of(default_class, ("", *classes), f'{where}["LATENCY_CLASS"]')
        if "URL" in options or "UPSTREAMS" in options:
            remote = self._remote(str(alias), options, where, has_engine=bool(own_engine))
            path = ModelConfig(alias=str(alias), path=remote.address)
            return ServedModel(
                model=path,
                engine=EngineConfig(),
                title=title,
                system=system,
                default_class=str(default_class),
                permission=permission,
                remote=remote,
                filters=filters,
            )
        if not isinstance(alias, str) or not alias or not isinstance(options.get("PATH"), str) or not options["PATH"]:
            self.wrong(f"{where} needs a PATH.", "Give a folder, a hub id such as org/name, or 'echo'.")
            known = [
                name.upper() for cls in (ModelConfig, RemoteConfig) for name in field_names(cls) if name != "alias"
            ]
            self.refuse_unknown(options, known, where)  # one of them may be meant to be PATH or URL
            return None
        options.pop("ADAPTERS", None)  # see `_adapters`
        answers = self._answers(options.pop("ANSWERS", {}), where) if options["PATH"] == ECHO_PATH else None
        model = self.dataclass(ModelConfig, options, where, fixed={"alias": alias, "answers": answers})
        self.one_of(model.dtype, DTYPES, f'{where}["DTYPE"]')
        self.one_of(model.device, DEVICES, f'{where}["DEVICE"]')
        self.one_of(model.quantize, QUANTIZE, f'{where}["QUANTIZE"]')
        self.one_of(model.draft_quantize, QUANTIZE, f'{where}["DRAFT_QUANTIZE"]')
        for key, kind in (("QUANTIZE", model.quantize), ("DRAFT_QUANTIZE", model.draft_quantize)):
            if kind and (model.device == "cuda" or not model.native or model.packed is False):
                self.wrong(
                    f'{where}["{key}"] is {kind!r}, which native kernels compute on a CPU.',
                    "Take it out, or DEVICE, NATIVE or PACKED.",
                )
        if model.draft and model.path == ECHO_PATH:
            self.wrong(f'{where}["DRAFT"] is {model.draft!r}, which the echo engine does not use.', "Take it out.")
        if model.format is not None and "." not in str(model.format):
            self.one_of(model.format, FORMAT_NAMES, f'{where}["FORMAT"]')
        engine, _ = self._engine(own_engine, f'{where}["ENGINE"]', classes, shared)
        return ServedModel(
            model=model,
            engine=engine,
            title=title,
            system=system,
            default_class=str(default_class),
            permission=permission,
            filters=filters,
        )

    def _embedders(
        self, raw: object, models: Mapping[str, ServedModel], *, testing: bool
    ) -> Mapping[str, ServedEmbedder]:
        """Return the embedding models by alias, which no model of MODELS has."""
        out = {}
        for alias, given in self.mapping(raw, 'STREAMSERVE["EMBEDDING_MODELS"]').items():
            where = f'STREAMSERVE["EMBEDDING_MODELS"]["{alias}"]'
            options = dict(self.mapping(given, where))
            if not isinstance(alias, str) or not alias or not isinstance(options.get("PATH"), str):
                self.wrong(f"{where} needs a PATH.", "Give a folder, a hub id such as org/name, or 'echo'.")
                continue
            if alias in models:
                self.wrong(f"{where} has the name of a model of MODELS.", "Give it another name.")
                continue
            title = options.pop("TITLE", "")
            if not isinstance(title, str):
                self.wrong(f'{where}["TITLE"] is {kind_of(title)}.', "It takes a text.")
                title = ""
            permission = self._permission(options.pop("PERMISSION", ANYONE), f'{where}["PERMISSION"]')
            try:
                model = self.dataclass(EmbedderConfig, options, where, fixed={"alias": alias})
            except ValueError as error:
                self.wrong(f"{where}: {error}.", "See docs/reference/settings.md.")
                continue
            self.one_of(model.dtype, DTYPES, f'{where}["DTYPE"]')
            self.one_of(model.device, DEVICES, f'{where}["DEVICE"]')
            model = dataclasses.replace(model, path=ECHO_PATH) if testing else model
            out[alias] = ServedEmbedder(model=model, title=title, permission=permission)
        return MappingProxyType(out)

    def _permission(self, raw: object, where: str) -> Permission:
        """Return who may use a model. A wrong value hides the model from all but the staff."""
        problem = problem_of(raw)
        if problem is None:
            assert isinstance(raw, str) or callable(raw)
            return raw
        self.wrong(f"{where} {problem}", PERMISSION_HINT)
        return STAFF

    def _dotted_path(self, raw: object, key: str) -> str:
        if raw == "" or (isinstance(raw, str) and "." in raw.strip(".")):
            return raw
        self.wrong(f'STREAMSERVE["{key}"] is {raw!r}.', "It takes a function's dotted path, as shop.teams.team_of.")
        return ""

    def _remote(self, alias: str, options: Mapping[str, Any], where: str, *, has_engine: bool) -> RemoteConfig:
        """Return the config of a model with a URL, or with UPSTREAMS."""
        if "PATH" in options or has_engine:
            key, ours = "PATH" if "PATH" in options else "ENGINE", "URL" if "URL" in options else "UPSTREAMS"
            self.wrong(
                f"{where} has {ours} and {key}.", f"A model with {ours} runs on a server elsewhere. Remove one key."
            )
        given = {key: value for key, value in options.items() if key not in ("PATH", "CONTENT_PARTS", "UPSTREAMS")}
        parts = options.get("CONTENT_PARTS", ())
        if not isinstance(parts, list | tuple) or not set(parts) <= set(OTHER_PARTS):
            self.wrong(f'{where}["CONTENT_PARTS"] is {parts!r}.', f"It takes a list of {', '.join(OTHER_PARTS)}.")
            parts = ()
        fixed: dict[str, Any] = {"alias": alias, "content_parts": tuple(parts)}
        if "UPSTREAMS" in options:
            fixed["upstreams"] = self._upstreams(options["UPSTREAMS"], f'{where}["UPSTREAMS"]')
        if "URL" in given:
            given["URL"] = self._base_url(given["URL"], where)
        elif not fixed["upstreams"]:  # reported above
            fixed["url"] = _NO_URL
        try:
            remote = self.dataclass(RemoteConfig, given, where, fixed=fixed)
        except ValueError as error:
            self.wrong(f"{where}: {error}.", "See docs/remote.md.")
            remote = RemoteConfig(alias=alias, url=_NO_URL)
        self.one_of(remote.server, (AUTO, *SERVERS), f'{where}["SERVER"]')
        return remote

    def _upstreams(self, raw: object, where: str) -> tuple[Upstream, ...]:
        """Return the servers of a model that has several."""
        if not isinstance(raw, list | tuple) or not raw:
            self.wrong(f"{where} is {raw!r}.", 'It takes a list of servers: [{"URL": "http://10.0.0.5:8000/v1"}, …].')
            return ()
        out = []
        for index, given in enumerate(raw):
            place = f"{where}[{index}]"
            options = dict(self.mapping(given, place))
            options["URL"] = self._base_url(options.get("URL"), place)
            try:
                upstream = self.dataclass(Upstream, options, place)
            except ValueError as error:
                self.wrong(f"{place}: {error}.", "See docs/remote.md.")
                continue
            self.one_of(upstream.server, ("", AUTO, *SERVERS), f'{place}["SERVER"]')
            out.append(upstream)
        return tuple(out)

    def _base_url(self, url: object, where: str) -> str:
        """Return the base of a server's routes, or report that it is none."""
        if isinstance(url, str) and is_base_url(url):
            return url
        self.wrong(
            f'{where}["URL"] is {without_login(url)!r}.',
            "It takes the base of the server's OpenAI routes, such as http://10.0.0.5:8000/v1, without a login "
            "(name the key's variable in API_KEY_ENV), query or fragment.",
        )
        return _NO_URL

    def _answers(self, raw: object, where: str) -> dict[str, str] | None:
        """Return what an echo engine answers. {}: the question; None: words that depend on every token."""
        if raw is None:
            return None
        given = self.mapping(raw, f'{where}["ANSWERS"]')
        if all(isinstance(text, str) for pair in given.items() for text in pair):
            return dict(given)
        self.wrong(f'{where}["ANSWERS"] is {raw!r}.', "It takes texts: a word of the question, and the answer.")
        return {}

    def _engine(
        self, raw: object, where: str, classes: Mapping[str, LatencyClass], defaults: Mapping[str, Any] = {}
    ) -> tuple[EngineConfig, Mapping[str, Any]]:
        """Return the engine's config, and the given keys as defaults for the models' own ENGINE."""
        config = self.dataclass(
            EngineConfig, raw, where, fixed={"classes": classes, "policy": engine_config.POLICY}, defaults=defaults
        )
        given = raw if isinstance(raw, Mapping) else {}
        if "MEMORY_SHARE" in given and config.memory_share is not None and not 0 < config.memory_share <= 1:
            self.wrong(f'{where}["MEMORY_SHARE"] is {config.memory_share}.', "It takes a share of 1: 0.4 is 40 %.")
        self._check_counts(config, given, where)
        self.one_of(config.speculation, SPECULATION, f'{where}["SPECULATION"]')
        self.one_of(config.kv_dtype, KV_DTYPES, f'{where}["KV_DTYPE"]')
        if config.lead_tokens < MIN_LEAD_TOKENS:
            hint = f"It takes {MIN_LEAD_TOKENS} or more: a stop string alone may hold back so many from the reader."
            self.wrong(f'{where}["LEAD_TOKENS"] is {config.lead_tokens}.', hint)
        return config, given

    def _check_counts(self, config: EngineConfig, given: Mapping[str, Any], where: str) -> None:
        """Report each given number with which an engine computes nothing, or does not start."""
        for key, least in _LEAST.items():
            value = getattr(config, key.lower()) if key in given else None
            if value is not None and value < least:
                self.wrong(f'{where}["{key}"] is {value}.', f"It takes {least} or more.")
            elif value is not None and value > MAX_COUNT and key != "KV_CACHE_BYTES":
                self.wrong(f'{where}["{key}"] is {value}.', f"It takes at most {MAX_COUNT}.")
        is_given = given.keys() & {"MAX_NUM_BATCHED_TOKENS", "MAX_NUM_SEQS"}
        if is_given and config.max_num_batched_tokens < config.max_num_seqs:
            self.wrong(
                f'{where}["MAX_NUM_BATCHED_TOKENS"] is {config.max_num_batched_tokens}, less than the'
                f" {config.max_num_seqs} sequences of MAX_NUM_SEQS.",
                "A step computes a token of each sequence. Raise it, or lower MAX_NUM_SEQS.",
            )

    def _classes(self, raw: object) -> Mapping[str, LatencyClass]:
        """Return every latency class, overridden by the given values."""
        given = self.mapping(raw, 'STREAMSERVE["CLASSES"]')
        self.refuse_unknown(given, CLASSES, 'STREAMSERVE["CLASSES"]')
        return MappingProxyType({name: self._class(name, given.get(name, {}), ours) for name, ours in CLASSES.items()})

    def _class(self, name: str, raw: object, ours: LatencyClass) -> LatencyClass:
        where = f'STREAMSERVE["CLASSES"]["{name}"]'
        defaults = {key.upper(): value for key, value in dataclasses.asdict(ours).items()}
        out = self.dataclass(LatencyClass, raw, where, defaults=defaults)
        if out.pace <= 0:
            self.wrong(f'{where}["PACE"] is {out.pace}.', "It takes tokens a second: 20 is a fast reader.")
        return out

    def _route_classes(self, raw: object) -> Mapping[str, str]:
        """Return the latency class of each route that has one of its own."""
        given = self.mapping(raw, 'STREAMSERVE["ROUTE_CLASSES"]')
        self.refuse_unknown(given, ROUTES_WITH_CLASSES, 'STREAMSERVE["ROUTE_CLASSES"]')
        for route, name in given.items():
            self.one_of(name, LATENCY_CLASSES, f'STREAMSERVE["ROUTE_CLASSES"]["{route}"]')
        return MappingProxyType({str(route): str(name) for route, name in given.items()})

    def _usage(self, given: Mapping[str, Any]) -> bool:
        return self.boolean({"USAGE": True, **given}, "USAGE")

    def _rates(self, raw: object) -> Mapping[str, Rate]:
        """Return the limits over time of each scope that has some."""
        given = self.mapping(raw, 'STREAMSERVE["RATES"]')
        self.refuse_unknown(given, SCOPES, 'STREAMSERVE["RATES"]')
        return MappingProxyType(
            {str(name): self.dataclass(Rate, rate, f'STREAMSERVE["RATES"]["{name}"]') for name, rate in given.items()}
        )

    def _reserve_tokens(self, given: Mapping[str, Any]) -> int:
        value = given.get("RESERVE_TOKENS", 1000)
        return int(value) if self.fits(value, int, 'STREAMSERVE["RESERVE_TOKENS"]') else 1000

    def _prices(self, raw: object) -> Mapping[str, Price]:
        """Return the price of each model that has one."""
        where = 'STREAMSERVE["PRICES"]'
        given = self.mapping(raw, where)
        return MappingProxyType(
            {str(name): self.dataclass(Price, price, f'{where}["{name}"]') for name, price in given.items()}
        )

    def _webhooks(self, raw: object) -> Mapping[str, Webhook]:
        """Return the targets by name."""
        out = {}
        for name, given in self.mapping(raw, 'STREAMSERVE["WEBHOOKS"]').items():
            where = f'STREAMSERVE["WEBHOOKS"]["{name}"]'
            options = self.mapping(given, where)
            self.refuse_unknown(options, ("URL", "SECRET", "TIMEOUT_SECONDS"), where)
            if not isinstance(name, str) or not 0 < len(name) <= _MAX_WEBHOOK_NAME_CHARS:
                self.wrong(f'STREAMSERVE["WEBHOOKS"] has the name {name!r}.', "A name has 1 to 64 characters.")
                continue
            url, secret = options.get("URL"), _webhook_secret(options.get("SECRET"))
            seconds = options.get("TIMEOUT_SECONDS", 10.0)
            if not isinstance(url, str) or not _is_http_address(url):
                self.wrong(f'{where}["URL"] is no address.', "Try https://billing.example.org/hook.")
            elif secret is None:
                self.wrong(
                    f'{where}["SECRET"] is no secret.',
                    "It is 'whsec_' and at least 24 random bytes in base64. Make a secret: python -c "
                    "\"import base64, os; print('whsec_' + base64.b64encode(os.urandom(32)).decode())\"",
                )
            elif seconds == 0:
                self.wrong(f'{where}["TIMEOUT_SECONDS"] is 0.', "No receiver answers at once. It takes seconds, as 10.")
            elif self.fits(seconds, float, f'{where}["TIMEOUT_SECONDS"]'):
                out[name] = Webhook(name=name, url=url, secret=secret, timeout_seconds=float(seconds))
        return MappingProxyType(out)

    def _mcp_servers(self, raw: object) -> Mapping[str, McpConfig]:
        """Return the MCP servers by name."""
        out = {}
        for name, given in self.mapping(raw, 'STREAMSERVE["MCP_SERVERS"]').items():
            where = f'STREAMSERVE["MCP_SERVERS"]["{name}"]'
            options = dict(self.mapping(given, where))
            texts = {
                key: self._texts(options.pop(key, ()), f'{where}["{key}"]') for key in ("ARGS", "TOOLS", "CONFIRM")
            }
            pairs = {key: self._pairs(options.pop(key, {}), f'{where}["{key}"]') for key in ("ENV", "HEADERS")}
            fixed = {key.lower(): value for key, value in {"NAME": str(name), **texts, **pairs}.items()}
            url = options.get("URL", "")
            if not isinstance(url, str) or (url and not _is_http_address(url)):
                self.wrong(f'{where}["URL"] is no address.', "Try https://tools.example.org/mcp.")
                continue
            try:
                out[str(name)] = self.dataclass(McpConfig, options, where, fixed=fixed)
            except ValueError as error:
                self.wrong(f"{where}: {error}.", "See docs/mcp.md.")
        return MappingProxyType(out)

    def _texts(self, raw: object, where: str) -> tuple[str, ...]:
        if isinstance(raw, list | tuple) and all(isinstance(one, str) for one in raw):
            return tuple(raw)
        self.wrong(f"{where} is {kind_of(raw)}.", "It takes a list of texts.")
        return ()

    def _pairs(self, raw: object, where: str) -> Mapping[str, str]:
        given = self.mapping(raw, where)
        if all(isinstance(one, str) for pair in given.items() for one in pair):
            return MappingProxyType(dict(given))
        self.wrong(f"{where} has a key or a value that is no text.", "It takes a dict of texts.")
        return {}

    def _default_model(self, raw: object, models: Mapping[str, ServedModel]) -> str:
        first = next(iter(models), "")
        if raw is None:
            return first
        if not isinstance(raw, str) or raw not in models:
            hint = nearest(str(raw), models) or "Name one of MODELS."
            self.wrong(f'STREAMSERVE["DEFAULT_MODEL"] is {raw!r}, which is not in MODELS.', hint)
            return first
        return raw

    def _one_of(
        self, given: Mapping[str, Any], key: str, choices: tuple[str, ...], *, in_tests: str | None, testing: bool
    ) -> str:
        """Return the choice; with TESTING always `in_tests`, if it is given, so that nothing outlives a test."""
        value = given.get(key, choices[0])
        self.one_of(value, choices, f'STREAMSERVE["{key}"]')
        return in_tests if testing and in_tests is not None else str(value)

    def _log(self, given: Mapping[str, Any], *, testing: bool) -> str:
        log = given.get("LOG")
        if not testing and isinstance(log, str) and log.startswith(LOG_SCHEMES):
            return log
        return self._one_of(given, "LOG", LOGS, in_tests="memory", testing=testing)

    def _options(self, cls: type[T], given: Mapping[str, Any], key: str, defaults: Mapping[str, Any] = {}) -> T:
        """Build a config whose constructor checks its numbers."""
        try:
            return self.dataclass(cls, given.get(key, {}), f'STREAMSERVE["{key}"]', defaults=defaults)
        except ValueError as error:
            self.wrong(f'STREAMSERVE["{key}"]: {error}.', "See docs/reference/settings.md.")
            return cls()

    def _chat_page(self, given: Mapping[str, Any], *, testing: bool) -> str:
        """Return who may open the page: "debug" is "off" without DEBUG."""
        audience = self._one_of(given, "CHAT_PAGE", CHAT_PAGES, in_tests=None, testing=testing)
        return "off" if audience == "debug" and not self._debug else audience

    def _autostart(self, given: Mapping[str, Any]) -> bool:
        return self._debug if given.get("ENGINE_AUTOSTART") is None else self.boolean(given, "ENGINE_AUTOSTART")

    def _state_dir(self, raw: object, *, is_needed: bool) -> str:
        """Return the folder's full path: web processes and engine must use the same folder."""
        if raw is None and self._base_dir is not None:
            raw = Path(self._base_dir) / "state"
        with suppress(RuntimeError, ValueError, OSError):  # no such user after ~, a loop of links, a NUL
            if isinstance(raw, str | Path) and str(raw):
                return str(Path(raw).expanduser().resolve())
        if raw is not None:
            self.wrong(f'STREAMSERVE["STATE_DIR"] is {raw!r}.', "It takes the path of a folder.")
        elif is_needed:
            hint = 'Give STREAMSERVE["STATE_DIR"], or define BASE_DIR as startproject does.'
            self.problem("missing", "There is no folder for streams and the engine's output.", hint)
        return ""


def _names_in(options: object) -> Mapping[str, Any]:
    """Return the names of the adapters of an entry of MODELS, as far as it can be read."""
    found = options.get("ADAPTERS") if isinstance(options, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _as_echo(entry: ServedModel) -> ServedModel:
    """Return the model as an echo engine, which needs no weights and no server."""
    return dataclasses.replace(entry, model=dataclasses.replace(entry.model, path=ECHO_PATH), remote=None)


def _is_http_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port over 65,535, half of an IPv6 address
        return False


def _webhook_secret(raw: object) -> bytes | None:
    if not isinstance(raw, str) or not raw.startswith(_SECRET_PREFIX):
        return None
    try:
        secret = base64.b64decode(raw.removeprefix(_SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        return None
    return secret if len(secret) >= _MIN_SECRET_BYTES else None
