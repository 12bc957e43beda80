"""Laws of the settings: typed, lazy, and every mistake named."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test.utils import override_settings

from streamserve.api.routes import ROUTES
from streamserve.clients.remote.config import RemoteConfig
from streamserve.conf import ROUTES_WITH_CLASSES, SiteConfig, get_settings, read
from streamserve.engine.config import CLASSES
from streamserve.protocol.requests import LATENCY_CLASSES, PREFILL_ONLY

ECHO = {"MODELS": {"echo": {"PATH": "echo"}}}
BASE = Path("/srv/site")


def problems(raw: Any) -> list[tuple[str, str, str]]:
    return [(one.kind, one.message, one.hint) for one in read(raw, base_dir=BASE)[1]]


def test_a_minimal_dict_is_enough() -> None:
    """One model with a PATH; it is the default model."""
    settings, found = read(ECHO, base_dir=BASE)
    assert found == ()
    assert settings.default_model == "echo"
    assert settings.models["echo"].model.dtype == "auto"
    assert settings.anonymous is False


def test_a_model_has_a_system_prompt() -> None:
    """SYSTEM is text; anything else is named."""
    settings, found = read(
        {"MODELS": {"a": {"PATH": "echo", "SYSTEM": "Be kind."}, "b": {"PATH": "echo"}}}, base_dir=BASE
    )
    assert [one.system for one in settings.models.values()] == ["Be kind.", ""]
    assert found == ()
    ((kind, message, _),) = problems({"MODELS": {"a": {"PATH": "echo", "SYSTEM": ["Be kind."]}}})
    assert (kind, message) == ("value", 'STREAMSERVE["MODELS"]["a"]["SYSTEM"] is a list.')


def test_a_model_has_a_title_for_people() -> None:
    """TITLE is text, of a model here and of a remote one."""
    models = {"a": {"PATH": "echo", "TITLE": "Help desk"}, "b": {"URL": "http://127.0.0.1:1/v1", "TITLE": "Elsewhere"}}
    settings, found = read({"MODELS": {**models, "c": {"PATH": "echo"}}}, base_dir=BASE)
    assert [one.title for one in settings.models.values()] == ["Help desk", "Elsewhere", ""]
    assert found == ()
    ((kind, message, _),) = problems({"MODELS": {"a": {"PATH": "echo", "TITLE": 1}}})
    assert (kind, message) == ("value", 'STREAMSERVE["MODELS"]["a"]["TITLE"] is a number.')


@pytest.mark.parametrize(
    ("raw", "nearest"),
    [
        ({**ECHO, "ANONYMUS": True}, "ANONYMOUS"),
        ({**ECHO, "default_model": "echo"}, "DEFAULT_MODEL"),
        ({**ECHO, "LIMITS": {"MAX_TOKEN": 3}}, "MAX_TOKENS"),
        ({**ECHO, "ENGINE": {"BLOCKSIZE": 3}}, "BLOCK_SIZE"),
        ({**ECHO, "STREAMS": {"KEEP_ALIVE_SECONDS": 3}}, "KEEPALIVE_SECONDS"),
        ({"MODELS": {"a": {"PATH": "echo", "DTYP": "auto"}}}, "DTYPE"),
        ({"MODELS": {"a": {"PATH": "echo", "ENGINE": {"MAX_SEQS": 4}}}}, "MAX_NUM_SEQS"),
        ({**ECHO, "CLASSES": {"caht": {"PACE": 4.0}}}, "chat"),
        ({**ECHO, "CLASSES": {"chat": {"TTFT": 4.0}}}, "TTFT_SECONDS"),
        ({**ECHO, "ROUTE_CLASSES": {"stream": "chat"}}, "streams"),
        ({**ECHO, "EMBEDDING_MODELS": {"a": {"PATH": "echo", "MATRIOSHKA": True}}}, "MATRYOSHKA"),
        ({**ECHO, "MCP_SERVERS": {"a": {"COMMAND": "x", "TOOLS": ["b"], "TIMEOUT": 3}}}, "TIMEOUT_SECONDS"),
    ],
)
def test_an_unknown_key_names_the_nearest(raw: Any, nearest: str) -> None:
    """An unknown key at any level of the dict names the nearest known one."""
    [(kind, _message, hint)] = problems(raw)
    assert kind == "key"
    assert repr(nearest) in hint


@pytest.mark.parametrize(
    "raw",
    [
        {**ECHO, "ANONYMOUS": "yes"},
        {**ECHO, "LIMITS": {"MAX_TOKENS": "many"}},
        {**ECHO, "LIMITS": {"MAX_TOKENS": True}},
        {**ECHO, "LIMITS": {"MAX_TOKENS": -1}},
        {**ECHO, "LIMITS": []},
        {**ECHO, "EMBEDDING_MODELS": {"a": {}}},
        {**ECHO, "EMBEDDING_MODELS": {"echo": {"PATH": "echo"}}},
        {**ECHO, "EMBEDDING_MODELS": {"a": {"PATH": "echo", "DTYPE": "float8"}}},
        {**ECHO, "EMBEDDING_MODELS": {"a": {"PATH": "echo", "MAX_BATCH_TOKENS": 0}}},
        {**ECHO, "EMBEDDING_MODELS": {"a": {"PATH": "echo", "PERMISSION": 1}}},
        {**ECHO, "EMBEDDING_MODELS": {"a": {"PATH": "echo", "TITLE": 1}}},
        {**ECHO, "DEFAULT_MODEL": "eco"},
        {**ECHO, "ECHO_STEP_SECONDS": "slow"},
        {"MODELS": {"a": {"PATH": "echo", "DTYPE": "float8"}}},
        {"MODELS": {"a": {"PATH": "echo", "DEVICE": "tpu"}}},
        {"MODELS": {"a": {"PATH": "echo", "DRAFT": "org/small"}}},
        {"MODELS": {"a": {"PATH": "org/large", "DRAFT": "org/small", "DRAFT_QUANTIZE": "int3"}}},
        {"MODELS": {"a": {}}},
        {"MODELS": {"a": "echo"}},
        {"MODELS": {"a": {"PATH": "echo", "ENGINE": {"MEMORY_SHARE": 40}}}},
        {**ECHO, "ENGINE": {"MEMORY_SHARE": 0.0}},
        {**ECHO, "ENGINE": {"LEAD_TOKENS": 64}},
        {**ECHO, "ENGINE": {"ITL_TARGET_SECONDS": float("inf")}},
        {**ECHO, "ENGINE": {"MAX_STEP_SECONDS": float("nan")}},
        {**ECHO, "ENGINE": {"BATCH_WEIGHT": -0.5}},
        {**ECHO, "CLASSES": {"chat": {"PACE": 0}}},
        {**ECHO, "CLASSES": {"chat": 0.5}},
        {**ECHO, "ROUTE_CLASSES": {"streams": "vip"}},
        {"MODELS": {"a": {"PATH": "echo", "LATENCY_CLASS": "vip"}}},
        {**ECHO, "CLIENT": "remote"},
        {**ECHO, "REASONING_FIELD": "thoughts"},
        {**ECHO, "STATE_DIR": 3},
        {**ECHO, "ENGINE_AUTOSTART": "no"},
        {**ECHO, "FLOW_SERVER": "yes"},
        {**ECHO, "FLOW": {"CONNECTION_BYTES": 10}},
        {**ECHO, "FLOW": {"DRAIN_SECONDS": -1}},
        {**ECHO, "ENGINE_PROCESS": {"HANG_SECONDS": 0}},
        {**ECHO, "ENGINE_PROCESS": {"MAX_FAILURES": 0}},
        {**ECHO, "ENGINE_PROCESS": {"IDLE_SECONDS": -1}},
        {**ECHO, "MCP_ENDPOINT": "yes"},
        {**ECHO, "MCP_SERVERS": ["tools"]},
        {**ECHO, "MCP_SERVERS": {"a": {"TOOLS": ["b"]}}},
        {**ECHO, "MCP_SERVERS": {"a": {"COMMAND": "x"}}},
        {**ECHO, "MCP_SERVERS": {"a": {"COMMAND": "x", "URL": "http://127.0.0.1/", "TOOLS": ["b"]}}},
        {**ECHO, "MCP_SERVERS": {"a": {"COMMAND": "x", "TOOLS": "b"}}},
        {**ECHO, "MCP_SERVERS": {"a": {"COMMAND": "x", "TOOLS": ["b"], "CONFIRM": ["c"]}}},
        {**ECHO, "MCP_SERVERS": {"a": {"COMMAND": "x", "TOOLS": ["b"], "ENV": {"A": 1}}}},
        {**ECHO, "MCP_SERVERS": {"a": {"URL": "file:///etc/passwd", "TOOLS": ["b"]}}},
        {**ECHO, "MCP_SERVERS": {"a": {"URL": "http://127.0.0.1/", "TOOLS": ["b"], "TIMEOUT_SECONDS": 0}}},
        {"MODELS": ["echo"]},
        ["echo"],
    ],
)
def test_a_wrong_value_is_a_problem_with_a_hint(raw: Any) -> None:
    """A wrong value is a sentence with the accepted values, never a traceback."""
    found = problems(raw)
    assert any(kind == "value" for kind, _, _ in found), found
    assert all(hint for _, _, hint in found)


def test_no_model_is_a_problem_of_its_own() -> None:
    """The hint of a missing model is a setting that works."""
    assert problems({})[0][0] == "missing"


def test_testing_makes_every_model_the_echo_engine() -> None:
    """TESTING makes every model the echo engine, whatever MODELS holds."""
    settings, found = read({"MODELS": {"big": {"PATH": "org/huge"}}, "TESTING": True})
    assert found == ()
    assert settings.models["big"].model.path == "echo"
    assert list(read({"TESTING": True})[0].models) == ["echo"]


def test_a_models_engine_overrides_the_shared_one() -> None:
    """ENGINE holds for all models, and the model's own ENGINE overrides it."""
    raw = {
        "MODELS": {"a": {"PATH": "echo"}, "b": {"PATH": "echo", "ENGINE": {"MAX_NUM_SEQS": 2}}},
        "ENGINE": {"MAX_NUM_SEQS": 8, "BLOCK_SIZE": 16},
    }
    models = read(raw)[0].models
    assert (models["a"].engine.max_num_seqs, models["a"].engine.block_size) == (8, 16)
    assert (models["b"].engine.max_num_seqs, models["b"].engine.block_size) == (2, 16)


