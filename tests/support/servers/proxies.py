"""Real proxies before one web process: nginx, Apache, Caddy and HAProxy of Debian, on loopback and without root.

`PROXIES` has the right configuration of each; `run` takes it with a line replaced, so that a test can plant a fault.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.servers.nginx_server import CONF
from tests.support.servers.ports import free_port
from tests.support.servers.web_servers import Server, stop, wait_until_listening

_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin"
_MODULES = (
    "mpm_event:mod_mpm_event",
    "authz_core:mod_authz_core",
    "proxy:mod_proxy",
    "proxy_http:mod_proxy_http",
    "proxy_wstunnel:mod_proxy_wstunnel",
    "headers:mod_headers",
    "filter:mod_filter",
    "deflate:mod_deflate",
    "ext_filter:mod_ext_filter",
    "env:mod_env",
    "setenvif:mod_setenvif",
)

_NGINX_MAIN = """\
{user}
daemon off;
pid {folder}/pid;
error_log stderr;
worker_processes 1;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/site.conf;
}}
"""
_APACHE = """\
ServerRoot {folder}
ServerName {host}
PidFile {folder}/pid
ErrorLog /dev/stderr
Mutex file:{folder} default
{user}
{modules}
Listen {host}
ProxyPreserveHost On
ProxyTimeout 3600
RequestHeader unset X-Forwarded-For early
RequestHeader set X-Forwarded-Proto expr=%{{REQUEST_SCHEME}}
SetEnv no-gzip 1
ProxyPass / http://127.0.0.1:{upstream}/ upgrade=websocket flushpackets=on
"""
_CADDY = """\
{{
    admin off
    auto_https off
    storage file_system {folder}
}}
http://{host} {{
    reverse_proxy 127.0.0.1:{upstream} {{
    }}
}}
"""
_HAPROXY = """\
defaults
    mode http
    timeout connect 2s
    timeout client 60s
    timeout server 1h
    timeout tunnel 1h
    option abortonclose
frontend site
    bind {host}
    http-request set-header X-Forwarded-For %[src]
    default_backend web
backend web
    server one 127.0.0.1:{upstream}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """A proxy: its command, its Debian package, and the file that it is started with."""

    command: str
    package: str
    file: str
    arguments: tuple[str, ...]
    text: str


PROXIES: Mapping[str, Proxy] = {
    "nginx": Proxy(
        command="nginx",
        package="nginx-light",
        file="site.conf",
        arguments=("-p", "{folder}", "-c", "{folder}/nginx.conf", "-e", "stderr"),
        text="",  # docs/deploy/nginx.conf
    ),
    "Apache": Proxy(
        command="apache2",
        package="apache2",
        file="apache.conf",
        arguments=("-DFOREGROUND", "-f", "{folder}/apache.conf"),
        text=_APACHE,
    ),
    "Caddy": Proxy(
        command="caddy",
        package="caddy",
        file="Caddyfile",
        arguments=("run", "--adapter", "caddyfile", "--config", "{folder}/Caddyfile"),
        text=_CADDY,
    ),
    "HAProxy": Proxy(
        command="haproxy",
        package="haproxy",
        file="haproxy.cfg",
        arguments=("-db", "-f", "{folder}/haproxy.cfg"),
        text=_HAPROXY,
    ),
}


def path_of(proxy: Proxy) -> str:
    """Return where a proxy is; skip, or fail if everything is required, when it is missing."""
    path = shutil.which(proxy.command, path=_PATH)
    if path is None:
        missing = f"{proxy.command} is missing: apt-get install -y {proxy.package}"
        if os.environ.get("STREAMSERVE_REQUIRE") == "all":
            pytest.fail(missing)
        pytest.skip(missing)
    return path


@contextlib.contextmanager
def run(name: str, upstream: int, changes: Mapping[str, str]) -> Iterator[str]:
    """Run a proxy before the web process on port `upstream`; yield its URL.

    `changes` are parts of its configuration and what stands in their place.
    """
    proxy, port = PROXIES[name], free_port()
    path = path_of(proxy)
    with tempfile.TemporaryDirectory(prefix="proxy-") as folder_name:
        folder = Path(folder_name)
        folder.chmod(0o755)  # Apache's children are another user
        (folder / proxy.file).write_text(_changed(_text(name, folder, port, upstream), changes))
        if name == "nginx":
            user = f"user {getpass.getuser()};" if os.getuid() == 0 else ""
            (folder / "nginx.conf").write_text(_NGINX_MAIN.format(folder=folder, user=user))
        command = [path, *(argument.format(folder=folder) for argument in proxy.arguments)]
        with (folder / "log").open("wb") as log:
            env = {**os.environ, "HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
            try:
                wait_until_listening(Server(port, process, folder / "log"))
                yield f"http://127.0.0.1:{port}"
            finally:
                stop(process)


def _text(name: str, folder: Path, port: int, upstream: int) -> str:
    if name == "nginx":
        text = CONF.read_text().replace("listen 80;", f"listen 127.0.0.1:{port};")
        return text.replace("127.0.0.1:8001", f"127.0.0.1:{upstream}").replace(
            "127.0.0.1:8002", f"127.0.0.1:{upstream}"
        )
    modules = [one.split(":") for one in _MODULES]
    return PROXIES[name].text.format(
        folder=folder,
        host=f"127.0.0.1:{port}",
        upstream=upstream,
        user="User nobody\nGroup nogroup" if os.getuid() == 0 else "",
        modules="\n".join(f"LoadModule {key}_module /usr/lib/apache2/modules/{file}.so" for key, file in modules),
    )


def _changed(text: str, changes: Mapping[str, str]) -> str:
    for old, new in changes.items():
        assert old in text, f"the configuration does not contain {old!r}"
        text = text.replace(old, new)
    return text
