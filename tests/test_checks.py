"""Laws of the system checks: each mistake has its id and a hint; a right site has none."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from django.apps import apps as django_apps
from django.conf import settings
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.test.utils import modify_settings, override_settings

from project.settings import HELPDESK
from streamserve import checks
from streamserve.asgi.flow import install
from streamserve.engine.model.load.source import total_memory
from streamserve.models import Stream as StreamRow
from streamserve.streams.lease.liveness import Liveness
from streamserve.web import site
from tests.support.models.large import large_model
from tests.support.servers.redis_server import RedisServer
from tests.support.streams.log_lines import captured_events

APPS = settings.INSTALLED_APPS
WAY_OUT = "Name the folder that PEFT has written."


def ids() -> set[str]:
    found = run_checks()
    assert all(one.hint for one in found if one.id and one.id.startswith("streamserve"))
    return {str(one.id) for one in found if str(one.id).startswith("streamserve.")}


def test_a_right_site_has_no_findings() -> None:
    """The settings of these tests pass every check."""
    assert ids() == set()


@pytest.mark.parametrize(
    ("raw", "id_"),
    [
        ({"TESTING": True, "ANONYMUS": True}, "streamserve.E001"),
        ({"TESTING": True, "ANONYMOUS": 1}, "streamserve.E002"),
        ({}, "streamserve.E003"),
        ({"MODELS": {"m": {"PATH": "/no/such/folder"}}}, "streamserve.E005"),
        ({"TESTING": True, "MODELS": {"m": {"PATH": "echo", "PERMISSION": "everyone"}}}, "streamserve.E002"),
        ({"TESTING": True, "MODELS": {"m": {"PATH": "echo", "PERMISSION": ids}}}, None),
        ({"TESTING": True, "MODELS": {"m": {"PATH": "echo", "PERMISSION": "auth.view_user"}}}, None),
        ({"TESTING": True, "MODELS": {"m": {"PATH": "echo", "PERMISSION": "shop.view_bill"}}}, "streamserve.E012"),
        ({"TESTING": True, "MODELS": {"m": {"PATH": "echo", "PERMISSION": "tests.settings.no"}}}, "streamserve.E012"),
        ({"TESTING": True, "TENANT": 7}, "streamserve.E002"),
        ({"TESTING": True, "TENANT": "tests.settings.DEBUG"}, "streamserve.E013"),
        ({"TESTING": True, "TENANT": "tests.conftest.until"}, "streamserve.E013"),
        ({"TESTING": True, "MCP_SERVERS": {"a": {"COMMAND": "/no/such", "TOOLS": ["b"]}}}, "streamserve.E015"),
        ({"TESTING": True, "TENANT": "tests.test_checks.ids"}, None),
        ({"TESTING": True, "ANONYMOUS": True}, "streamserve.W005"),
        ({"TESTING": True, "CONVERSATIONS": True}, "streamserve.W017"),
    ],
)
def test_wrong_settings_are_found(raw: Any, id_: str | None) -> None:
    """E001 unknown key, E002 wrong value, E003 no model, E005 no folder, E012 and E013 no function (or an async one),
    W005 anonymous outside DEBUG; None: there is nothing to find.
    """
    with override_settings(STREAMSERVE=raw):
        assert id_ in ids() if id_ else ids() == set()


@pytest.mark.parametrize("raw", [{"TESTING": True, "ANONYMUS": True}, {"TESTING": True, "ANONYMOUS": 1}, {}])
def test_a_typo_has_no_other_findings(raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong settings are named alone: what they would have set up is no finding of its own."""
    monkeypatch.setattr(install, "serves_stock", lambda: True)  # as after a start with these settings
    with override_settings(STREAMSERVE=raw):
        assert not {id_ for id_ in ids() if id_.startswith("streamserve.W")}


def test_a_misspelt_path_is_named(settings: Any) -> None:
    """A model without PATH and URL has its unknown keys named, with the nearest known one."""
    settings.STREAMSERVE = {"TESTING": True, "MODELS": {"a": {"PTH": "echo"}, "b": {"ULR": "http://127.0.0.1:1"}}}
    hints = {str(one.hint) for one in run_checks() if one.id == "streamserve.E001"}
    assert hints == {"Did you mean 'PATH'?", "Did you mean 'URL'?"}


@override_settings(ROOT_URLCONF="tests.support.apps.no_routes")
def test_a_site_without_the_routes_is_found() -> None:
    """W014: the include is missing from urls.py."""
    assert ids() == {"streamserve.W014"}