URL = "http://10.0.0.5:8000/v1"


def test_a_model_may_run_elsewhere() -> None:
    """A URL takes the place of PATH; the model's prompt and class are the site's all the same."""
    raw = {
        "URL": URL,
        "REMOTE_MODEL": "org/big",
        "API_KEY_ENV": "BIG_KEY",
        "SYSTEM": "Be brief.",
        "LATENCY_CLASS": "batch",
    }
    settings, found = read({"MODELS": {"big": raw}}, base_dir=BASE)
    assert found == ()
    served = settings.models["big"]
    assert (served.system, served.default_class, served.model.path) == ("Be brief.", "batch", URL)
    assert served.remote == RemoteConfig(alias="big", url=URL, remote_model="org/big", api_key_env="BIG_KEY")
    assert read({"MODELS": {"big": raw}, "TESTING": True})[0].models["big"].remote is None


def test_a_model_may_have_several_servers() -> None:
    """Each is an upstream with what it has of its own; the rest is the model's."""
    own = {"URL": "https://llm.example.org/v1/", "NAME": "rented", "WEIGHT": 2, "API_KEY_ENV": "RENTED_KEY"}
    raw = {"REMOTE_MODEL": "org/big", "API_KEY_ENV": "BIG_KEY", "UPSTREAMS": [{"URL": URL}, own]}
    settings, found = read({"MODELS": {"big": raw}}, base_dir=BASE)
    assert found == ()
    remote = settings.models["big"].remote
    assert remote is not None
    assert settings.models["big"].model.path == f"{URL}, https://llm.example.org/v1"
    assert [(one.label, one.weight, config.url, config.api_key_env) for one, config in remote.servers] == [
        ("10.0.0.5:8000", 1, URL, "BIG_KEY"),
        ("rented", 2, "https://llm.example.org/v1", "RENTED_KEY"),
    ]
    assert {config.model for _, config in remote.servers} == {"org/big"}
    assert read({"MODELS": {"big": raw}, "TESTING": True})[0].models["big"].remote is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"UPSTREAMS": []}, 'STREAMSERVE["MODELS"]["big"]["UPSTREAMS"] is []'),
        ({"UPSTREAMS": URL}, 'STREAMSERVE["MODELS"]["big"]["UPSTREAMS"] is'),
        ({"UPSTREAMS": [URL]}, 'STREAMSERVE["MODELS"]["big"]["UPSTREAMS"][0]'),
        ({"UPSTREAMS": [{"URL": URL}, {}]}, 'STREAMSERVE["MODELS"]["big"]["UPSTREAMS"][1]["URL"] is None'),
        ({"UPSTREAMS": [{"URL": "http://user:sk-1@host/v1"}]}, 'STREAMSERVE["MODELS"]["big"]["UPSTREAMS"][0]["URL"]'),
        ({"UPSTREAMS": [{"URL": URL, "WEIGHT": 0}]}, "weight is 0"),
        ({"UPSTREAMS": [{"URL": URL, "WEIGHT": 0.5}]}, '["WEIGHT"] is 0.5'),
        ({"UPSTREAMS": [{"URL": URL, "SERVER": "triton"}]}, '["SERVER"] is'),
        ({"UPSTREAMS": [{"URL": URL, "WIEGHT": 2}]}, "WIEGHT"),
        ({"UPSTREAMS": [{"URL": URL}, {"URL": URL}]}, "two UPSTREAMS have the name 10.0.0.5:8000"),
        ({"URL": URL, "UPSTREAMS": [{"URL": URL}]}, "a URL or UPSTREAMS, and not both"),
        ({"PATH": "org/big", "UPSTREAMS": [{"URL": URL}]}, "has UPSTREAMS and PATH"),
    ],
)
def test_wrong_upstreams_are_found(options: dict[str, Any], said: str) -> None:
    """The message names the key, and no login of an address."""
    _, found = read({"MODELS": {"big": options}}, base_dir=BASE)
    assert said in found[0].message
    assert "sk-1" not in str(found)


