"""`streamserve_doctor` where no proxy is: addresses that lead elsewhere, what is refused, and what is printed."""

from __future__ import annotations

import io
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test.utils import override_settings

from streamserve.conf import get_settings
from streamserve.doctor.examination import CHECKS
from streamserve.management.commands.streamserve_doctor import _model
from streamserve.models import ApiKey
from streamserve.testing import DaphneServer
from streamserve.web.probe import Plan, token_for
from tests.support.servers.ports import free_port

pytestmark = pytest.mark.django_db(transaction=True)


def run(*arguments: str) -> tuple[int, str]:
    """Return exit status and output."""
    out = io.StringIO()
    try:
        call_command("streamserve_doctor", *arguments, stdout=out, stderr=io.StringIO())
    except SystemExit as ended:
        return int(str(ended.code)), out.getvalue()
    return 0, out.getvalue()


def test_nothing_is_found_at_the_web_server_itself(hard_server: DaphneServer) -> None:
    """Through the site's middleware, on daphne, with no proxy; the key is deleted."""
    status, out = run(hard_server.url, "--no-answers", "--silence", "0.5")
    assert (status, "0 found, 2 could not be told" in out) == (2, True), out
    assert not ApiKey.objects.exists()


def test_only_what_is_named_is_examined(hard_server: DaphneServer) -> None:
    """Each check has a line that begins with its state, and the exit status is 0 where all is well."""
    status, out = run(hard_server.url, "--only", "websocket", "--only", "http")
    assert [line.split()[:2] for line in out.splitlines() if line.startswith("ok")] == [
        ["ok", "reach"],
        ["ok", "http"],
        ["ok", "websocket"],
    ]
    assert status == 0


class Elsewhere(BaseHTTPRequestHandler):
    """A site that is not ours."""

    def do_GET(self) -> None:
        status = int(self.path.split("/")[1])
        self.send_response(status)
        self.send_header("Location", "https://www.example.org/streams/doctor?token=secret")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/404", "it is not this site"),
        ("/301", "redirects to https://www.example.org/streams/doctor. Examine"),
        ("/502", "no web process"),
        ("/400", "ALLOWED_HOSTS"),
    ],
)
def test_an_address_that_leads_elsewhere_is_named(elsewhere: str, path: str, words: str) -> None:
    """Then no other check is made, and the token is not shown."""
    status, out = run(elsewhere + path)
    flat = " ".join(out.split())
    assert (status, words in flat, "secret" in flat) == (1, True, False), out
    assert not any(line.split()[1:2] == [check] for line in out.splitlines() for check in CHECKS)


class Tired(BaseHTTPRequestHandler):
    """A proxy that passes one request on, and is then overloaded."""

    upstream = ""
    num_asked = 0

    def do_GET(self) -> None:
        type(self).num_asked += 1
        if self.num_asked > 1:
            self.send_error(503)
            return
        with urllib.request.urlopen(self.upstream + self.path) as answer:
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.end_headers()
            self.wfile.write(answer.read())

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


def test_a_probe_that_is_refused_tells_nothing(hard_server: DaphneServer) -> None:
    """No fault is found in a response that is no probe: the checks could not tell, and say why."""
    Tired.upstream, Tired.num_asked = hard_server.url, 0
    with HTTPServer(("127.0.0.1", 0), Tired) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        only = [option for check in CHECKS if check != "websocket" for option in ("--only", check)]
        status, out = run(f"http://127.0.0.1:{server.server_port}", "--no-answers", "--silence", "0.5", *only)
        server.shutdown()
        thread.join()
    assert status == 2, out
    assert out.count("A probe was answered with status 503.") == 7, out


def test_an_address_that_does_not_answer_is_named() -> None:
    """In a sentence."""
    status, out = run(f"http://127.0.0.1:{free_port()}")
    assert (status, "cannot be asked" in out) == (1, True)


def test_a_site_with_another_secret_is_named(hard_server: DaphneServer) -> None:
    """The doctor runs in another project, or the site has not been restarted."""
    with override_settings(SECRET_KEY="another"):
        status, out = run(hard_server.url)
    assert (status, "SECRET_KEY" in " ".join(out.split())) == (1, True), out


@pytest.mark.parametrize("url", ["example.org", "ftp://example.org", "https://a:b@example.org", "https://x/?y=1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    """With an example."""
    with pytest.raises(CommandError, match=r"Give it as https://example\.org"):
        run(url)


@pytest.mark.parametrize("arguments", [("--silence", "0"), ("--silence", "900"), ("--model", "nope")])
def test_wrong_options_are_refused(arguments: tuple[str, str]) -> None:
    """Before anything is asked."""
    with pytest.raises(CommandError, match=r"--silence is|There is no model"):
        run("http://127.0.0.1:1", *arguments)


def test_a_model_that_the_key_may_not_use_is_named(transactional_db: Any) -> None:
    """The doctor's key belongs to no user; without --model the first that it may use is asked."""
    staff = {"PATH": "echo", "PERMISSION": "staff"}
    refused = pytest.raises(CommandError, match=r"'big' does not let the doctor's key in.*--model")
    with override_settings(STREAMSERVE={"TESTING": True, "MODELS": {"big": staff}}), refused:
        run("http://127.0.0.1:1")
    with override_settings(STREAMSERVE={"TESTING": True, "MODELS": {"big": staff, "small": {"PATH": "echo"}}}):
        assert _model(get_settings(), None) == "small"


async def test_the_probe_needs_a_token_of_this_site(async_client: Any) -> None:
    """Without it, or with one that is altered, it says what to do."""
    for token in ("", token_for(Plan())[:-1]):
        response = await async_client.get("/streams/doctor", {"token": token})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "probe_token_refused")
    assert (await async_client.post("/streams/doctor")).status_code == 405