@override_settings(ROOT_URLCONF="tests.support.apps.no_such_module")
def test_urls_that_cannot_be_imported_are_not_ours_to_report() -> None:
    """Django names a broken urls.py; W014 says nothing of it."""
    assert list(checks._check_urls()) == []


def test_a_ready_page_needs_a_login_that_is_there() -> None:
    """W016: CHAT_PAGE names users, and LOGIN_URL leads nowhere; a login elsewhere is not ours to look for."""
    with override_settings(STREAMSERVE={"TESTING": True, "CHAT_PAGE": "staff"}):
        assert ids() == {"streamserve.W016"}
        for login in ("admin:login", "/admin/login/", "https://id.example.org/"):
            with override_settings(LOGIN_URL=login):
                assert ids() == set()
    with override_settings(STREAMSERVE={"TESTING": True, "CHAT_PAGE": "everybody"}):
        assert ids() == {"streamserve.E002"}


def test_a_hub_id_is_not_looked_for_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a path must be a folder; the missing packages are found for both."""
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with override_settings(STREAMSERVE={"MODELS": {"m": {"PATH": "org/name"}}}):
        assert ids() == {"streamserve.E004"}


@pytest.mark.parametrize(("path", "is_wrong"), [("nowhere.function", True), ("json.dumps", False)])
def test_a_moderation_that_is_no_function_is_found(path: str, is_wrong: bool) -> None:
    """E017."""
    with override_settings(STREAMSERVE={"MODELS": {"echo": {"PATH": "echo"}}, "MODERATION": path}):
        assert ("streamserve.E017" in ids()) is is_wrong


def test_an_embedding_model_needs_its_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """E004 and E005 as a model of MODELS; E016: its folder is of sentence-transformers."""
    models = {"MODELS": {"echo": {"PATH": "echo"}}, "EMBEDDING_MODELS": {"m": {"PATH": str(tmp_path)}}}
    monkeypatch.setattr(checks, "find_spec", lambda name: ModuleSpec(name, None))
    with override_settings(STREAMSERVE=models):
        assert ids() == {"streamserve.E005"}
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "modules.json").write_text("[]")
        monkeypatch.setattr(checks, "find_spec", lambda name: None)
        assert ids() == {"streamserve.E004", "streamserve.E016"}


@pytest.mark.parametrize(
    ("engine", "device", "is_found"),
    [
        ({"MEMORY_SHARE": 0.6}, "cpu", True),
        ({"MEMORY_SHARE": 0.5}, "cuda", False),
        ({}, "cuda", True),
        ({"KV_CACHE_BYTES": 1 << 30}, "cuda", False),
        ({}, "auto", False),
    ],
)
def test_models_that_want_too_much_memory_together_are_found(engine: Any, device: str, is_found: bool) -> None:
    """W007: two engines on one machine do not share their memory budgets."""
    models = {alias: {"PATH": "org/name", "DEVICE": device, "ENGINE": engine} for alias in "ab"}
    with override_settings(STREAMSERVE={"MODELS": models}):
        assert ("streamserve.W007" in ids()) is is_found
    with override_settings(STREAMSERVE={"MODELS": {"a": models["a"]}}):
        assert "streamserve.W007" not in ids()


def test_a_model_that_is_larger_than_the_budget_is_found(tmp_path: Path) -> None:
    """E019: with both sizes. W018: a budget needs engine processes. W020: it is more than there is."""
    given = {"MODELS": {"desk": {"PATH": str(HELPDESK)}}, "STATE_DIR": tmp_path}
    with override_settings(STREAMSERVE={**given, "ENGINE_PROCESS": {"MEMORY_BYTES": 1 << 34}}):
        assert not {"streamserve.E019", "streamserve.W018"} & set(ids())
    with override_settings(STREAMSERVE={**given, "ENGINE_PROCESS": {"MEMORY_BYTES": 1 << 44}}):
        assert "streamserve.W020" in ids()
    with override_settings(STREAMSERVE={**given, "ENGINE_PROCESS": {"MEMORY_BYTES": 1 << 29}}):
        [error] = [one for one in run_checks() if one.id == "streamserve.E019"]
        assert "takes 0.8" in str(error.hint)
        assert "have 0.50 GiB" in str(error.hint)
    with override_settings(STREAMSERVE={**given, "CLIENT": "thread", "ENGINE_PROCESS": {"SLEEP_AFTER_SECONDS": 60}}):
        assert "streamserve.W018" in ids()


def test_a_model_that_is_larger_than_the_machine_is_found(tmp_path: Path) -> None:
    """W021: where no budget is set, and the engine is not on a GPU. A budget has E019."""
    folder = large_model(tmp_path / "large", 2 * total_memory())
    models = {"chat": {"PATH": str(folder), "DEVICE": "cpu"}, "desk": {"PATH": str(HELPDESK)}}
    given = {"MODELS": models, "STATE_DIR": tmp_path}
    for client in ("process", "thread"):
        with override_settings(STREAMSERVE={**given, "CLIENT": client}):
            [warning] = [one for one in run_checks() if one.id == "streamserve.W021"]
            assert "'chat'" in warning.msg
            assert '"QUANTIZE": "int4"' in str(warning.hint)
    with override_settings(STREAMSERVE={**given, "ENGINE_PROCESS": {"MEMORY_BYTES": 1 << 30}}):
        assert {"streamserve.E019", "streamserve.W021"} & set(ids()) == {"streamserve.E019"}


@pytest.mark.parametrize(
    ("options", "is_found"),
    [({"DEVICE": "cpu"}, True), ({"DEVICE": "cpu", "NATIVE": False}, False), ({"DEVICE": "cuda"}, False)],
)
def test_a_cpu_without_a_compiler_is_found(
    options: Any, is_found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W015: what the kernels would bring, unless there is a GPU or they are not wanted."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with override_settings(STREAMSERVE={"MODELS": {"m": {"PATH": "org/name", **options}}}):
        assert ("streamserve.W015" in ids()) is is_found


def test_a_web_process_that_would_compile_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W015: an engine in a web process takes a library that is there, and makes none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    models = {"m": {"PATH": "org/name", "DEVICE": "cpu"}}
    with override_settings(STREAMSERVE={"MODELS": models, "CLIENT": "thread", "STATE_DIR": str(tmp_path)}):
        assert "streamserve.W015" in ids()


@pytest.mark.parametrize(
    "config", [{"STATE_DIR": "a/b"}, {"STATE_DIR": "a"}, {"ENGINE_PROCESS": {"RUNTIME_DIR": "a/b"}}]
)
def test_a_folder_that_cannot_be_written_is_named(config: dict[str, Any], tmp_path: Path) -> None:
    """W019 names the folder's setting and what stands in the way; a folder that can be made is right."""
    config = {
        key: {k: str(tmp_path / v) for k, v in x.items()} if isinstance(x, dict) else str(tmp_path / x)
        for key, x in config.items()
    }
    config = {"STATE_DIR": str(tmp_path / "state"), **config}
    with override_settings(STREAMSERVE={"MODELS": {"m": {"PATH": "echo"}}, **config}):
        assert "streamserve.W019" not in ids()
        (tmp_path / "a").write_text("a file")
        (found,) = [one for one in run_checks() if one.id == "streamserve.W019"]
        assert found.msg.startswith("STREAMSERVE[")
        assert f"{tmp_path / 'a'} is a file" in found.msg