@pytest.mark.parametrize(
    "options",
    [
        {"URL": ""},
        {"URL": 5},
        {"URL": "10.0.0.5:8000"},
        {"URL": "ftp://10.0.0.5/v1"},
        {"URL": "http://"},
        {"URL": "http://host:99999/v1"},
        {"URL": "http://host/v1?key=1"},
        {"URL": "http://host/v1#x"},
        {"URL": "http://safe.example.org\\@evil.example.org/v1"},
        {"URL": URL, "PATH": "org/big"},
        {"URL": URL, "ENGINE": {"MAX_NUM_SEQS": 2}},
        {"URL": URL, "SERVER": "triton"},
        {"URL": URL, "MAX_CONCURRENT": 0},
        {"URL": URL, "SILENCE_SECONDS": 0},
        {"URL": URL, "LATENCY_CLASS": "fast"},
    ],
    ids=str,
)
def test_a_wrong_server_is_a_problem_with_a_hint(options: dict[str, Any]) -> None:
    """An address that routes cannot be appended to, a bound of nothing, and what an engine of ours needs."""
    found = problems({"MODELS": {"big": options}})
    assert [kind for kind, _, _ in found] == ["value"]
    assert all(hint for _, _, hint in found)


def test_a_password_in_an_address_is_not_repeated() -> None:
    """The message of the check has the host, and not what stands before it."""
    [(kind, message, hint)] = problems({"MODELS": {"big": {"URL": "http://me:secret@10.0.0.5/v1"}}})
    assert kind == "value"
    assert "secret" not in message + hint
    assert "API_KEY_ENV" in hint


