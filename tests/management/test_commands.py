"""Laws of the commands: what they print, what they refuse, and that refusals are sentences."""

from __future__ import annotations

import io
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from django.core.management import CommandError, call_command
from django.test.utils import override_settings

from streamserve.models import ApiKey
from streamserve.testing import DaphneServer
from tests.support.docs import demo_site

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.django_db(transaction=True)


def run(*args: str, **options: Any) -> str:
    out = io.StringIO()
    call_command(*args, stdout=out, stderr=io.StringIO(), **options)
    return out.getvalue()


def test_a_key_is_made_listed_and_revoked(alice: Any) -> None:
    """A key is shown once; the list has only its prefix."""
    key = run("streamserve_key", "create", "--user", "alice", "--name", "laptop", "--scope", "chat", "--days", "3")
    row = ApiKey.objects.get()
    assert ApiKey.objects.find_active(key.strip()) == row
    assert (row.user, row.scopes) == (alice, ["chat"])
    assert row.expires_at is not None
    listed = run("streamserve_key", "list")
    assert row.prefix in listed
    assert "laptop" in listed
    assert key.strip() not in listed
    run("streamserve_key", "revoke", row.prefix)
    assert "revoked" in run("streamserve_key", "list", "--user", "alice")


def test_a_key_is_made_for_some_models(review: None) -> None:
    """The list shows them; a name that is none is refused with the nearest."""
    run("streamserve_key", "create", "--name", "narrow", "--models", "echo", "--models", "review")
    assert ApiKey.objects.get().allowed_models == ["echo", "review"]
    assert "echo,review" in run("streamserve_key", "list")
    with pytest.raises(CommandError, match=r"no model or pipeline 'reviw'\. Did you mean 'review'"):
        run("streamserve_key", "create", "--models", "reviw")
    assert ApiKey.objects.count() == 1


@pytest.mark.parametrize("column", [0, 1])
def test_a_key_is_revoked_by_what_the_list_shows(column: int) -> None:
    """By its id or its prefix; a number that is no id is refused as any other text."""
    run("streamserve_key", "create", "--name", "first")
    run("streamserve_key", "create", "--name", "second")
    shown = {line.split()[-1]: line.split() for line in run("streamserve_key", "list").splitlines()[1:]}
    run("streamserve_key", "revoke", shown["second"][column])
    assert {row.name: row.state for row in ApiKey.objects.all()} == {"first": "active", "second": "revoked"}
    for wrong in (shown["second"][column], "9" * 18, "9" * 40):
        with pytest.raises(CommandError, match="No active key"):
            run("streamserve_key", "revoke", wrong)


def test_a_given_key_is_accepted_once() -> None:
    """A second key with the same text is refused by name."""
    assert run("streamserve_key", "create", "--key", "my-own-key-0123456789").strip() == "my-own-key-0123456789"
    with pytest.raises(CommandError, match="already"):
        run("streamserve_key", "create", "--key", "my-own-key-0123456789")
    run("streamserve_key", "revoke", "my-own-key-0123456789")
    assert ApiKey.objects.get().state == "revoked"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("create", "--key", "short"), "16 to 128"),
        (("create", "--user", "nobody"), "createsuperuser"),
        (("create", "--days", "0"), "1 to 36500"),
        (("create", "--days", "99999999999"), "1 to 36500"),
        (("list", "--user", "nobody"), "no user"),
        (("revoke", "nothing0"), "streamserve_key list"),
    ],
)
def test_refusals_name_the_way_out(args: tuple[str, ...], words: str) -> None:
    """A refusal is a sentence without a traceback."""
    with pytest.raises(CommandError, match=words):
        run("streamserve_key", *args)


def test_an_empty_list_names_the_next_step() -> None:
    """An empty list names the command that makes a key."""
    assert "streamserve_key create" in run("streamserve_key", "list")


@pytest.mark.parametrize("command", ["streamserve_key", "streamserve_chat", "streamserve_engine"])
def test_help_is_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command has --help."""
    with pytest.raises(SystemExit) as caught:
        call_command(command, "--help")
    assert caught.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_chat_answers_from_an_engine_of_its_own() -> None:
    """The chat command needs neither server nor database; greedy twice is the same."""
    args = ("streamserve_chat", "--prompt", "hello", "--max-tokens", "9", "--temperature", "0")
    assert run(*args) == run(*args) != "\n"
    with pytest.raises(CommandError, match="MODELS has: echo"):
        run("streamserve_chat", "--model", "nope", "--prompt", "x")


def test_chat_uses_a_running_site(hard_server: DaphneServer, lonely_key: str) -> None:
    """The answer is that of the wire; refusals are sentences."""
    ask_args = ("--prompt", "hello", "--max-tokens", "9", "--temperature", "0")
    args = ("streamserve_chat", "--url", hard_server.url, *ask_args)
    answer = run(*args, "--key", lonely_key)
    headers = {"Authorization": f"Bearer {lonely_key}"}
    ask = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 9, "temperature": 0, "format": "text"}
    by_hand = httpx.post(f"{hard_server.url}/streams", json=ask, headers=headers, trust_env=False).text
    assert answer == by_hand + "\n"
    with pytest.raises(CommandError, match="unknown, expired or revoked"):
        run(*args, "--key", "x" * 20)


def test_chat_names_an_unreachable_server() -> None:
    """A refused connection and an invalid address each end in a sentence."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(CommandError, match="Is the site up"):
        run("streamserve_chat", "--url", f"127.0.0.1:{port}", "--prompt", "x")
    with pytest.raises(CommandError, match="no address"):
        run("streamserve_chat", "--url", "ftp://x", "--prompt", "x")


@pytest.mark.parametrize("client", ["thread", "process"])
def test_ctrl_c_stops_the_answer_and_not_the_chat(client: str, tmp_path: Path) -> None:
    """Ctrl-C ends the answer, the next question is answered, and the end of the input exits with 0."""
    command = [sys.executable, "manage.py", "streamserve_chat", "--max-tokens", "3000"]
    environ = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", "PYTHONUNBUFFERED": "1"}
    if client == "process":
        environ = demo_site.environment(tmp_path)
    talk = subprocess.Popen(
        command, cwd=ROOT, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert talk.stdin is not None
    assert talk.stdout is not None
    for _ in range(2):
        talk.stdin.write(b"tell me\n")
        talk.stdin.flush()
        said = os.read(talk.stdout.fileno(), 100)
        assert said
        talk.send_signal(signal.SIGINT)
        while b"[stopped]\n" not in said:
            said += os.read(talk.stdout.fileno(), 65536)
    _rest, errors = talk.communicate(timeout=30)
    assert talk.returncode == 0, errors
    if client == "process":
        assert demo_site.manage(tmp_path, "streamserve_engine", "--stop").returncode == 0
    assert demo_site.processes_of(tmp_path) == set()


def test_migrations_are_complete() -> None:
    """Every change of a model has its migration."""
    run("makemigrations", "--check", "--dry-run", verbosity=0)


def test_the_chat_command_needs_a_model() -> None:
    """The checks report wrong settings before the command runs."""
    from django.core.management.base import SystemCheckError

    with override_settings(STREAMSERVE={"MODEL": {}}), pytest.raises(SystemCheckError, match="E001"):
        call_command("check")