def test_what_another_user_has_made_in_the_state_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W019: a site that root has served before leaves files that its own user cannot write to."""
    (tmp_path / "streams.sqlite3").touch()
    (tmp_path / "workers").mkdir()
    with override_settings(STREAMSERVE={"MODELS": {"m": {"PATH": "echo"}}, "STATE_DIR": str(tmp_path)}):
        assert "streamserve.W019" not in ids()
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "workers")
        (found,) = [one for one in run_checks() if one.id == "streamserve.W019"]
    assert found.msg.endswith(f"this user may not write to {tmp_path / 'workers'}.")


def test_a_folder_that_exists_is_right(tmp_path: Path) -> None:
    """A folder with a config.json passes; one without is named, as the parent of a model's folder."""
    with override_settings(STREAMSERVE={"MODELS": {"m": {"PATH": str(tmp_path)}}}):
        messages = [one.msg for one in run_checks() if one.id == "streamserve.E005"]
        assert messages == [f"The folder {tmp_path} of the model 'm' has no config.json."]
        (tmp_path / "config.json").write_text("{}")
        assert "streamserve.E005" not in ids()
    assert checks.is_folder_like("./model")
    assert checks.is_folder_like("model.gguf")
    assert not checks.is_folder_like("org/name")


def test_an_adapter_is_read_by_its_config(tmp_path: Path) -> None:
    """E020: no folder, no weights, no config, or what cannot be computed; each with what the load would say."""
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    model.mkdir()
    (model / "config.json").write_text("{}")
    models = {"large": {"PATH": str(model), "ADAPTERS": {"legal": str(adapter)}}}

    def found() -> list[str]:
        messages = [one for one in run_checks() if one.id == "streamserve.E020"]
        assert {one.msg for one in messages} <= {"The adapter 'legal' of the model 'large' cannot be loaded."}
        return [str(one.hint) for one in messages]

    with override_settings(STREAMSERVE={"MODELS": models}):
        assert found() == [f"{adapter} has no adapter_model.safetensors, so it is no adapter. {WAY_OUT}"]
        adapter.mkdir()
        (adapter / "adapter_model.safetensors").write_bytes(b"")
        config = adapter / "adapter_config.json"
        assert found() == [f"{config} cannot be read (FileNotFoundError), so {adapter} is no adapter. {WAY_OUT}"]
        config.write_text('{"peft_type": "IA3"}')
        assert "not of a LoRA adapter" in found()[0]
        config.write_text('{"peft_type": "LORA", "use_dora": true}')
        assert "use_dora True" in found()[0]
        config.write_text('{"peft_type": "LORA", "lora_alpha": 16}')
        assert found() == []
    with override_settings(STREAMSERVE={"MODELS": {"echo": {"PATH": "echo", "ADAPTERS": {"legal": "/no/such"}}}}):
        assert found() == []  # the echo engine reads no weights