def test_a_class_has_defaults() -> None:
    """An incomplete class has the default values, and every model's engine plans with the same classes."""
    settings, found = read({**ECHO, "CLASSES": {"chat": {"PACE": 8}}}, base_dir=BASE)
    assert found == ()
    chat = settings.classes["chat"]
    assert (chat.pace, chat.ttft_seconds) == (8.0, CLASSES["chat"].ttft_seconds)
    assert settings.classes["batch"] == CLASSES["batch"]
    assert settings.models["echo"].engine.classes == settings.classes


def test_models_and_routes_have_classes() -> None:
    """By name; what names none leaves it open."""
    raw = {"MODELS": {"a": {"PATH": "echo", "LATENCY_CLASS": "batch"}, "b": {"PATH": "echo"}}}
    settings, found = read({**raw, "ROUTE_CLASSES": {"chat_completions": "completion"}}, base_dir=BASE)
    assert found == ()
    assert [settings.models[alias].default_class for alias in "ab"] == ["batch", ""]
    assert settings.route_classes == {"chat_completions": "completion"}


def test_classes_have_the_names_that_requests_may_name() -> None:
    """The protocol knows the names, the engine their numbers, the site the routes."""
    assert tuple(CLASSES) == (*LATENCY_CLASSES, PREFILL_ONLY)
    assert {*ROUTES_WITH_CLASSES} <= {*(route.name for route in ROUTES), "websocket"}


