"""The doctor through real proxies: each planted fault is found, its proxy and line are named, and nothing else is."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection
from django.test.utils import override_settings

from streamserve.doctor.examination import CHECKS
from streamserve.doctor.lines import LINES, UNTRIED
from tests.support.servers.proxies import PROXIES, run
from tests.support.servers.web_servers import Server, uvicorn, wait_until_ready
from tests.support.sites import doctor_settings

pytestmark = [pytest.mark.proof, pytest.mark.django_db(transaction=True), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def site(django_db_setup: None) -> Iterator[Server]:
    """One web process for all proxies, as docs/deploy.md starts it, on this test run's database."""
    env = {
        "DJANGO_SETTINGS_MODULE": "tests.support.sites.doctor_settings",
        "DOCTOR_DATABASE": str(connection.settings_dict["NAME"]),
    }
    with uvicorn("streamserve.routing:application", "--proxy-headers", env=env) as server:
        wait_until_ready(server.url)
        yield server


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """The doctor runs in the site's own project."""
    with override_settings(STREAMSERVE=doctor_settings.STREAMSERVE):
        yield


def examine(*arguments: str) -> dict[str, Any]:
    """Return what the command prints for programs."""
    out = io.StringIO()
    try:
        call_command("streamserve_doctor", *arguments, "--json", stdout=out, stderr=io.StringIO())
        status = 0
    except SystemExit as ended:
        status = int(str(ended.code))
    return {**json.loads(out.getvalue()), "status": status}


def faults(outcome: Mapping[str, Any]) -> set[str]:
    return {verdict["fault"] for verdict in outcome["verdicts"] if verdict["state"] == "found"}


@pytest.mark.parametrize("proxy", ["nginx", "Apache", "Caddy", "HAProxy"])
def test_nothing_is_found_behind_a_right_proxy(site: Server, proxy: str) -> None:
    """Every check is ok, and the proxy is named. What Apache cannot do is a limit, which is no fault."""
    with run(proxy, site.port, {}) as url:
        outcome = examine(url)
    others = [verdict["fault"] or verdict["said"] for verdict in outcome["verdicts"] if verdict["state"] != "ok"]
    assert others == (["whole_disconnect_unseen"] if proxy == "Apache" else [])
    assert {verdict["check"] for verdict in outcome["verdicts"]} == {"reach", *CHECKS}
    assert (outcome["status"], outcome["addresses"][0]["hops"]) == (0, [proxy])


# In each proxy's configuration: a line beside which others may stand.
_NGINX, _APACHE, _CADDY, _HAPROXY = "gzip off;", "SetEnv no-gzip 1", "    }\n}", "default_backend web"
# Proxy; parts of its configuration and what stands in their place; what is found.
PLANTED: list[tuple[str, dict[str, str], set[str]]] = [
    # nginx passes chunks at once: what it is told to buffer it collects of HTTP/1.0, which is its default.
    (
        "nginx",
        {
            "proxy_buffering off;": "proxy_buffering on; proxy_ignore_headers X-Accel-Buffering;",
            "proxy_http_version 1.1;": "",
            "proxy_set_header Upgrade $to_upgrade;": "",
        },
        {"buffered", "http10", "no_upgrade"},
    ),
    (
        "nginx",
        {
            _NGINX: "gzip on; gzip_types text/event-stream; gzip_min_length 0; gzip_proxied any;"
            "proxy_hide_header Content-Encoding; proxy_hide_header X-Stream-Id;",
            "proxy_set_header X-Forwarded-For $remote_addr;": 'proxy_set_header X-Forwarded-For "";',
        },
        {"compressed", "stream_id_lost", "address_lost"},
    ),
    (
        "nginx",
        {"proxy_read_timeout 1h;": "proxy_read_timeout 1s;", "$remote_addr;": "$http_x_forwarded_for;"},
        {"cut_in_silence", "socket_cut", "address_claimed"},
    ),
    (
        "nginx",
        {
            "proxy_set_header Host $http_host;": "proxy_set_header Host localhost;",
            _NGINX: 'proxy_set_header Last-Event-ID ""; proxy_hide_header Content-Type; proxy_ignore_client_abort on;'
            "add_header Content-Type text/plain; proxy_hide_header Cache-Control; expires 1h;",
        },
        {"host_changed", "last_event_id_lost", "content_type_changed", "cacheable", "whole_disconnect_unseen"},
    ),
    ("nginx", {_NGINX: 'proxy_set_header Authorization "";'}, {"authorization_lost", "socket_refused"}),
    (
        "Apache",
        {_APACHE: 'ExtFilterDefine all mode=output cmd="/usr/bin/sort -s -k 99"\nSetOutputFilter all'},
        {"buffered"},
    ),
    (
        "Apache",
        {
            _APACHE: "SetOutputFilter DEFLATE\nSetEnv force-proxy-request-1.0 1\nRequestHeader unset Last-Event-ID",
            "RequestHeader unset X-Forwarded-For early": "",
        },
        {"compressed", "http10", "no_upgrade", "address_claimed", "last_event_id_lost"},
    ),
    (
        "Apache",
        {
            _APACHE: "Header unset X-Stream-Id\nHeader set Cache-Control max-age=60\n"
            "RequestHeader unset Authorization\nHeader set Content-Type text/plain\nProxyAddHeaders Off",
            "ProxyTimeout 3600": "ProxyTimeout 1",
            "ProxyPreserveHost On": "",
            " upgrade=websocket": "",
        },
        {
            *("cut_in_silence", "host_changed", "stream_id_lost", "cacheable", "content_type_changed", "no_upgrade"),
            *("authorization_lost", "address_lost"),
        },
    ),
    ("Caddy", {_CADDY: "buffer_responses\n" + _CADDY}, {"buffered", "no_upgrade"}),
    (
        "Caddy",
        {
            _CADDY: "header_down -Content-Encoding\nheader_up -Last-Event-ID\nheader_up Host localhost\n"
            "transport http {\nread_timeout 1s\n}\n}\n"
            "encode {\ngzip\nminimum_length 1\nmatch header Content-Type text/*\n}\n}"
        },
        {"compressed", "last_event_id_lost", "host_changed", "cut_in_silence", "socket_cut"},
    ),
    (
        "Caddy",
        {
            _CADDY: "flush_interval -1\nheader_up X-Forwarded-For {http.request.header.X-Forwarded-For}\n"
            "header_down Cache-Control max-age=60\n" + _CADDY
        },
        {"whole_disconnect_unseen", "address_claimed", "cacheable"},
    ),
    (
        "Caddy",
        {
            _CADDY: "header_up -Upgrade\nheader_up -X-Forwarded-For\nheader_down -X-Stream-Id\n"
            "header_up -Authorization\nheader_down Content-Type text/plain\n" + _CADDY
        },
        {
            *("no_upgrade", "address_lost", "stream_id_lost", "content_type_changed", "authorization_lost"),
        },
    ),
    (
        "HAProxy",
        {_HAPROXY: f"http-response wait-for-body time 10s\nhttp-request del-header Authorization\n{_HAPROXY}"},
        {"buffered", "authorization_lost", "socket_refused"},
    ),
    (
        "HAProxy",
        {
            "http-request set-header X-Forwarded-For %[src]": "",
            "timeout server 1h": "timeout server 1s",
            "timeout tunnel 1h": "timeout tunnel 1s",
        },
        {"cut_in_silence", "socket_cut", "address_claimed"},
    ),
    (
        "HAProxy",
        {
            "http-request set-header X-Forwarded-For %[src]": "http-request del-header X-Forwarded-For",
            "option abortonclose": "",
            _HAPROXY: "http-request set-header Host localhost\nhttp-request del-header Last-Event-ID\n"
            "http-request del-header Upgrade\nhttp-response set-header Content-Type text/plain\n"
            f"http-response set-header Cache-Control max-age=60\nhttp-response del-header X-Stream-Id\n{_HAPROXY}",
        },
        {
            *("address_lost", "whole_disconnect_unseen", "host_changed", "last_event_id_lost", "no_upgrade"),
            *("content_type_changed", "cacheable", "stream_id_lost"),
        },
    ),
]