def test_the_folder_of_a_draft_model_is_checked(tmp_path: Path) -> None:
    """E005, as of the model itself; a hub id is no folder."""
    (tmp_path / "config.json").write_text("{}")
    for draft, messages in (
        (str(tmp_path), []),
        ("org/name", []),
        ("/no/such", ["The draft model of 'large' has no folder at /no/such."]),
    ):
        with override_settings(STREAMSERVE={"MODELS": {"large": {"PATH": str(tmp_path), "DRAFT": draft}}}):
            assert [one.msg for one in run_checks() if one.id == "streamserve.E005"] == messages


def test_a_gguf_file_is_read_by_its_header(tmp_path: Path) -> None:
    """A file that is none is an error that says why; a name without a file is an absent model, not a hub id."""
    path = tmp_path / "model.gguf"
    with override_settings(STREAMSERVE={"MODELS": {"m": {"PATH": str(path)}}}):
        assert "streamserve.E005" in ids()
        path.write_bytes(b"GGUF" + bytes(3))
        (found,) = [one for one in run_checks() if one.id == "streamserve.E005"]
        assert "model.gguf cannot be read as a GGUF file" in str(found.hint)


@pytest.mark.parametrize(
    ("overrides", "id_"),
    [
        ({"ASGI_APPLICATION": None}, "streamserve.E006"),
        ({"ASGI_APPLICATION": "no.such.module"}, "streamserve.E006"),
        ({"ASGI_APPLICATION": "tests.site.bare_asgi.application"}, "streamserve.W001"),
        ({"MIDDLEWARE": ["whitenoise.middleware.WhiteNoiseMiddleware"]}, "streamserve.W004"),
    ],
)
def test_the_surroundings_are_checked(overrides: dict[str, Any], id_: str) -> None:
    """E006 no ASGI application, W001 not wrapped, W004 WhiteNoise."""
    with override_settings(**overrides):
        assert id_ in {one.id for one in checks.check_site(None)}


def test_an_unwrapped_asgi_file_beside_the_settings_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W001 names the asgi.py that `daphne mysite.asgi:application` would serve, though ASGI_APPLICATION is right."""
    package = tmp_path / "bare_site"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "asgi.py").write_text("from tests.site.bare_asgi import application\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with override_settings(WSGI_APPLICATION="bare_site.wsgi.application"):
        [found] = [one for one in checks.check_site(None) if one.id == "streamserve.W001"]
    assert found.msg.startswith("bare_site.asgi.application is not wrapped")
    assert "bare_site/asgi.py" in str(found.hint)


def test_other_middleware_around_ours_is_no_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An application that another ASGI middleware wraps still streams."""
    code = "from starlette.middleware.gzip import GZipMiddleware\nfrom streamserve.routing import application as app\n"
    (tmp_path / "outer_asgi.py").write_text(f"{code}application = GZipMiddleware(app)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with override_settings(ASGI_APPLICATION="outer_asgi.application"):
        assert checks.check_site(None) == []


def test_uvicorn_without_a_websocket_library_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """W011: `pip install uvicorn` alone answers WebSockets with 404."""
    found = checks.find_spec
    absent = ("websockets", "wsproto")
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name in absent else found(name))
    assert ids() == {"streamserve.W011"}