def test_classes_are_no_engine_setting() -> None:
    """CLASSES inside ENGINE is an unknown key."""
    assert [kind for kind, _, _ in problems({**ECHO, "ENGINE": {"CLASSES": {}}})] == ["key"]


def test_the_field_of_thoughts_is_a_setting() -> None:
    """Thoughts are in both fields unless REASONING_FIELD is set; in tests too."""
    assert read(ECHO)[0].reasoning_field == "both"
    for testing in (False, True):
        assert read({**ECHO, "REASONING_FIELD": "reasoning", "TESTING": testing})[0].reasoning_field == "reasoning"


def test_tests_are_served_in_their_own_process() -> None:
    """TESTING overrides CLIENT, so that no engine outlives a test."""
    assert read({"CLIENT": "process", "TESTING": True})[0].client == "thread"


def test_a_request_waits_for_a_whole_drain() -> None:
    """By default a request waits a minute, and longer than an engine drains; a site's own value counts as it is."""
    assert read(ECHO)[0].streams.engine_wait_seconds == 60
    assert read({**ECHO, "ENGINE_PROCESS": {"DRAIN_SECONDS": 90}})[0].streams.engine_wait_seconds == 100
    assert read({**ECHO, "STREAMS": {"ENGINE_WAIT_SECONDS": 3}})[0].streams.engine_wait_seconds == 3


@pytest.mark.parametrize("debug", [True, False])
def test_engines_start_by_themselves_while_developing(debug: bool) -> None:
    """ENGINE_AUTOSTART left open, or None, is DEBUG; any other value holds."""
    assert read(ECHO, base_dir=BASE, debug=debug)[0].engine_autostart is debug
    for given, meant in {None: debug, True: True, False: False}.items():
        assert read({**ECHO, "ENGINE_AUTOSTART": given}, base_dir=BASE, debug=debug)[0].engine_autostart is meant


def test_the_state_folder_separates_two_sites(tmp_path: Path) -> None:
    """STATE_DIR, else `state` beside manage.py, separates two sites; without either no engine process can start."""
    own = read({**ECHO, "CLIENT": "process", "STATE_DIR": tmp_path}, base_dir=BASE)[0]
    usual = read({**ECHO, "CLIENT": "process"}, base_dir=BASE)[0]
    assert usual.state_dir == str(BASE / "state")
    assert own.engine_spec("echo").state_dir == str(tmp_path)
    assert own.engine_spec("echo").site != usual.engine_spec("echo").site
    assert [one.kind for one in read({**ECHO, "CLIENT": "process"})[1]] == ["missing"]


def test_an_engine_config_is_complete() -> None:
    """An engine's config has the model, the shared ENGINE under its own, and whether it starts by itself."""
    raw = {
        "MODELS": {"a": {"PATH": "echo"}, "b": {"PATH": "echo", "ENGINE": {"MAX_NUM_SEQS": 2}}},
        "ECHO_STEP_SECONDS": 0.5,
        "ENGINE_PROCESS": {"RUNTIME_DIR": "/run/ours", "MAX_FAILURES": 2},
    }
    settings = read(raw, base_dir=BASE, debug=True)[0]
    spec = settings.engine_spec("b")
    assert (spec.model.alias, spec.engine.max_num_seqs, spec.echo_step_seconds, spec.autostart) == ("b", 2, 0.5, True)
    assert (spec.runtime_dir, spec.max_failures) == ("/run/ours", 2)


def test_settings_are_read_again_when_a_test_changes_them() -> None:
    """`override_settings` works, and wrong settings raise where they are used."""
    assert get_settings().anonymous is False
    with override_settings(STREAMSERVE={"TESTING": True, "ANONYMOUS": True}):
        assert get_settings().anonymous is True
    with override_settings(STREAMSERVE={"ANONYMUS": True}), pytest.raises(ImproperlyConfigured, match="ANONYMOUS"):
        get_settings()
    assert get_settings().anonymous is False


@pytest.mark.parametrize(
    ("given", "log"),
    [({}, "file"), ({"LOG": "memory"}, "memory"), ({"LOG": "redis://127.0.0.1:6379/0"}, "redis://127.0.0.1:6379/0")],
)
def test_where_events_are_kept(given: Any, log: str) -> None:
    """Events are in a file that all processes share unless LOG is set; in tests they are always in memory."""
    settings, found = read({**ECHO, **given}, base_dir=BASE)
    assert (settings.log, found) == (log, ())
    assert read({**ECHO, **given, "TESTING": True})[0].log == "memory"


