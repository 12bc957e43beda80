"""A real nginx from docs/deploy/nginx.conf: that file, with other ports and folders, on loopback and without root."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.servers.ports import free_port
from tests.support.servers.web_servers import ROOT, Server, stop, wait_until_listening

CONF = ROOT / "docs" / "deploy" / "nginx.conf"
_MAIN = """\
{user}
daemon off;
pid {folder}/pid;
error_log stderr;
worker_processes 2;
events {{ worker_connections 4096; }}
http {{
    include /etc/nginx/mime.types;
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/site.conf;
}}
"""


def nginx_path() -> str:
    """Return where nginx is; skip, or fail if everything is required, when there is none."""
    path = shutil.which("nginx", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")
    if path is None:
        missing = "nginx is missing: apt-get install -y nginx-light"
        if os.environ.get("STREAMSERVE_REQUIRE") == "all":
            pytest.fail(missing)
        pytest.skip(missing)
    return path


def site_conf(port: int, upstream_ports: Sequence[int], static_root: Path) -> str:
    """Return the documented file for these ports; a single worker fills both places."""
    assert 1 <= len(upstream_ports) <= 2, "the file names two workers"
    text = CONF.read_text()
    changes = {
        "listen 80;": f"listen 127.0.0.1:{port};",
        "127.0.0.1:8001": f"127.0.0.1:{upstream_ports[0]}",
        "127.0.0.1:8002": f"127.0.0.1:{upstream_ports[-1]}",
        "/srv/mysite/static/": f"{static_root}/",
    }
    for old, new in changes.items():
        assert old in text, f"{CONF.name} does not contain {old!r}"
        text = text.replace(old, new)
    return text


@contextlib.contextmanager
def nginx(upstream_ports: Sequence[int], *, static_root: Path = Path("/nonexistent")) -> Iterator[str]:
    """Run nginx before workers on these ports of 127.0.0.1 (one or two); yield its URL."""
    path = nginx_path()
    with tempfile.TemporaryDirectory(prefix="nginx-") as name, (Path(name) / "log").open("wb") as log:
        folder, port = Path(name), free_port()
        user = f"user {getpass.getuser()};" if os.getuid() == 0 else ""
        (folder / "nginx.conf").write_text(_MAIN.format(folder=folder, user=user))
        (folder / "site.conf").write_text(site_conf(port, upstream_ports, static_root))
        command = [path, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", "stderr"]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        server = Server(port, process, Path(log.name))
        try:
            wait_until_listening(server)
            yield server.url
        finally:
            stop(process)