def test_daphne_must_come_first() -> None:
    """E007 after staticfiles, W002 not there at all."""
    with modify_settings(INSTALLED_APPS={"remove": ["daphne"]}):
        assert "streamserve.W002" in {one.id for one in checks.check_site(None)}
    last = [*(name for name in APPS if name != "daphne"), "daphne"]
    with override_settings(INSTALLED_APPS=last):
        assert "streamserve.E007" in {one.id for one in checks.check_site(None)}


def test_persistent_connections_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """W006: under ASGI persistent connections are kept by threads that never return."""
    monkeypatch.setitem(settings.DATABASES["default"], "CONN_MAX_AGE", 600)
    assert {one.id for one in checks.check_databases(None)} == {"streamserve.W006"}


def test_sqlite_without_wal_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W012, at `check --deploy` only; by the options, and by the file where they say nothing."""

    def found(options: dict[str, Any]) -> bool:
        monkeypatch.setitem(settings.DATABASES, "default", {"ENGINE": "django.db.backends.sqlite3", **options})
        return "streamserve.W012" in {one.id for one in checks.check_sqlite(None)}

    plain, wal = tmp_path / "plain.sqlite3", tmp_path / "wal.sqlite3"
    for path, mode in ((plain, "DELETE"), (wal, "WAL")):
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(f"PRAGMA journal_mode={mode}")
            connection.execute("CREATE TABLE a (b)")
    assert found({"NAME": plain})
    assert found({"NAME": tmp_path / "none.sqlite3"})
    assert not found({"NAME": plain, "OPTIONS": {"init_command": "PRAGMA journal_mode=WAL"}})
    assert not found({"NAME": wal})
    assert not found({"NAME": ":memory:"})


def test_a_machine_without_unix_locks_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows has no fcntl: one sentence with the way out, in place of an ImportError."""
    monkeypatch.setattr("streamserve.apps.find_spec", lambda name: None)
    with pytest.raises(ImproperlyConfigured, match="WSL 2"):
        django_apps.get_app_config("streamserve").ready()


async def test_the_state_folder_ignores_itself_in_git(tmp_path: Path, transactional_db: Any) -> None:
    """A new STATE_DIR inside a repository adds nothing to it; a folder that was there is left alone."""
    for folder in (tmp_path / "new", tmp_path):
        conf = {"MODELS": {"m": {"PATH": "echo"}}, "CLIENT": "thread", "STATE_DIR": str(folder)}
        with override_settings(STREAMSERVE=conf):
            site.get_site()
            await site.reset()
    assert (tmp_path / "new" / ".gitignore").read_text() == "*\n"
    assert not (tmp_path / ".gitignore").exists()


def test_a_storage_that_sites_serve_is_found(tmp_path: Path) -> None:
    """Files of batches, and of questions, are private: in a folder of their own, and not in MEDIA_ROOT."""
    backend = "django.core.files.storage.FileSystemStorage"
    places = {"media": tmp_path / "media" / "files", "own": tmp_path / "own"}
    aliases = {name: {"BACKEND": backend, "OPTIONS": {"location": path}} for name, path in places.items()}
    for alias, found in (("media", {"streamserve.W013"}), ("own", set()), ("none", {"streamserve.E011"})):
        for key in ("BATCHES", "ATTACHMENTS"):
            settings = {"TESTING": True, key: {"STORAGE": alias}}
            with override_settings(STREAMSERVE=settings, STORAGES=aliases, MEDIA_ROOT=str(tmp_path / "media")):
                assert ids() == found


def test_a_redis_log_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """`manage.py check` reports the missing package before the first request does."""
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with override_settings(STREAMSERVE={"MODELS": {"echo": {"PATH": "echo"}}, "LOG": "redis://127.0.0.1"}):
        assert ids() == {"streamserve.E008"}


