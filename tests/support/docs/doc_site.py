"""A new Django site made by the README's own blocks, for the tests that run other pages in it.

It uses this checkout and an engine without weights, in a process that the site starts because DEBUG is on.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.docs.doc_blocks import Block, blocks_of
from tests.support.servers.ports import free_port
from tests.support.servers.web_servers import ROOT, Server, run_server, stop

README_SECTION = "Add it to your own site"
README_MODEL = "Qwen/Qwen3-0.6B"
# The port argument of each server.
PORT_OPTIONS = {"python": "{port} --noreload", "daphne": "-p {port}", "uvicorn": "--port {port}"}


class DocSite:
    """`mysite` in a folder. `output` has what each command printed."""

    def __init__(self, folder: Path, *, apply_readme: bool = True) -> None:
        self.folder, self.project = folder, folder / "mysite"
        self.output: dict[str, str] = {}
        self.env: dict[str, str] = {}
        if apply_readme:
            self.run("django-admin startproject mysite", folder)
            for block in blocks_of("README.md", README_SECTION):
                if block.file_name:
                    self.write(block, "mysite")
            self.run("python manage.py migrate -v 0")

    @property
    def environ(self) -> dict[str, str]:
        """Return an environment with this checkout and this Python's programs, and without this test's settings."""
        kept = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
        binaries = Path(sys.executable).parent
        paths = {
            "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": f"{self.project}{os.pathsep}{ROOT}",
        }
        return {**kept, **paths, "PYTHONUNBUFFERED": "1", **self.env}

    def write(self, block: Block, folder: str = "", replacing: Mapping[str, str] = {}) -> Path:
        """Append the block to its file, which is made with its packages if it does not exist."""
        path = self.project / folder / block.file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".py":
            for parent in path.relative_to(self.project).parents:
                if parent != Path("."):
                    (self.project / parent / "__init__.py").touch()
        code = block.code.replace(README_MODEL, "echo")
        for old, new in replacing.items():
            assert old in code, old
            code = code.replace(old, new)
        with path.open("a") as file:
            file.write(f"\n{code}")
        return path

    def run(self, command: str, cwd: Path | None = None, *, ok: bool = True) -> str:
        """Run a command of a page; return its stdout and stderr."""
        done = subprocess.run(
            command,
            shell=True,
            cwd=cwd or self.project,
            env=self.environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=180,
        )
        assert (done.returncode == 0) == ok, f"{command}: {done.returncode}\n{done.stdout}"
        self.output[command] = done.stdout
        return done.stdout

    @contextlib.contextmanager
    def serve(self, command: str) -> Iterator[Server]:
        """Run a server of a page on a free port while the block runs."""
        port = free_port()
        arguments = shlex.split(f"{command} {PORT_OPTIONS[command.split()[0]].format(port=port)}")
        arguments[0] = str(Path(sys.executable).parent / arguments[0])
        with run_server(arguments, port, self.project, self.environ) as server:
            yield server

    @contextlib.contextmanager
    def background(self, arguments: list[str]) -> Iterator[None]:
        """Run a command that is no web server while the block runs."""
        command = [str(Path(sys.executable).parent / arguments[0]), *arguments[1:]]
        process = subprocess.Popen(command, cwd=self.project, env=self.environ, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            stop(process)

    def close(self) -> None:
        """End the engine that the site has started, if it runs."""
        command = [sys.executable, "manage.py", "streamserve_engine", "--stop"]
        subprocess.run(command, cwd=self.project, env=self.environ, capture_output=True, timeout=60)