@pytest.mark.parametrize(
    ("proxy", "changes", "planted"), PLANTED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_planted_faults_are_found_and_nothing_else(
    site: Server, proxy: str, changes: dict[str, str], planted: set[str]
) -> None:
    """Each fault has its name, its proxy and its line; the exit status is 1."""
    with run(proxy, site.port, changes) as url:
        outcome = examine(url)
    assert faults(outcome) == planted, json.dumps(outcome, indent=1)
    found = [verdict for verdict in outcome["verdicts"] if verdict["state"] == "found"]
    assert {tuple(verdict["hops"]) for verdict in found} == {(proxy,)}
    assert {verdict["fault"] for verdict in found if not verdict["lines"][proxy]} <= {"socket_refused"}
    assert outcome["status"] == 1


def test_every_line_of_these_proxies_is_tried() -> None:
    """The table says which are not."""
    elsewhere = {
        ("nginx", "no_http2"),
        ("nginx", "scheme_unknown"),
        ("Apache", "whole_disconnect_unseen"),
    }  # above, below
    tried = {(proxy, fault) for proxy, _, planted in PLANTED for fault in planted} | elsewhere
    assert {(proxy, fault) for fault, lines in LINES.items() for proxy in lines if proxy in PROXIES} - tried == UNTRIED


def test_the_hop_is_found_by_the_addresses_within(site: Server) -> None:
    """A fault that is there at the inner address lies in the inner proxy, any other in the outer one."""
    with (
        run("Caddy", site.port, {_CADDY: "header_down -X-Stream-Id\n" + _CADDY}) as inner,
        run("nginx", int(inner.rpartition(":")[2]), {_NGINX: 'proxy_set_header Last-Event-ID "";'}) as url,
    ):
        outcome = examine(url, inner, "--only", "request", "--only", "response")
    found = {verdict["fault"]: verdict for verdict in outcome["verdicts"] if verdict["state"] == "found"}
    assert set(found) == {"last_event_id_lost", "stream_id_lost"}
    assert found["last_event_id_lost"]["hops"] == ["nginx"]
    assert found["stream_id_lost"]["lines"] == {"Caddy": "remove header_down -X-Stream-Id"}


@pytest.mark.parametrize("is_right", [True, False])
def test_a_site_behind_tls(site: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_right: bool) -> None:
    """HTTP/2 is offered, and Django knows that it is https; or neither."""
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    protocols = "ssl http2" if is_right else "ssl"
    after_listen = ";\n    server_name example.org;"
    changes = {after_listen: f" {protocols}; ssl_certificate {certificate}; ssl_certificate_key {key}{after_listen}"}
    if not is_right:
        changes["proxy_set_header X-Forwarded-Proto $scheme;"] = ""
    with run("nginx", site.port, changes) as url:
        outcome = examine(url.replace("http:", "https:"), "--no-answers", "--silence", "0.5")
    assert faults(outcome) == (set() if is_right else {"no_http2", "scheme_unknown"})
