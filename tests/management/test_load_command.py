"""Laws of `manage.py streamserve_load`: it measures this site with keys of its own, and asks no other site."""

from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test.utils import override_settings

from streamserve.models import ApiKey
from streamserve.testing import DaphneServer

pytestmark = pytest.mark.django_db(transaction=True)

# Budgets that no busy machine misses.
CLASSES = {name: {"TTFT_SECONDS": 1000.0, "TOTAL_SECONDS": 1000.0} for name in ("chat", "completion", "document")}
ASKED = {"rate": 8.0, "seconds": 1.0, "latency_class": "completion"}


def load(url: str, **options: Any) -> str:
    out = io.StringIO()
    call_command("streamserve_load", url, stdout=out, stderr=io.StringIO(), **{**ASKED, **options})
    return out.getvalue()


@pytest.fixture
def server() -> Iterator[DaphneServer]:
    with DaphneServer() as server:
        yield server


def test_it_measures_this_site(server: DaphneServer, tmp_path: Path) -> None:
    """Every reader comes and is served; the run is drawn, told to people, and told to programs; no key is left."""
    with override_settings(STREAMSERVE={"TESTING": True, "CLASSES": CLASSES}):
        figures = json.loads(load(server.url, json=True, svg=tmp_path / "run.svg"))
        told = load(server.url)
    [completion] = figures["classes"]
    assert (completion["name"], completion["num_readers"], completion["num_whole"]) == ("completion", 8, 8)
    assert completion["first_in_time"] == completion["whole_in_time"] == 1.0
    assert 0 < completion["ttft"]["p50"] <= completion["ttft"]["p99"] < completion["total"]["p99"]
    assert completion["itl"]["p50"] is not None
    assert (figures["num_readers"], figures["num_unserved"]) == (8, {})
    assert (tmp_path / "run.svg").read_text().startswith("<svg ")
    assert "8 readers in 1 s" in told
    assert "100 % of first tokens within 1000 s" in told
    assert not ApiKey.objects.exists()


def test_the_gaps_have_a_budget(server: DaphneServer) -> None:
    """--gaps judges by the class, --gaps SECONDS by so many; without it they are shown. --fail fails by them."""
    budgets = {name: {**each, "GAP_P95_SECONDS": 1000.0} for name, each in CLASSES.items()}
    with override_settings(STREAMSERVE={"TESTING": True, "CLASSES": budgets}):
        kept = json.loads(load(server.url, json=True, gaps=True, fail=True))
        shown = load(server.url, fail=True)
        told = io.StringIO()
        with pytest.raises(CommandError, match="budgets do not hold"):
            call_command(
                "streamserve_load", server.url, "--gaps", "1e-9", "--fail", stdout=told, stderr=io.StringIO(), **ASKED
            )
    [completion] = kept["classes"]
    assert (kept["judges_gaps"], completion["gap_p95_budget"], completion["gaps_in_time"]) == (True, 1000.0, 1.0)
    assert "100 % had 95 % of their gaps within 1000 s (not judged without --gaps)" in shown
    assert "Furthest off is the tail of the gaps of completion" in told.getvalue()


def test_what_the_site_refuses_is_counted(server: DaphneServer) -> None:
    """Prompts longer than its model takes: nobody is served, the code and the message are shown, --fail fails."""
    small = {"TESTING": True, "ENGINE": {"MAX_MODEL_LEN": 16}}
    with DaphneServer(settings={"STREAMSERVE": small}) as server:
        told = io.StringIO()
        with pytest.raises(CommandError, match="budgets do not hold"):
            call_command("streamserve_load", server.url, stdout=told, stderr=io.StringIO(), fail=True, **ASKED)
    assert "Not served: 8 × " in told.getvalue()
    assert "goodput 0.00 of 8.00" in told.getvalue()
    assert not ApiKey.objects.exists()


class Stranger(BaseHTTPRequestHandler):
    """Another site: it takes no key, and writes down what it is asked."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self.send_response(401)
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *args: Any) -> None:
        return None


@pytest.fixture
def stranger() -> Iterator[tuple[str, list[str]]]:
    """The address of a site that does not know this database, and the paths that it was asked for."""
    Stranger.asked = []
    server = HTTPServer(("127.0.0.1", 0), Stranger)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", Stranger.asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_site_that_does_not_take_its_key_is_asked_nothing_else(stranger: tuple[str, list[str]]) -> None:
    """The host may be this machine's: only a site with this database takes the key. One question, then a sentence."""
    url, asked = stranger
    with pytest.raises(CommandError, match="does not take a key of this site's database"):
        load(url)
    assert asked == ["/v1/models"]
    assert not ApiKey.objects.exists()


@override_settings(ALLOWED_HOSTS=["*", "ours.example.org"])
@pytest.mark.parametrize(
    ("url", "options", "words"),
    [
        ("http://example.org", {}, "--other-site"),
        ("http://theirs.example.org", {}, "not in ALLOWED_HOSTS"),
        ("http://example.org", {"other_site": True}, "needs a key"),
        ("http://127.0.0.1:1", {"key": "k" * 20}, "goes with --other-site"),
        ("http://127.0.0.1:1", {"rate": 1e5}, "100,000 requests, and --max-requests allows 500"),
        ("http://127.0.0.1:1", {"max_requests": 7}, "8 requests, and --max-requests allows 7"),
        ("http://u:p@127.0.0.1", {}, "no address of a site"),
        ("http://127.0.0.1:1", {"svg": Path("/no/such/folder/run.svg")}, "no folder /no/such/folder"),
    ],
)
def test_what_is_refused_before_anything_is_asked(
    monkeypatch: pytest.MonkeyPatch, url: str, options: dict[str, Any], words: str
) -> None:
    """Other hosts, too many requests, wrong options: a sentence that names the way out, and no key is made."""
    monkeypatch.delenv("STREAMSERVE_KEY", raising=False)
    with pytest.raises(CommandError, match=words):
        load(url, **options)
    assert not ApiKey.objects.exists()


def test_a_site_that_is_not_there_is_named() -> None:
    """A port at which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(CommandError, match=r"No site at .* Is it running"):
            load(url)


def test_a_model_that_the_site_lacks_is_named(server: DaphneServer) -> None:
    """With those that it has."""
    with pytest.raises(CommandError, match=r"no model 'ecco'\. It has: echo"):
        load(server.url, model="ecco")