def test_a_model_elsewhere_needs_httpx_and_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """E009 and E010; it needs neither a folder nor the packages of an engine of ours."""
    model = {"URL": "http://127.0.0.1:9/v1", "API_KEY_ENV": "NO_SUCH_KEY"}
    with override_settings(STREAMSERVE={"MODELS": {"big": model}}):
        assert ids() == {"streamserve.E010"}
        monkeypatch.setenv("NO_SUCH_KEY", "sk-1")
        assert ids() == set()
        monkeypatch.setattr(checks, "find_spec", lambda name: None)
        assert ids() == {"streamserve.E009"}


def test_each_upstream_needs_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """E010 for each variable once, though several upstreams share it."""
    servers = [{"URL": f"http://127.0.0.1:{port}/v1", "API_KEY_ENV": "KEY_A"} for port in (7, 8)]
    servers.append({"URL": "http://127.0.0.1:9/v1", "API_KEY_ENV": "KEY_B"})
    monkeypatch.setenv("KEY_B", "sk-1")
    with override_settings(STREAMSERVE={"MODELS": {"big": {"UPSTREAMS": servers}}}):
        assert [one.msg for one in run_checks() if one.id == "streamserve.E010"] == [
            "The environment has no KEY_A, which the model 'big' takes its key from."
        ]


def test_a_site_served_by_stock_daphne_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """W008: FlowServer is off, or does not fit this daphne."""
    import daphne.server
    from daphne.cli import CommandLineInterface

    monkeypatch.setattr(CommandLineInterface, "server_class", daphne.server.Server)
    assert ids() == {"streamserve.W008"}


def redis_complaints(url: str) -> list[str]:
    models = {"MODELS": {"m": {"PATH": "echo"}}, "LOG": url}
    with override_settings(STREAMSERVE=models):
        assert not any(one.id == "streamserve.W009" for one in run_checks())
        found = run_checks(include_deployment_checks=True)
    return [one.msg for one in found if one.id == "streamserve.W009"]


def test_a_redis_that_loses_answers_is_found(tmp_path: Path) -> None:
    """W009, at `check --deploy` only: a Redis that keeps answers passes, one that is away is named."""
    with RedisServer(tmp_path) as redis:
        assert redis_complaints(redis.url) == []
        redis.command("CONFIG SET appendonly no")
        redis.command("CONFIG SET maxmemory-policy allkeys-lru")
        complaints = redis_complaints(redis.url)
        assert [word in text for word, text in zip(("appendonly no", "allkeys-lru"), complaints, strict=True)]
    [complaint] = redis_complaints(redis.url)
    assert "cannot be reached" in complaint


async def test_a_process_logs_complaints_at_startup(tmp_path: Path) -> None:
    """Each complaint is one line of the log, and the process serves all the same."""
    with RedisServer(tmp_path, appendonly="no") as redis:
        conf = {"MODELS": {"m": {"PATH": "echo"}}, "CLIENT": "thread", "LOG": redis.url, "STATE_DIR": str(tmp_path)}
        with override_settings(STREAMSERVE=conf), captured_events() as lines:
            site.get_site()
            [checking] = [task for task in asyncio.all_tasks() if task.get_name() == "check of the log"]
            assert len(await checking) == 1
            await site.reset()
    [line] = [line for line in lines if line["event"] == "stream_log_unsafe"]
    assert "appendonly no" in line["complaint"]


@pytest.mark.django_db
def test_several_hosts_without_redis_are_found(tmp_path: Path) -> None:
    """W010, at `check --deploy` only, by the rows of running streams: this host's pass, and so does no producer."""
    row = {"model": "echo", "owner": "user:1", "tenant": "user:1"}
    here, there = Liveness(tmp_path / "workers"), Liveness(tmp_path / "there")
    producers = [here.own_id, "", there.own_id]
    for name, producer in zip("abc", producers, strict=True):
        StreamRow.objects.create(id=name * 32, log_id=name * 12, producer=producer, **row)
    models = {"MODELS": {"m": {"PATH": "echo"}}, "LOG": "file", "STATE_DIR": str(tmp_path)}
    with override_settings(STREAMSERVE=models):
        assert "streamserve.W010" not in ids()
        [found] = [one for one in run_checks(include_deployment_checks=True) if one.id == "streamserve.W010"]
        assert there.host in found.msg
        assert here.host not in found.msg
        StreamRow.objects.finish("c" * 32)
        assert not [one for one in run_checks(include_deployment_checks=True) if one.id == "streamserve.W010"]
    here.close()
    there.close()