def test_a_log_needs_a_known_kind_and_a_folder() -> None:
    """A file log needs STATE_DIR; a log in memory, with the engine in the process, needs none."""
    assert [kind for kind, *_ in problems({**ECHO, "LOG": "postgres://x"})] == ["value"]
    inside = {**ECHO, "CLIENT": "thread"}
    assert [one.kind for one in read(inside)[1]] == ["missing"]
    assert read({**inside, "LOG": "memory"})[1] == ()


def test_mcp_servers_have_a_program_or_an_address() -> None:
    """Each entry names one of both and the tools that it offers; secrets are not shown with it."""
    given = {
        "files": {"COMMAND": "mcp-files", "ARGS": ["--root", "/srv"], "ENV": {"TOKEN": "t0k"}, "TOOLS": ["read"]},
        "search": {
            "URL": "https://tools.example.org/mcp",
            "HEADERS": {"Authorization": "Bearer t0k"},
            "TOOLS": ["find", "open"],
            "CONFIRM": ["open"],
            "TIMEOUT_SECONDS": 5,
        },
    }
    settings, found = read({**ECHO, "MCP_SERVERS": given}, base_dir=BASE)
    assert found == ()
    files, search = settings.mcp_servers["files"], settings.mcp_servers["search"]
    assert (files.command, files.args, files.env, files.tools) == (
        "mcp-files",
        ("--root", "/srv"),
        {"TOKEN": "t0k"},
        ("read",),
    )
    assert (search.url, search.confirm, search.timeout_seconds) == ("https://tools.example.org/mcp", ("open",), 5.0)
    assert "t0k" not in repr(settings)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *((key, 0) for key in ("BLOCK_SIZE", "NUM_BLOCKS", "KV_CACHE_BYTES", "MAX_MODEL_LEN", "MAX_NUM_SEQS")),
        *((key, 0) for key in ("MAX_ADMITTED", "MAX_NUM_BATCHED_TOKENS", "PREFILL_CHUNK", "DEFAULT_MAX_TOKENS")),
        ("NUM_BLOCKS", 1),
        ("NUM_BLOCKS", 10**12),
        ("BLOCK_SIZE", 10**30),
        ("MAX_NUM_SEQS", 4096),
    ],
)
def test_an_engine_that_could_compute_nothing_is_refused(key: str, value: int) -> None:
    """A number of ENGINE with which no answer could be computed is named where it stands, and only there."""
    shared = problems({**ECHO, "ENGINE": {key: value}})
    own = problems({"MODELS": {"echo": {"PATH": "echo", "ENGINE": {key: value}}}})
    assert {kind for kind, _, _ in [*shared, *own]} == {"value"}
    assert all(message.startswith('STREAMSERVE["ENGINE"]["') for _, message, _ in shared)
    assert all(message.startswith('STREAMSERVE["MODELS"]["echo"]["ENGINE"]["') for _, message, _ in own)


ODD = [
    None,
    0,
    -1,
    10**30,
    1.5,
    float("nan"),
    float("inf"),
    True,
    "x",
    "a\0",
    [],
    [None],
    {1: 2},
    {"": {}},
    b"x",
    object(),
]


@pytest.mark.parametrize("value", ODD, ids=[*map(repr, ODD[:-1]), "object()"])
def test_odd_values_are_named_by_their_place(value: object) -> None:
    """A value of any type under any key is taken or reported, and a report begins with the place in the settings."""
    keys = [field.name.upper() for field in dataclasses.fields(SiteConfig)]
    for raw in ({"MODELS": value}, *({**ECHO, key: value} for key in keys)):
        for _, message, hint in problems(raw):
            assert message.startswith("STREAMSERVE"), message
            assert hint


@pytest.mark.parametrize("key", ["KEEP_STREAMS_DAYS", "KEEP_CONVERSATIONS_DAYS", "KEEP_WATCHES_DAYS", "KEEP_JOBS_DAYS"])
def test_days_reach_back_to_a_date(key: str) -> None:
    """So many days that no date lies before them are refused with the limit."""
    ((_, message, hint),) = problems({**ECHO, key: 10**6})
    assert message == f'STREAMSERVE["{key}"] is 1000000.0.'
    assert "36,500" in hint
